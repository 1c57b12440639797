"""The plan: what a run would do, with numbers, commands, consents and costs. Built and shown before anything starts.

Its `key` is the hash of config and selection: two runs with the same key are the same wish, so the second attaches to
the first or resumes it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from backend.agent.pilots import pilot_state, to_resume
from backend.pilot.consent import effective_severity
from backend.pilot.decide import Decision, Selection, decide
from backend.pilot.history import History
from backend.runs.fingerprint import digest
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
    resumed = to_resume(ctx.home, key)
    ctx = replace(ctx, products=products, pipeline=resumed.path if resumed else None)
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
        "nothing_to_do": not running and (resumed is None or pilot_state(resumed)["state"] == "succeeded"),
    }


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

    def switch(before: str, was: str, to: str, *, loads: bool = True) -> dict[str, Any]:
        cost = load if loads else "frees the GPUs"
        return {"before": before, "from": was, "to": to, "cost": cost, "loads": int(loads)}

    out = []
    if "launch" in running:
        out.append(switch("launch", "none", "extract"))
    if "train" in running:
        out.append(switch("train", "extract", "none", loads=False))
    if "deploy" in running:
        out.append(switch("deploy", "none", "serve+draft"))
    if "bench" in running:
        modes, at = {"none": "serve", "untrained": "serve+draft (untrained)"}, "serve+draft"
        for baseline in ctx.config.bench.baselines:
            out.append(switch(f"bench baseline {baseline}", at, modes[baseline]))
            at = modes[baseline]
        if ctx.config.deploy.keep and ctx.config.bench.baselines:
            out.append(switch("the end", at, "serve+draft"))
    return out


def _totals(running: list[dict[str, Any]], ctx: StageContext) -> dict[str, Any]:
    if not running:
        return {}
    needed = budget(ctx)
    hours, gpu_hours = (sum(float(e["numbers"].get(key, 0)) for e in running) for key in ("hours", "gpu_hours"))
    loads = sum(switch["loads"] for switch in _switches([entry["name"] for entry in running], ctx))
    loading = loads * ctx.config.server.expected_load_s / 3600
    return {
        "tokens": needed.tokens.tokens,
        "tokens_source": needed.tokens.source,
        "disk_gb": round(needed.needed / GB, 2),
        "disk": needed.describe(),
        "hours": round(hours + loading, 2),
        "hours_loading": round(loading, 2),
        "gpu_hours": round(gpu_hours + loading * ctx.config.host.gpus, 1),
        "not_counted": "bench, merge and what the gate takes",
    }
