"""Files that grow, as streams: a pipeline's events with its pilot's state, and an attempt's log.

A stream starts at an absolute offset, so whoever lost a connection continues where the last byte was. The end is
proved, not guessed: first the state of the process is looked at, then what it wrote is sent to the last byte, then
`end`; in the other order the last lines of a log would be lost. Reads files only, disturbs nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.agent import pilots, protocol
from backend.agent.protocol import Chunk
from backend.errors import UsageError
from backend.runs.layout import Attempt, Home, Pipeline
from backend.runs.state import state

POLL_S = 0.2
TAIL_LIMIT = 8 * 1024 * 1024


@dataclass
class Stream:
    """`opening` answers the request; `chunks` (with id 0) follow; `end` is filled when they are exhausted."""

    opening: dict[str, Any]
    chunks: AsyncIterator[Chunk] = field(repr=False)
    end: dict[str, Any] = field(default_factory=dict)


class Tail:
    """Reads a file that may grow, or not exist yet, from an absolute offset on.

    With `whole_lines` it stops at the last newline: a writer that was killed leaves a part of a line, and the next
    writer of that file removes it (`backend.runs.events`), so nobody may have read it. Lines are shorter than a chunk.
    """

    def __init__(self, path: Path, offset: int, *, whole_lines: bool = False) -> None:
        self._path, self.offset, self._whole_lines = path, offset, whole_lines

    def read(self) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of everything that is there now beyond what was read before."""
        try:
            file = open(self._path, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            return
        with file:
            while True:
                file.seek(self.offset)
                data = file.read(protocol.CHUNK)
                if self._whole_lines:
                    data = data[: data.rfind(b"\n") + 1]
                if not data:
                    return
                at, self.offset = self.offset, self.offset + len(data)
                yield at, data


def watch(home: Home, args: Mapping[str, Any]) -> Stream:
    """Events of `pipeline` from byte `offset` on, whole lines, and a `state` frame when the pilot's state changes.

    Ends after the newest pilot has ended and every line was sent; `end` is that pilot's state, with the `summary` of
    its `outputs.json` where it left one (an event line may be too short for it).

    Raises:
        UsageError: no such pipeline (reason ``no_pipeline``), or an offset beyond the file (``bad_offset``).
    """
    pipeline = pilots.existing(home, args)
    offset = _offset(args.get("offset"), pipeline.events)
    stream = Stream({"pipeline": pipeline.id, "offset": offset, "size": _size(pipeline.events)}, _nothing())
    stream.chunks = _watch(pipeline, offset, stream)
    return stream


async def _watch(pipeline: Pipeline, offset: int, stream: Stream) -> AsyncIterator[Chunk]:
    tail = Tail(pipeline.events, offset, whole_lines=True)
    while True:
        pilot = pilots.pilot_state(pipeline)
        if pilot != stream.end:
            stream.end = pilot
            yield Chunk(0, "state", 0, protocol.pack(pilot))
        for at, data in tail.read():
            yield Chunk(0, "events", at, data)
        if pilot["ended"]:
            stream.end = {**pilot, "summary": pilots.summary(pipeline)}
            return
        await asyncio.sleep(POLL_S)


def log(home: Home, args: Mapping[str, Any]) -> Stream:
    """The log of `stage` (or "pilot"): from `offset`, or its last `tail_lines`, or all; with `follow`, to its end.

    Raises:
        UsageError: no such pipeline, stage or attempt; an offset beyond the file.
    """
    pipeline = pilots.existing(home, args)
    attempt = pilots.attempt(pipeline, str(args.get("stage") or ""), args.get("attempt"))
    if (lines := args.get("tail_lines")) is not None:
        offset = tail_offset(attempt.log, int(lines))
    elif (size := args.get("tail_bytes")) is not None:
        offset = max(0, _size(attempt.log) - int(size))
    else:
        offset = _offset(args.get("offset"), attempt.log)
    opening = {"path": str(attempt.log), "attempt": attempt.number, "offset": offset, "size": _size(attempt.log)}
    stream = Stream(opening, _nothing())
    stream.chunks = _log(attempt, offset, bool(args.get("follow")), stream)
    return stream


async def _log(attempt: Attempt, offset: int, follow: bool, stream: Stream) -> AsyncIterator[Chunk]:
    tail = Tail(attempt.log, offset)
    while True:
        now = state(attempt.path)
        for at, data in tail.read():
            yield Chunk(0, "log", at, data)
        if now.ended or now.state == "pending" or not follow:
            stream.end = {"state": now.state, "reason": now.reason, "code": now.code, "offset": tail.offset}
            return
        await asyncio.sleep(POLL_S)


def tail_offset(path: Path, lines: int) -> int:
    """Where the last `lines` lines begin, looking back 8 MiB at most."""
    size = _size(path)
    if size == 0 or lines <= 0:
        return size
    with open(path, "rb") as file:
        begin = max(0, size - TAIL_LIMIT)
        position, wanted = size, lines
        while position > begin:
            step = min(protocol.CHUNK, position - begin)
            position -= step
            file.seek(position)
            block = file.read(step)
            if position + step == size and block.endswith(b"\n"):
                wanted += 1  # the newline at the very end closes the last line, it does not begin one
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                wanted -= 1
                if wanted == 0:
                    return position + at + 1
        return begin


async def _nothing() -> AsyncIterator[Chunk]:
    return
    yield


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _offset(value: Any, path: Path) -> int:
    offset = 0 if value is None else value
    if type(offset) is not int or not 0 <= offset <= _size(path):
        raise UsageError(
            f"offset {value!r} is not within {path.name}, which has {_size(path)} bytes",
            fix="begin at 0: the file is another one than before",
            reason="bad_offset",
        )
    return offset
