"""gate: can the server be believed? The readiness gate with its canary, and a verdict that stays with the server.

Severity 1, changes nothing on the host. Fails with exit code 7; a SUSPECT verdict fails too, since a server that is
ready faster than its bytes allow is most likely another server.
"""

from __future__ import annotations

from typing import Any, ClassVar

from backend.engine.canary import CanarySettings
from backend.engine.gate import run_gate
from backend.engine.readiness import GateSettings, Verdict
from backend.errors import Exit, OperatorError
from backend.runs.atomic import write_json
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.server import (
    VERDICT,
    ServerRecord,
    layers_of,
    record_segments,
    required_server,
    server_process,
    spec_of,
)


class Gate(Stage):
    """The verdict on the extraction server."""

    name: ClassVar[str] = "gate"
    severity: ClassVar[Severity] = 1
    serves: ClassVar[tuple[str, ...]] = ("extract",)
    mode: ClassVar[str] = "extract"

    def plan(self, ctx: StageContext) -> StagePlan:
        """How long it will try, and what it will prove."""
        gate = ctx.config.gate
        parity = ", full Hugging Face parity" if gate.hf_parity else ""
        lines = (
            f"at most {gate.attempts} polls, {gate.interval_s:g} s apart, {gate.deadline_s:,.0f} s in all",
            f"then identity, flags, live capture, canary (log-probabilities, layer boundaries{parity})",
        )
        return StagePlan(lines)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Judge `ctx.server`.

        Raises:
            OperatorError: code 7 with the failed check, or `suspect`.
        """
        verdict = judge(ctx, canary=True)
        return {"verdict": verdict.as_json(), "canary_digest": verdict.canary_digest}


def judge(ctx: StageContext, *, canary: bool) -> Verdict:
    """Run the gate over `ctx.server`, keep the verdict beside it, and fail if it cannot be believed."""
    server, gate = required_server(ctx), ctx.config.gate
    record = ServerRecord.read(server)
    spec = spec_of(ctx, record.mode, record.launch_id, record.draft)
    settings = GateSettings(
        attempts=gate.attempts,
        interval_s=gate.interval_s,
        deadline_s=gate.deadline_s,
        probe_timeout_s=gate.probe_timeout_s,
        stability_s=gate.stability_s,
        warn_after_s=gate.warn_after_s,
    )
    proof = (
        CanarySettings(dump_dir=record.dump_dir, layers=layers_of(ctx), hf_parity=gate.hf_parity) if canary else None
    )
    verdict = run_gate(server_process(server), spec, settings, proof, ctx.reporter)
    write_json(server / VERDICT, verdict.as_json())
    record_segments(server)
    if not verdict.ok or verdict.suspect:
        raise _refusal(verdict)
    return verdict


def _refusal(verdict: Verdict) -> OperatorError:
    failed = next((check for check in verdict.checks if check.ok is False), None)
    if failed is None:
        fix = "look at the verdict; if the server really is new, make its start slower to believe: drop the page cache"
        return OperatorError(f"the server is SUSPECT: {verdict.why}", fix=fix, reason="suspect", code=Exit.NEVER_READY)
    return OperatorError(
        f"the server cannot be believed: {failed.name}: {failed.evidence}",
        fix=failed.fix,
        reason=f"gate_{failed.name.replace(' ', '_')}",
        code=Exit.NEVER_READY,
    )
