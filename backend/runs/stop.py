"""Stopping an attempt, and proving that nothing of it is left.

The supervisor is asked first (pidfd, then its identity, then SIGTERM): it ends its tree and records the end. Where it
died or does not answer, the processes that carry the run's tag are ended one by one. Never by name, never by number.
What GPUs and `/dev/shm` still hold is the stage's to verify.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backend.errors import Refused
from backend.runs import identity, ports, tree
from backend.runs.atomic import write_json
from backend.runs.identity import ProcessIdentity, open_verified
from backend.runs.layout import Attempt
from backend.runs.locks import current_record
from backend.runs.spec import read_spec
from backend.runs.state import AttemptState, state
from backend.runs.tree import Left, ProcessSet

How = Literal["not_running", "supervisor", "escalated", "tagged"]
_RECORD_MARGIN_S = 15.0
"""What a supervisor may need to write its end on a slow disk, before it counts as hung."""


@dataclass(frozen=True)
class StopReport:
    """What a stop did and what it found afterwards.

    `how`: `supervisor` (asked, and it ended everything), `escalated` (it did not answer), `tagged` (it was dead),
    `not_running`. `signalled` maps pids to what this call sent them itself. `left` are processes still there,
    `port_holders` pids that still listen. `reason`: "" when nothing is left, else `unkillable` or `port_open`.
    """

    state: AttemptState
    how: How
    signalled: dict[int, tuple[str, ...]]
    left: tuple[Left, ...]
    port_open: bool
    port_holders: tuple[int, ...]
    reason: str
    seconds: float

    @property
    def ok(self) -> bool:
        """True when nothing of the run is left."""
        return not self.reason

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, for events and verdicts."""
        return {
            "state": self.state.state,
            "how": self.how,
            "signalled": {str(pid): list(names) for pid, names in self.signalled.items()},
            "left": [process.as_json() for process in self.left],
            "port_open": self.port_open,
            "port_holders": list(self.port_holders),
            "reason": self.reason,
            "seconds": self.seconds,
        }


def stop(attempt_dir: Path, grace_s: float | None = None, *, port: int | None = None, by: str = "") -> StopReport:
    """End an attempt and everything that belongs to it; returns when it is over, or as far over as it gets.

    `grace_s` is the time between SIGTERM and SIGKILL (default: the spec's), `port` one that must be free afterwards,
    `by` who asked. Blocks for at most grace + 50 s where the supervisor works, twice that where it hangs. A run that
    has ended by itself meanwhile stays what it was. Raises Refused (`pid_reused`, `not_ours`) before any signal.
    """
    attempt, began = Attempt(attempt_dir), time.monotonic()
    spec = read_spec(attempt.path)
    grace = spec.grace_s if grace_s is None else grace_s
    before = state(attempt.path)
    how: How = "not_running"
    signalled: dict[int, tuple[str, ...]] = {}
    left: tuple[Left, ...] = ()
    if before.state in ("running", "ready"):
        how = "supervisor"
        if not _ask_supervisor(attempt, before, grace, by, signalled):
            how = "escalated"
            left = _end_tagged(spec.run_id, before.job, 0.0, signalled)
            _kill_supervisor(before, signalled)
        elif not attempt.exit.exists():
            how = "tagged"  # it was dead already, or killed while it stopped
    elif before.job_alive:
        how = "tagged"
    if how == "tagged":
        left = _end_tagged(spec.run_id, before.job, grace, signalled)
    left = left or tuple(tree.describe(seen) for seen in identity.tagged(spec.run_id))
    is_open = port is not None and ports.is_listening(port)
    return StopReport(
        state=state(attempt.path),
        how=how,
        signalled=signalled,
        left=left,
        port_open=is_open,
        port_holders=ports.listeners(port) if port is not None and is_open else (),
        reason="unkillable" if left else "port_open" if is_open else "",
        seconds=round(time.monotonic() - began, 3),
    )


def _supervisor(attempt: Attempt, known: AttemptState) -> ProcessIdentity | None:
    """The supervisor's identity: from its records, or from the lock while it has written none yet."""
    if known.supervisor is not None:
        return known.supervisor
    record = current_record(attempt.lock).get("supervisor")
    return ProcessIdentity.from_json(record) if record else None


def _ask_supervisor(
    attempt: Attempt, known: AttemptState, grace: float, by: str, signalled: dict[int, tuple[str, ...]]
) -> bool:
    """SIGTERM to the supervisor and wait for its end; False where it does not end."""
    supervisor = _supervisor(attempt, known)
    if supervisor is None:
        return False
    write_json(attempt.stop, {"grace_s": grace, "by": by, "t": time.time()})
    try:
        fd = open_verified(supervisor)
    except Refused as refusal:
        if refusal.reason == "gone":  # it ended between our look and now
            return True
        raise
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            signalled[supervisor.pid] = ("SIGTERM",)
            signal.pidfd_send_signal(fd, signal.SIGCONT)
        return _wait(fd, grace + tree.NESTED_MARGIN_S + tree.UNKILLABLE_S + _RECORD_MARGIN_S)
    finally:
        os.close(fd)


def _wait(pidfd: int, limit_s: float) -> bool:
    """True when the process ended within the limit."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def _kill_supervisor(known: AttemptState, signalled: dict[int, tuple[str, ...]]) -> None:
    if known.supervisor is None:
        return
    try:
        fd = open_verified(known.supervisor)
    except Refused:
        return  # it has ended: that is what is wanted
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        signalled[known.supervisor.pid] = (*signalled.get(known.supervisor.pid, ()), "SIGKILL")
        _wait(fd, tree.NESTED_MARGIN_S)
    finally:
        os.close(fd)


def _end_tagged(
    run_id: str, job: ProcessIdentity | None, grace: float, signalled: dict[int, tuple[str, ...]]
) -> tuple[Left, ...]:
    """End what carries the run's tag, and its job; returns what even SIGKILL did not end."""
    with ProcessSet(run_id, job=job) as members:
        left = tree.end(members, lambda elapsed: grace)
        signalled.update({pid: tuple(names) for pid, names in members.signalled.items()})
    return left
