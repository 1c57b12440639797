"""What tests of supervised attempts share: starting jobs that say "up" through a FIFO, and awaiting ends by pidfd."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import backend
from backend.errors import Refused
from backend.runs import identity
from backend.runs.identity import ProcessIdentity
from backend.runs.layout import Attempt
from backend.runs.state import AttemptState, state
from backend.runs.stop import stop
from backend.runs.supervisor import Started, start, write_spec

SLEEP = "exec sleep 1000"
TREE = """
sh -c 'echo $$ > $FIFO; exec sleep 1000' &
setsid sh -c 'echo $$ > $FIFO; exec sleep 1000' &
sh -c 'setsid sh -c "echo \\$\\$ > $FIFO; exec sleep 1000" & exit 0'
setsid sh -c 'trap "" TERM HUP INT; echo $$ > $FIFO; while :; do sleep 1000; done' &
"""


NEST = """
import sys
from pathlib import Path
from backend.runs.supervisor import start, write_spec
inner = Path(sys.argv[1])
inner.mkdir()
script = f"trap '{sys.argv[4]}' TERM; echo up > {sys.argv[2]}; while :; do sleep 1000 & wait; done"
write_spec(inner, argv=["sh", "-c", script], grace_s=float(sys.argv[5]))
start(inner)
sys.stdin = open(sys.argv[3])
sys.stdin.read()
"""


def await_end(process: ProcessIdentity | None) -> None:
    """Block until the process is gone; fails after a minute, because then it never will be."""
    assert process is not None
    try:
        fd = identity.open_verified(process)
    except Refused:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = poll.poll(60_000)
    os.close(fd)
    assert ended, f"pid {process.pid} is still alive after a minute"


def kill(process: ProcessIdentity | None) -> None:
    assert process is not None
    fd = identity.open_verified(process)
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    os.close(fd)
    await_end(process)


class Runs:
    """Attempts of one test below one folder; whatever a failed test leaves behind is ended by identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.started: list[Started] = []

    def spec(self, name: str, argv: Sequence[str], **options: Any) -> Attempt:
        attempt = Attempt(self.folder / name).create()
        write_spec(attempt.path, argv=argv, **{"grace_s": 0.5, **options})
        return attempt

    def start(self, name: str, argv: Sequence[str], **options: Any) -> Started:
        started = start(self.spec(name, argv, **options).path)
        self.started.append(started)
        return started

    def sh(self, name: str, script: str, more: dict[str, str] | None = None, **options: Any) -> Started:
        return self.start(name, ["sh", "-c", script], env={"FIFO": str(self.fifo), **(more or {})}, **options)

    def lines(self, count: int) -> list[str]:
        """The next `count` lines that jobs write into the FIFO."""
        found: list[str] = []
        while len(found) < count:
            found.extend(self.fifo.read_text().split("\n")[:-1])
        return found

    def end(self, name: str, argv: Sequence[str], **options: Any) -> AttemptState:
        started = self.start(name, argv, **options)
        await_end(started.supervisor)
        return state(started.attempt)


def managed(folder: Path) -> Iterator[Runs]:
    """Body of the `runs` fixture: whatever a failed test leaves behind is ended by identity."""
    made = Runs(folder)
    yield made
    for started in made.started:
        stop(started.attempt, 0)


def alive(pids: Sequence[int]) -> set[int]:
    return {pid for pid in pids if identity.start_ticks(pid) is not None}


def nest(
    runs: Runs, subreaper: bool, *, grace_s: float = 60.0, trap: str = "exit 5", inner_grace_s: float = 30.0
) -> tuple[Started, Path]:
    """An attempt whose job starts another one, and the folder of that inner attempt; returns when the inner runs."""
    inner, go = runs.folder / "inner", Path(f"{runs.fifo}.go")
    os.mkfifo(go)
    argv = [sys.executable, "-c", NEST, str(inner), str(runs.fifo), str(go), trap, str(inner_grace_s)]
    root = str(Path(backend.__file__).parent.parent)
    outer = runs.start("outer", argv, subreaper=subreaper, env={"PYTHONPATH": root}, grace_s=grace_s)
    runs.lines(1)
    return outer, inner
