"""bench: accept length and throughput of the deployed draft, beside an untrained one and none.

Severity 1. Per-request counts of SGLang itself (`meta_info`), summed: the server-wide average has no reset. Each
baseline is a server of its own, started inside this attempt and gone with it; the deployed server is stopped first,
since one host holds one server. The served identity is compared before and after each measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from backend.data.merged import read_split
from backend.engine.bench import Measurement, measure
from backend.engine.client import SGLangClient
from backend.errors import Exit, OperatorError
from backend.report import Check
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.gate import judge
from backend.stages.server import ServerRecord, required_server, start_server, stop_server, stopped_after

TRAINED = "trained"


class Bench(Stage):
    """Trained draft, then the baselines."""

    name: ClassVar[str] = "bench"
    severity: ClassVar[Severity] = 1
    needs: ClassVar[tuple[str, ...]] = ("merge", "train")
    mode: ClassVar[str] = "serve+draft"

    def material(self, ctx: StageContext) -> dict[str, Any]:
        """What is measured, and on what server."""
        return {
            "bench": ctx.config.bench.model_dump(),
            "deploy": ctx.config.deploy.model_dump(exclude={"keep"}),
            "tp": ctx.config.server.tp,
        }

    def plan(self, ctx: StageContext) -> StagePlan:
        """Prompts, tokens, and the server switches."""
        bench, load = ctx.config.bench, ctx.config.server.expected_load_s
        lines = [
            f"{bench.prompts} held-out prompts × {bench.max_new_tokens} new tokens, greedy, "
            f"{', '.join(map(str, bench.concurrency))} in flight"
        ]
        lines += [
            f"then a server {'without a draft' if name == 'none' else 'with an untrained draft'}: {load:,.0f} s to load"
            for name in bench.baselines
        ]
        return StagePlan(tuple(lines), ("stops the deployed server while it measures the baselines",))

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Measure all variants.

        Raises:
            OperatorError: too few held-out prompts, a server that changed under the measurement, or one never ready.
        """
        prompts = self._prompts(ctx)
        deployed = required_server(ctx)
        results = {TRAINED: self._measure(ctx, deployed, prompts)}
        if ctx.config.bench.baselines:
            stop_server(deployed)
        for baseline in ctx.config.bench.baselines:
            results[baseline] = self._measure_baseline(ctx, baseline, prompts)
        return {"prompts": len(prompts), "results": {name: [m.as_json() for m in ms] for name, ms in results.items()}}

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """Every prompt was answered; greedy output with and without a draft agrees where it must (float32 on a CPU)."""
        results = outputs["results"]
        asked = outputs["prompts"]
        checks = [
            Check(
                "requests",
                m["requests"] == asked,
                f"{name}: {m['requests']} of {asked} at {m['concurrency']} in flight",
            )
            for name, measured in results.items()
            for m in measured
        ]
        exact = ctx.config.host.device == "cpu" and ctx.config.deploy.dtype == "float32"
        digests = {name: {m["output_digest"] for m in measured} for name, measured in results.items()}
        same = len(set().union(*digests.values())) == 1
        evidence = "all variants answered the same tokens" if same else f"answers differ: {digests}"
        checks.append(Check("token-equal", same if exact else (same or None), evidence))
        return checks

    def _prompts(self, ctx: StageContext) -> list[list[int]]:
        folder = Path(str(ctx.product("merge").outputs["folder"]))
        prompts = [list(record.prompt_ids) for record in read_split(folder, "heldout")]
        wanted = ctx.config.bench.prompts
        if len(prompts) < wanted:
            raise OperatorError(
                f"{wanted} held-out prompts wanted, {len(prompts)} there",
                fix="lower [bench] prompts, or raise [data] heldout_share and merge again",
                reason="too_few_prompts",
                code=Exit.USAGE,
            )
        return prompts[:wanted]

    def _measure(self, ctx: StageContext, server: Path, prompts: list[list[int]]) -> list[Measurement]:
        bench, record = ctx.config.bench, ServerRecord.read(server)
        with SGLangClient(record.url) as client:
            client.generate(prompts[0], max_new_tokens=bench.max_new_tokens)  # lazy initialisation is not throughput
            return [
                measure(client, record.launch_id, prompts, bench.max_new_tokens, concurrency, ctx.reporter)
                for concurrency in bench.concurrency
            ]

    def _measure_baseline(self, ctx: StageContext, baseline: str, prompts: list[list[int]]) -> list[Measurement]:
        assert ctx.attempt is not None
        attempt = ctx.attempt / "servers" / baseline
        attempt.mkdir(parents=True)
        draft = Path(str(ctx.product("train").outputs["untrained"])) if baseline == "untrained" else None
        ctx.reporter.note(f"starting the server for baseline {baseline!r}")
        start_server(ctx, attempt, "serve+draft" if draft else "serve", draft)
        with stopped_after(attempt, ctx.reporter):
            judge(replace(ctx, server=attempt), canary=False)
            return self._measure(ctx, attempt, prompts)
