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
from backend.report import Check
from backend.runs import identity, shm
from backend.runs.inuse import uses
from backend.runs.shm import Segment
from backend.runs.state import state
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.figures import GB
from backend.stages.server import ServerRecord, clear_ended, live_servers, recorded_segments, stop_server


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
        """Stop them, one after the other, and clear what others left that ended by themselves.

        Raises:
            OperatorError: code 8, a process cannot be ended.
        """
        stopped = []
        for attempt in self.old(ctx):
            held = _held(attempt)
            report = stop_server(attempt)
            ctx.reporter.note(f"{held['mode']} server {held['launch_id']} is gone after {report.seconds:.1f} s")
            stopped.append(held)
        clear_ended(ctx.home)
        return {"stopped": stopped, "gpu_used": [sample.memory_used for sample in gpu.sample().gpus]}

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """No server of ours is left, and nothing that they held: ports, dump folders, shared memory, GPU memory."""
        stopped = outputs["stopped"]
        left = [str(attempt) for attempt in self.old(ctx)]
        checks = [Check("servers gone", not left, f"{len(stopped)} stopped, {len(left)} left")]
        for item in stopped:
            holders = listeners(item["port"])
            checks.append(Check("port closed", not holders, f"{item['port']}: {len(holders)} listeners"))
        folders = [item["dump_dir"] for item in stopped if item["dump_dir"] and Path(item["dump_dir"]).exists()]
        checks.append(Check("dump folders gone", not folders, f"left: {folders}" if folders else "none is left"))
        checks.append(_check_shm([Segment.from_json(each) for item in stopped for each in item["segments"]]))
        checks.append(_check_gpus({pid for item in stopped for pid in item["pids"]}))
        return checks

    def old(self, ctx: StageContext) -> list[Path]:
        """Live servers of this home, without those of this pipeline, which the pilot itself starts and stops."""
        return [
            attempt
            for attempt in live_servers(ctx.home)
            if ctx.pipeline is None or not attempt.is_relative_to(ctx.pipeline)
        ]


def _held(attempt: Path) -> dict[str, Any]:
    """What a server that runs holds, to be looked for after its end."""
    record = ServerRecord.read(attempt)
    return {
        "attempt": str(attempt),
        "mode": record.mode,
        "launch_id": record.launch_id,
        "port": record.port,
        "dump_dir": record.dump_dir,
        "pids": sorted(seen.pid for seen in identity.tagged(state(attempt).run_id)),
        "segments": [segment.as_json() for segment in recorded_segments(attempt)],
    }


def _check_shm(recorded: list[Segment]) -> Check:
    """The recorded segments are gone. One that a process uses now was never the stopped servers' alone: it may stay."""
    there = {(segment.name, segment.inode) for segment in shm.snapshot()}
    left = [segment for segment in recorded if (segment.name, segment.inode) in there]
    if not left:
        return Check("shared memory", True, f"{len(recorded)} recorded segments, none is left")
    evidence = f"left in {shm.SHM}: {', '.join(segment.name for segment in left)}"
    if all(_in_use(segment) for segment in left):
        return Check("shared memory", None, f"{evidence}; other processes use them")
    return Check("shared memory", False, evidence, fix="nobody uses them: remove them by hand")


def _in_use(segment: Segment) -> bool:
    """Whether a process uses it, or might: the rule of `shm.scrub`."""
    path = shm.SHM / segment.name
    seen = uses(str(path), segment.dev, {segment.inode})
    return bool(seen.found) or bool(seen.unseen and path.stat().st_mode & 0o066)


def _check_gpus(pids: set[int]) -> Check:
    """No process of the stopped servers holds memory of a GPU."""
    report = gpu.sample()
    if not report.gpus:
        return Check("gpu memory", None, f"no GPU: {report.reason}")
    held = sorted(pids.intersection(pid for sample in report.gpus for pid in sample.owners))
    if held:
        fix = "the driver has not let go of them: `nvidia-smi` shows them; a GPU reset needs an administrator"
        return Check("gpu memory", False, f"still held by former server processes {held}", fix=fix)
    used = ", ".join(f"{sample.memory_used / GB:,.1f}" for sample in report.gpus)
    return Check("gpu memory", True, f"none is held by a stopped server; in use now: {used} GB")
