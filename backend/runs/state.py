"""What an attempt's files say about it now. Nothing here is stored: files and the kernel's lock are the truth.

Order of looks: `exit.json`, then the lock, then `exit.json` again, because it may have ended in between. `skipped` and
`not needed` are no states of an attempt: they stand in the pipeline's events. That a success is still good (outputs
verified, same fingerprint) is the pipeline's business too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from backend.runs import identity
from backend.runs.atomic import read_json
from backend.runs.identity import ProcessIdentity
from backend.runs.layout import Attempt
from backend.runs.locks import is_held

State = Literal["pending", "running", "ready", "succeeded", "failed", "cancelled", "exited", "stale"]
ENDED: frozenset[State] = frozenset({"succeeded", "failed", "cancelled", "exited", "stale"})


@dataclass(frozen=True)
class AttemptState:
    """One attempt at one instant.

    `ready`: a running service whose verdict is good; `exited`: a service that was stopped; `stale`: started, no end
    recorded, no supervisor. `reason`: for stale `reboot`, `container_restart` or `supervisor_died`; for running
    `starting` until the job is known; for failed the signal or the error in words. `job_alive` only for stale.
    Times are seconds since the epoch on the host.
    """

    state: State
    run_id: str = ""
    reason: str = ""
    code: int | None = None
    signal: int | None = None
    stopped: bool = False
    job_alive: bool = False
    t0: float | None = None
    t1: float | None = None
    log_bytes: int | None = None
    supervisor: ProcessIdentity | None = None
    job: ProcessIdentity | None = None
    escaped: tuple[int, ...] = ()

    @property
    def ended(self) -> bool:
        """True where nothing more will happen in this attempt by itself."""
        return self.state in ENDED

    @property
    def alive(self) -> bool:
        """True while the supervisor watches over it."""
        return self.state in ("running", "ready")

    @property
    def seconds(self) -> float | None:
        """Wall time from start to end; None while either is unknown."""
        return None if self.t0 is None or self.t1 is None else self.t1 - self.t0

    def describe(self) -> str:
        """State and reason in words, for an operator."""
        return f"{self.state} ({self.reason})" if self.reason else self.state

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, for snapshots."""
        return {**asdict(self), "escaped": list(self.escaped)}


def state(attempt_dir: Path) -> AttemptState:
    """The state of an attempt now. Changes nothing; an attempt that does not exist is pending."""
    attempt = Attempt(attempt_dir)
    ended = read_json(attempt.exit)
    held = ended is None and is_held(attempt.lock)
    if ended is None:
        ended = read_json(attempt.exit)
    spec = read_json(attempt.spec) or {}
    start = read_json(attempt.proc) or read_json(attempt.intent) or {}
    facts: dict[str, Any] = {
        "run_id": str(spec.get("run_id", "")),
        "t0": start.get("t0", start.get("t")),
        "supervisor": _process(start.get("supervisor")),
        "job": _process(start.get("job")),
    }
    if ended is not None:
        return _ended(ended, bool(spec.get("service")), facts)
    if held:
        if spec.get("service") and _verdict_is_good(attempt, spec):
            return AttemptState("ready", **facts)
        return AttemptState("running", reason="" if facts["job"] else "starting", **facts)
    if start:
        return _stale(facts)
    return AttemptState("pending", run_id=facts["run_id"])


def _process(data: Mapping[str, Any] | None) -> ProcessIdentity | None:
    return ProcessIdentity.from_json(data) if data else None


def _verdict_is_good(attempt: Attempt, spec: Mapping[str, Any]) -> bool:
    """A verdict of an earlier launch says nothing about this one: the launch id must be the same."""
    verdict = read_json(attempt.verdict) or {}
    return (
        verdict.get("ok") is True
        and spec.get("launch_id") not in (None, "")
        and (verdict.get("launch_id") == spec["launch_id"])
    )


def _ended(record: Mapping[str, Any], service: bool, facts: dict[str, Any]) -> AttemptState:
    code, number, stopped = record["code"], record["signal"], bool(record["stopped"])
    state: State
    if record.get("escaped"):
        state, reason = "failed", "unkillable"
    elif record.get("error"):
        state, reason = "failed", str(record["error"])
    elif stopped:
        state, reason = "exited" if service else "cancelled", "stopped"
    elif code == 0 and not service:
        state, reason = "succeeded", ""
    else:
        what = f"signal {number}" if number is not None else f"code {code}"
        state, reason = "failed", f"ended by itself with {what}" if service else what
    return AttemptState(
        state,
        reason=reason,
        code=code,
        signal=number,
        stopped=stopped,
        t1=record["t1"],
        log_bytes=record["log_bytes"],
        escaped=tuple(process["pid"] for process in record["escaped"]),
        **{**facts, "t0": record["t0"]},
    )


def _stale(facts: dict[str, Any]) -> AttemptState:
    supervisor: ProcessIdentity = facts["supervisor"]
    if supervisor.boot_id != identity.boot_id():
        return AttemptState("stale", reason="reboot", **facts)
    if supervisor.pid1_ticks != identity.pid1_ticks():
        return AttemptState("stale", reason="container_restart", **facts)
    job: ProcessIdentity | None = facts["job"]
    alive = bool(identity.tagged(facts["run_id"], orphaned=True)) or (job is not None and job.alive())
    return AttemptState("stale", reason="supervisor_died", job_alive=alive, **facts)
