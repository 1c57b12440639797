"""The plan: what a run would do, with numbers, commands, consents and costs. Built and shown before anything starts.

Its `key` is the hash of config and selection: two runs with the same key are the same wish, so the second attaches to
the first or resumes it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from backend.agent.pilots import pilot_state
from backend.pilot.consent import effective_severity
from backend.pilot.decide import Decision, Selection, decide
from backend.pilot.history import History
from backend.runs.atomic import read_json
from backend.runs.fingerprint import digest
from backend.runs.layout import Home
from backend.stages.base import Stage, StageContext, StagePlan
from backend.stages.disk import budget
from backend.stages.figures import GB
from backend.stages.registry import STAGES


def make_plan(ctx: StageContext, name: str, selection: Selection) -> dict[str, Any]:
    """The whole plan as JSON (the form is documented in docs/cli.md)."""
    config = ctx.config.model_dump(mode="json")
    key = digest({"config": config, "selection": selection.as_json()})
    decisions = decide(ctx, selection, History(ctx.home))
    products = {decision.stage: decision.product for decision in decisions if decision.product is not None}
    ctx = replace(ctx, products=products, pipeline=_same_wish(ctx.home, key))
    stages = [_entry(stage, decision, ctx) for stage, decision in zip(STAGES, decisions, strict=True)]
    running = [entry for entry in stages if entry["action"] == "run"]
    return {
        "v": 1,
        "key": key,
        "name": name,
        "home": str(ctx.home.path),
        "host": ctx.config.host.address,
        "python": ctx.python,
        "config": config,
        "selection": selection.as_json(),
        "stages": stages,
        "switches": _switches([entry["name"] for entry in running], ctx),
        "destructive": [item for entry in running for item in entry["destructive"]],
        "totals": _totals(running, ctx),
        # An unfinished pipeline of the same wish may still owe its last act: the deployed server that is to be kept.
        "nothing_to_do": not running and ctx.pipeline is None,
    }


def _same_wish(home: Home, key: str) -> Path | None:
    """The newest pipeline with this key, if it has not come to its end: the one that a start would resume."""
    for pipeline in reversed(home.pipelines()):
        if (read_json(pipeline.plan) or {}).get("key") == key:
            return None if pilot_state(pipeline)["state"] == "succeeded" else pipeline.path
    return None


def _entry(stage: Stage, decision: Decision, ctx: StageContext) -> dict[str, Any]:
    plan = stage.plan(ctx) if decision.action == "run" else StagePlan()
    severity = effective_severity(stage, plan)
    return {
        "name": stage.name,
        "severity": severity,
        "kind": stage.kind,
        "action": decision.action,
        "why": decision.why,
        "fingerprint": decision.fingerprint,
        "lines": list(plan.lines),
        "effects": list(plan.effects),
        "numbers": dict(plan.numbers),
        "launch": asdict(plan.launch) if plan.launch else None,
        "destructive": [dict(item) for item in plan.destructive],
        "consent": _consent(stage, severity, plan),
    }


def _consent(stage: Stage, severity: int, plan: StagePlan) -> dict[str, Any] | None:
    if severity == 0:
        return None
    flags = {1: ["--yes"], 2: [f"--allow {stage.name}"]}.get(severity) or [
        f"--allow {stage.name}={item['sha']}" for item in plan.destructive
    ]
    return {"severity": severity, "flags": flags, "satisfied_by_yes": severity == 1, "optional": plan.optional}


def _switches(running: list[str], ctx: StageContext) -> list[dict[str, Any]]:
    """Every change of server mode, with what its reload costs."""
    load = f"{ctx.config.server.expected_load_s:,.0f} s to load"
    out = []
    if "launch" in running:
        out.append({"before": "launch", "from": "none", "to": "extract", "cost": load})
    if "train" in running:
        out.append({"before": "train", "from": "extract", "to": "none", "cost": "frees the GPUs"})
    if "deploy" in running:
        out.append({"before": "deploy", "from": "none", "to": "serve+draft", "cost": load})
    if "bench" in running:
        modes = {"none": "serve", "untrained": "serve+draft (untrained)"}
        at = "serve+draft"
        for baseline in ctx.config.bench.baselines:
            out.append({"before": f"bench baseline {baseline}", "from": at, "to": modes[baseline], "cost": load})
            at = modes[baseline]
        if ctx.config.deploy.keep and ctx.config.bench.baselines:
            out.append({"before": "the end", "from": at, "to": "serve+draft", "cost": load})
    return out


def _totals(running: list[dict[str, Any]], ctx: StageContext) -> dict[str, Any]:
    if not running:
        return {}
    needed = budget(ctx)
    return {
        "tokens": needed.tokens.tokens,
        "tokens_source": needed.tokens.source,
        "disk_gb": round(needed.needed / GB, 2),
        "disk": needed.describe(),
        "hours": round(sum(float(entry["numbers"].get("hours", 0)) for entry in running), 2),
        "gpu_hours": round(sum(float(entry["numbers"].get("gpu_hours", 0)) for entry in running), 1),
    }
