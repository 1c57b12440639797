"""Ending a set of processes: each one held by its own pidfd, TERM first, KILL later, looked for again after each death.

Used by the supervisor (its descendants and everything tagged) and by the stop of a run whose supervisor died (tagged
only). A nested supervisor is asked before its own job is, and gets a moment to record the end. Knows no files.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backend.runs import identity
from backend.runs.identity import ProcessIdentity, Seen

NESTED_MARGIN_S = 5.0
"""How long a nested supervisor may take to record the end of its killed job."""
UNKILLABLE_S = 30.0
"""After SIGKILL: what is still there then waits in the kernel (state D), and waiting longer does not help."""


@dataclass(frozen=True)
class Left:
    """A process that is still there: its number, the kernel's letter (D = waits for a device), and for what."""

    pid: int
    state: str
    wchan: str

    def as_json(self) -> dict[str, int | str]:
        """Plain JSON, as in `exit.json`."""
        return {"pid": self.pid, "state": self.state, "wchan": self.wchan}


@contextlib.contextmanager
def _room_for_pidfds() -> Iterator[None]:
    """One descriptor per process may be more than the soft limit; put back, because what we start inherits it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class ProcessSet:
    """The living processes of one run: those that carry its tag, the descendants of `root`, and `job`.

    `root` is its living supervisor; None where that is dead.

    A member stays until it is dead, however it looks meanwhile: an exiting process loses its environment, and with it
    its tag, seconds before its memory and its GPUs are free.
    """

    def __init__(self, run_id: str, root: int | None = None, job: ProcessIdentity | None = None) -> None:
        self._run_id = run_id
        self._root = root
        self._job = job
        self._fds: dict[Seen, int] = {}
        self._supervisors: set[int] = set()
        self._shielded: set[int] = set()
        self.signalled: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._fds)

    def __enter__(self) -> ProcessSet:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def refresh(self) -> None:
        """Look again: dead ones leave the set, new ones (forked meanwhile) join it."""
        processes = identity.all_processes()
        members = self._members(processes)
        for seen in [seen for seen in self._fds if identity.start_ticks(seen.pid) != seen.start_ticks]:
            os.close(self._fds.pop(seen))
        for seen in members.keys() - self._fds.keys():
            fd = identity.open_pidfd(members[seen])
            if fd is not None:
                self._fds[seen] = fd
        self._supervisors = {seen.pid for seen in self._fds if identity.SUPERVISOR in identity.environment(seen.pid)}
        self._shielded = {below.pid for top in self._supervisors for below in identity.descendants(top, processes)}

    def _members(self, processes: Mapping[int, Seen]) -> dict[Seen, Seen]:
        found = list(identity.tagged(self._run_id, processes, orphaned=self._root is None))
        if self._root is not None:
            found.extend(identity.descendants(self._root, processes))
        if self._job is not None and self._job.pid in processes and self._job.alive():
            found.append(processes[self._job.pid])
        # The key leaves out what changes while a process lives: its state and, for orphans, its parent.
        return {Seen(seen.pid, 0, "", seen.start_ticks, 0): seen for seen in found if seen.pid != os.getpid()}

    def terminate(self) -> None:
        """SIGTERM to each that has not had one. Jobs of nested supervisors get theirs from those."""
        for seen in self._fds:
            if seen.pid not in self._shielded and "SIGTERM" not in self.signalled.get(seen.pid, ()):
                self._send(seen, signal.SIGTERM)
                self._send(seen, signal.SIGCONT)

    def kill(self, *, supervisors: bool) -> None:
        """SIGKILL to all; nested supervisors only with `supervisors`, so that they can still record their job's end."""
        for seen in self._fds:
            if supervisors or seen.pid not in self._supervisors:
                self._send(seen, signal.SIGKILL)

    def _send(self, seen: Seen, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fds[seen], number)
            if number is not signal.SIGCONT:
                self.signalled.setdefault(seen.pid, []).append(number.name)

    def wait(self, timeout_s: float | None, wakeup: int | None = None) -> None:
        """Block until one of them dies, `wakeup` becomes readable, or the time is over (None: never)."""
        poll = select.poll()
        for fd in self._fds.values():
            poll.register(fd, select.POLLIN)
        if wakeup is not None:
            poll.register(wakeup, select.POLLIN)
        poll.poll(None if timeout_s is None else max(1.0, timeout_s * 1000))

    def left(self) -> tuple[Left, ...]:
        """What is still there."""
        found = (identity.see(member.pid) for member in self._fds)
        return tuple(describe(seen) for seen in found if seen is not None and not seen.dead)


def end(
    members: ProcessSet,
    grace: Callable[[float], float],
    *,
    before_look: Callable[[], bool] = lambda: True,
    wakeup: int | None = None,
) -> tuple[Left, ...]:
    """TERM, grace, KILL, until none is left; returns those that even SIGKILL did not end.

    `grace` gives the seconds between TERM and KILL, from the seconds gone by (it may shrink meanwhile). `before_look`
    runs before each look (a parent reaps there) and says whether its caller, too, is done; `wakeup` is its descriptor.
    """
    with _room_for_pidfds():
        began = time.monotonic()
        while True:
            done = before_look()
            members.refresh()
            if done and not len(members):
                return ()
            elapsed = time.monotonic() - began
            kill_at = grace(elapsed)
            members.terminate()
            if elapsed >= kill_at:
                members.kill(supervisors=elapsed >= kill_at + NESTED_MARGIN_S)
            steps = (kill_at, kill_at + NESTED_MARGIN_S, kill_at + NESTED_MARGIN_S + UNKILLABLE_S)
            if elapsed >= steps[-1]:
                return members.left()
            members.wait(next(step for step in steps if step > elapsed) - elapsed, wakeup)


def describe(seen: Seen) -> Left:
    """A process as an operator must see it when it will not end."""
    try:
        wchan = Path(f"/proc/{seen.pid}/wchan").read_text(encoding="ascii").strip("0\n")
    except OSError:  # gone meanwhile, or hidden from us
        wchan = ""
    return Left(seen.pid, seen.state, wchan)
