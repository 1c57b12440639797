"""Ctrl-C, SIGTERM, a closed terminal and `--timeout` as one thing: the exit code that ends a wait.

Owns the signal handlers while a follower runs, so that a signal is a value and never a half-finished write. Decides
nothing about the work on the host: whoever catches `Interrupted` does.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from backend.errors import Exit

T = TypeVar("T")
SIGNALS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED, signal.SIGHUP: Exit.TERMINATED}


class Interrupted(Exception):
    """A wait was ended from outside; `code` is the exit code that says how."""

    def __init__(self, code: Exit) -> None:
        super().__init__(code.name)
        self.code = code


class Interrupts:
    """The signals and the deadline of one command."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def race(self, work: Coroutine[None, None, T]) -> T:
        """The result of `work`, unless an interrupt comes first; then `work` is cancelled and waited for.

        Raises:
            Interrupted: a signal or the deadline came.
        """
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._asked}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        code = self._asked.result()
        self._asked = asyncio.get_running_loop().create_future()
        raise Interrupted(code)

    def interrupt(self, code: Exit) -> None:
        """End the race in progress, or the next one; an interrupt that nobody has taken yet is not replaced."""
        if not self._asked.done():
            self._asked.set_result(code)


@contextmanager
def interrupts(timeout_s: float | None) -> Iterator[Interrupts]:
    """Take the signals and, if given, the deadline for the time of the block."""
    loop = asyncio.get_running_loop()
    taken = Interrupts()
    for number, code in SIGNALS.items():
        loop.add_signal_handler(number, taken.interrupt, code)
    timer = loop.call_later(max(0.0, timeout_s), taken.interrupt, Exit.TIMEOUT) if timeout_s is not None else None
    try:
        yield taken
    finally:
        if timer is not None:
            timer.cancel()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
