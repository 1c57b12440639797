"""Which process is which: identities that survive PID reuse, and the search for the processes of a run.

A PID is a number that the kernel gives out again. A process is named here by pid, start ticks, boot id, start of
PID 1 (a container restart keeps the boot id), pid namespace, uid and the tag in its environment; and it is signalled
only through a pidfd that was opened *before* those were compared. Start times differ by clock ticks (10 ms):
to fool them, the kernel must give out all its numbers within one. Never looks at names or command lines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.errors import Refused

TAG = "EAGLE3_RUN_ID"
"""Environment variable of every process of a run. SPT_NOENV=1 beside it keeps setproctitle (SGLang) from wiping it."""
WITHIN = "EAGLE3_RUN_WITHIN"
"""Run ids, comma separated, of the subreaper attempts around a process: it must die with each of them."""
SUPERVISOR = "EAGLE3_SUPERVISOR_OF"
"""Environment variable of a supervisor: the run id that it supervises. It carries no TAG of that run."""

_EXEC_LOOKS = 10_000


def boot_id() -> str:
    """The kernel's random id of this boot. A restarted container keeps it: compare `pid1_ticks` too."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid1_ticks() -> int:
    """Start time of PID 1 in clock ticks since boot; changes when a container restarts."""
    return start_ticks(1) or 0


def pid_namespace() -> str:
    """The pid namespace that our numbers belong to."""
    return str(Path("/proc/self/ns/pid").readlink())


@dataclass(frozen=True)
class Seen:
    """One process as `/proc/PID/stat` showed it. `state` is the kernel's letter for its first thread."""

    pid: int
    ppid: int
    state: str
    start_ticks: int
    threads: int

    @property
    def dead(self) -> bool:
        """A zombie keeps its number and start time but runs no more, unless only its first thread has ended."""
        return self.state in "ZX" and self.threads <= 1


def _stat(pid: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` from the third (state) on; the second, a name, may hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def see(pid: int) -> Seen | None:
    """The process of that number now, zombies included; None where there is none."""
    words = _stat(pid)
    if words is None:
        return None
    return Seen(pid, ppid=int(words[1]), state=words[0], start_ticks=int(words[19]), threads=int(words[17]))


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot, or None for a process that is gone or a zombie."""
    seen = see(pid)
    return None if seen is None or seen.dead else seen.start_ticks


def all_processes() -> dict[int, Seen]:
    """Every living process that this pid namespace shows."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            seen = see(int(path.name))
            if seen is not None and not seen.dead:
                found[seen.pid] = seen
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is gone or not ours to read.

    In the middle of exec a process has none for an instant; a search for tags that looked then would miss it, so
    that instant is waited out.
    """
    data = b""
    for _ in range(_EXEC_LOOKS):
        try:
            data = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return {}
        if data or _has_no_environment(pid):
            break
        os.sched_yield()
    entries = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, sign, value in entries if sign}


def _has_no_environment(pid: int) -> bool:
    """True where nothing read from `environ` means that there is nothing: no memory any more, or an empty one.

    In mid-exec the memory is new (size > 0) and env_start still 0; just after it, env_start < env_end. In between the
    kernel sets both to one value (create_elf_tables), as an empty environment has for ever: a process that runs may be
    at that point, one that sleeps is past it.
    """
    words = _stat(pid)
    if words is None:
        return True
    size, env_start, env_end = int(words[20]), int(words[47]), int(words[48])
    return size == 0 or (env_start == env_end != 0 and words[0] != "R")


def uid_of(pid: int) -> int | None:
    """Real uid of a process; None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Uid:")), None)


def tagged(run_id: str, processes: Mapping[int, Seen] | None = None, *, orphaned: bool = False) -> tuple[Seen, ...]:
    """Living processes of our uid whose environment says that they belong to run `run_id`, at any depth.

    Includes the supervisors of attempts nested in it; never the run's own supervisor and never the caller. With
    `orphaned` (its supervisor is dead) what still looks like that one is a job caught between fork and exec.
    """
    found = []
    for seen in (all_processes() if processes is None else processes).values():
        if seen.pid == os.getpid():
            continue
        env = environment(seen.pid)
        member = env.get(TAG) == run_id or run_id in env.get(WITHIN, "").split(",")
        member = member or (orphaned and env.get(SUPERVISOR) == run_id)
        if member and uid_of(seen.pid) == os.getuid():
            found.append(seen)
    return tuple(found)


def descendants(
    root: int, processes: Mapping[int, Seen] | None = None, *, stop_below: Iterable[int] = ()
) -> tuple[Seen, ...]:
    """Living descendants of `root`, without it. Those below a pid in `stop_below` are left out, that pid is not."""
    children: dict[int, list[Seen]] = {}
    for seen in (all_processes() if processes is None else processes).values():
        children.setdefault(seen.ppid, []).append(seen)
    ends = set(stop_below)
    found, todo = [], [root]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.append(child)
            if child.pid not in ends:
                todo.append(child.pid)
    return tuple(found)


def open_pidfd(seen: Seen) -> int | None:
    """A pidfd of exactly the process that was seen, or None where it is gone (or its number was given to another)."""
    try:
        fd = os.pidfd_open(seen.pid)
    except ProcessLookupError:
        return None
    if start_ticks(seen.pid) != seen.start_ticks:
        os.close(fd)
        return None
    return fd


@dataclass(frozen=True)
class ProcessIdentity:
    """Everything that must be equal before a process is signalled. `tag` is a NAME=VALUE of its environment, or ""."""

    pid: int
    start_ticks: int
    boot_id: str
    pid1_ticks: int
    pid_ns: str
    uid: int
    tag: str = ""

    @classmethod
    def of(cls, pid: int, tag: str = "") -> ProcessIdentity:
        """The identity of a living process of ours. Raises ProcessLookupError where there is none."""
        ticks, uid = start_ticks(pid), uid_of(pid)
        if ticks is None or uid is None:
            raise ProcessLookupError(pid)
        return cls(pid, ticks, boot_id(), pid1_ticks(), pid_namespace(), uid, tag)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessIdentity:
        """The identity that `as_json` wrote."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})

    def mismatch(self) -> str | None:
        """Why the process of that number is *not* this one now, as a sentence; None where it is."""
        if self.boot_id != boot_id():
            return "the host was rebooted since"
        if self.pid1_ticks != pid1_ticks() or self.pid_ns != pid_namespace():
            return "the container was restarted since, or we are in another pid namespace"
        ticks = start_ticks(self.pid)
        if ticks is None:
            return "it has ended"
        if ticks != self.start_ticks:
            return f"pid {self.pid} was given to another process (started at tick {ticks}, not {self.start_ticks})"
        if uid_of(self.pid) != self.uid:
            return f"pid {self.pid} belongs to uid {uid_of(self.pid)}, not {self.uid}"
        if self.tag:
            name, _, value = self.tag.partition("=")
            # An exiting process has no environment any more, for seconds where it had much memory: no contradiction.
            env = environment(self.pid)
            if env and env.get(name) != value:
                return f"pid {self.pid} does not carry {self.tag}"
        return None

    def alive(self) -> bool:
        """True while exactly this process lives."""
        return self.mismatch() is None


def open_verified(identity: ProcessIdentity) -> int:
    """A pidfd of exactly this process: opened first, compared second, so that nothing can change in between.

    Raises Refused: `gone` where it has ended, `not_ours` for another uid, `pid_reused` where anything else differs.
    """
    if identity.uid != os.geteuid():
        raise Refused(f"pid {identity.pid} belongs to uid {identity.uid}, we are uid {os.geteuid()}", reason="not_ours")
    fd = None
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(identity.pid)
    why = identity.mismatch()
    if fd is not None and why is None:
        return fd
    if fd is not None:
        os.close(fd)
    ended = fd is None or start_ticks(identity.pid) is None
    raise Refused(
        f"process {identity.pid} is not the one that was started: {why or 'it has ended'}",
        fix="nothing was signalled; look at the attempt's state again",
        reason="gone" if ended else "pid_reused",
    )
