"""stop ("stop old server"): our servers of earlier launches go, and everything they held comes back.

Severity 2. Only servers that this home started and that can be identified beyond doubt (pid, start time, run tag) are
stopped; a foreign server on the port is named and left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from backend.agent import gpu
from backend.engine.procfs import listeners
from backend.errors import Exit, OperatorError
from backend.report import Check
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.server import ServerRecord, live_servers, stop_server


class StopOldServer(Stage):
    """Ends our live servers of other pipelines."""

    name: ClassVar[str] = "stop"
    severity: ClassVar[Severity] = 2
    serves: ClassVar[tuple[str, ...]] = ("extract", "train", "bench")

    def plan(self, ctx: StageContext) -> StagePlan:
        """Each server that would be stopped."""
        found = [(attempt, ServerRecord.read(attempt)) for attempt in self.old(ctx)]
        effects = tuple(
            f"stops our {record.mode} server {record.launch_id} on port {record.port}" for _, record in found
        )
        return StagePlan(effects or ("no server of ours runs",), effects, {"servers": len(found)})

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Stop them, one after the other.

        Raises:
            OperatorError: code 8, a process cannot be ended.
        """
        stopped = []
        for attempt in self.old(ctx):
            record = ServerRecord.read(attempt)
            report = stop_server(attempt)
            if not report.ok:
                left = ", ".join(str(process.as_json()) for process in report.left)
                raise OperatorError(
                    f"server {record.launch_id} could not be ended ({report.reason}): {left}",
                    fix="a process in uninterruptible sleep needs its device or the host to be reset",
                    reason="unkillable",
                    code=Exit.NEEDS_HUMAN,
                )
            ctx.reporter.note(f"{record.mode} server {record.launch_id} is gone after {report.seconds:.1f} s")
            stopped.append({"launch_id": record.launch_id, "port": record.port, "attempt": str(attempt)})
        return {"stopped": stopped, "gpu_used": [sample.memory_used for sample in gpu.sample().gpus]}

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """No server of ours is left and their ports are closed."""
        left = [str(attempt) for attempt in self.old(ctx)]
        checks = [Check("servers gone", not left, f"{len(outputs['stopped'])} stopped, {len(left)} left")]
        for item in outputs["stopped"]:
            holders = listeners(item["port"])
            checks.append(Check("port closed", not holders, f"{item['port']}: {len(holders)} listeners"))
        return checks

    def old(self, ctx: StageContext) -> list[Path]:
        """Live servers of this home, without those of this pipeline, which the pilot itself starts and stops."""
        return [
            attempt
            for attempt in live_servers(ctx.home)
            if ctx.pipeline is None or not attempt.is_relative_to(ctx.pipeline)
        ]
