"""The link to this machine: the same agent bundle as on a remote host, as a child process.

Owns the child's life. It runs in its own session, so that Ctrl-C in the terminal reaches the console alone; it ends by
itself when its input closes. What it writes to stderr is handed to `narrate`, one clean line at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from console import bundle
from console.link.client import Client
from console.sanitise import Lines

_ENDS_WITHIN_S = 40.0  # above the agent's own 30 s of silence


@asynccontextmanager
async def connect(home: Path, narrate: Callable[[str], None]) -> AsyncIterator[Client]:
    """A client of an agent on this machine that keeps its state in `home`.

    Raises:
        ConnectionLost: the agent died, now or later.
        OperatorError: `home` cannot be used, or the agent's bundle there is damaged.
    """
    agent = await asyncio.to_thread(bundle.install, bundle.build(), home / "agent")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(agent),
        "serve",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin and child.stdout and child.stderr
    narration = asyncio.create_task(_narrate(child.stderr, narrate))
    try:
        async with Client(child.stdout, child.stdin) as client:
            await client.hello(str(home))
            yield client
    finally:
        await _reap(child)
        narration.cancel()
        await asyncio.gather(narration, return_exceptions=True)


async def _narrate(stderr: asyncio.StreamReader, narrate: Callable[[str], None]) -> None:
    lines = Lines()
    while data := await stderr.read(4096):
        for line in lines.feed(data):
            narrate(line)
    for line in lines.feed(b"", final=True):
        narrate(line)


async def _reap(child: asyncio.subprocess.Process) -> None:
    """Its input is closed by now, so it ends; one that does not is killed (the work it started is not its child)."""
    try:
        await asyncio.wait_for(child.wait(), _ENDS_WITHIN_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
