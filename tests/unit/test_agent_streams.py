"""Growing files as streams: no byte lost, none twice, across any number of reconnects; the last line before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.agent import streams
from backend.agent.protocol import Chunk, unpack
from backend.errors import UsageError
from backend.runs.atomic import write_json
from backend.runs.events import EventLog
from backend.runs.layout import Attempt, Home, Pipeline
from backend.runs.locks import FileLock
from backend.runs.state import AttemptState
from console.link.client import Client
from tests.unit.test_agent_connection import connected


class Pilot:
    """A pilot as the files show one: alive while the lock is held, ended when `exit.json` stands there."""

    def __init__(self, root: Path, name: str = "P1", *, folder: str = "pilot") -> None:
        self.home = Home(root / "home").create()
        self.pipeline: Pipeline = self.home.pipeline(name).create()
        self.attempt = Attempt(self.pipeline.path / folder / "attempts" / "1").create()
        self._lock = FileLock(self.attempt.lock)
        self._lock.acquire({"pid": 1})

    def end(self, code: int = 0) -> None:
        record = {"code": code, "signal": None, "stopped": False, "t0": 1.0, "t1": 2.0, "log_bytes": 0, "escaped": []}
        write_json(self.attempt.exit, record)
        self._lock.release()


@asynccontextmanager
async def client_of(pilot: Pilot) -> AsyncIterator[Client]:
    async with connected(pilot.home.path) as (client, _):
        yield client


def test_watch_resumes_at_the_last_byte_over_many_reconnects_while_the_file_grows(tmp_path: Path) -> None:
    """A link that drops after every chunk must show the same events as one that never drops."""
    pilot = Pilot(tmp_path)

    async def write() -> None:
        with EventLog(pilot.pipeline.events, pipe="P1") as log:
            for number in range(120):
                log.emit("progress", {"done": number, "total": 120, "unit": "records", "text": "é" * (number % 50)})
                await asyncio.sleep(0)
        pilot.end()

    async def read() -> tuple[bytes, int]:
        got, connections = b"", 0
        while True:
            connections += 1
            async with client_of(pilot) as client:
                stream = await client.stream("watch", {"pipeline": "P1", "offset": len(got)})
                async for chunk in stream:
                    if chunk.ch == "events":
                        assert chunk.off == len(got)
                        got += chunk.body
                        break
                if stream.end is not None:
                    return got, connections

    async def go() -> tuple[bytes, int]:
        writer = asyncio.create_task(write())
        result = await read()
        await writer
        return result

    got, connections = asyncio.run(go())
    assert got == pilot.pipeline.events.read_bytes()
    assert connections > 2


def test_watch_sends_the_last_event_before_the_end(tmp_path: Path) -> None:
    """The state is looked at before the file is read; the other way round the final line would be lost."""
    pilot = Pilot(tmp_path)
    with EventLog(pilot.pipeline.events, pipe="P1") as log:
        log.emit("pipeline_ended", {"code": 7})
    pilot.end(7)

    async def go() -> tuple[list[Chunk], dict[str, object]]:
        async with client_of(pilot) as client:
            stream = await client.stream("watch", {"pipeline": "P1", "offset": 0})
            chunks = [chunk async for chunk in stream]
            return chunks, stream.end or {}

    chunks, end = asyncio.run(go())
    assert [chunk.ch for chunk in chunks] == ["state", "events"]
    assert (end["state"], end["code"]) == ("failed", 7)


def test_watch_carries_a_summary_that_is_too_long_for_an_event(tmp_path: Path) -> None:
    pilot = Pilot(tmp_path)
    write_json(pilot.attempt.outputs, {"summary": {"lines": ["x" * 9000]}})
    pilot.end()

    async def go() -> dict[str, object]:
        async with client_of(pilot) as client:
            stream = await client.stream("watch", {"pipeline": "P1"})
            _ = [chunk async for chunk in stream]
            return stream.end or {}

    assert asyncio.run(go())["summary"] == {"lines": ["x" * 9000]}


def test_watch_never_sends_a_part_of_a_line(tmp_path: Path) -> None:
    """A killed writer leaves half a line, and the next one cuts it off: whoever had read it would read garbage."""
    pilot = Pilot(tmp_path)
    pilot.pipeline.events.write_bytes(b'{"whole":1}\n{"half')
    pilot.end()
    stream = streams.watch(pilot.home, {"pipeline": "P1", "offset": 0})

    async def go() -> bytes:
        return b"".join([chunk.body async for chunk in stream.chunks if chunk.ch == "events"])

    assert asyncio.run(go()) == b'{"whole":1}\n'


def test_watch_tells_when_the_state_of_the_pilot_changes(tmp_path: Path) -> None:
    pilot = Pilot(tmp_path)
    stream = streams.watch(pilot.home, {"pipeline": "P1", "offset": 0})

    async def go() -> list[str]:
        states = []
        async for chunk in stream.chunks:
            if chunk.ch == "state":
                states.append(str(unpack(chunk.body)["state"]))
                if states == ["running"]:
                    pilot.end(0)
        return states

    assert asyncio.run(go()) == ["running", "succeeded"]


def test_an_offset_beyond_the_file_is_refused_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    pilot = Pilot(tmp_path)
    pilot.pipeline.events.write_bytes(b"abc\n")
    for offset in (5, -1, "4", 1.5, True):
        with pytest.raises(UsageError) as caught:
            streams.watch(pilot.home, {"pipeline": "P1", "offset": offset})
        assert caught.value.reason == "bad_offset"


def test_watching_what_does_not_exist_fails_at_once(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").create()
    for args in ({"pipeline": "P9"}, {}):
        with pytest.raises(UsageError) as caught:
            streams.watch(home, args)
        assert caught.value.reason == "no_pipeline"


def test_log_follows_to_the_last_byte_of_the_attempt(tmp_path: Path) -> None:
    pilot = Pilot(tmp_path, folder="stages/08-train")
    pilot.attempt.log.write_bytes(b"step 1\n")

    async def go() -> tuple[bytes, dict[str, object]]:
        async with client_of(pilot) as client:
            stream = await client.stream("log", {"pipeline": "P1", "stage": "train", "follow": True})
            got = b""
            async for chunk in stream:
                got += chunk.body
                if got == b"step 1\n":
                    with pilot.attempt.log.open("ab") as log:
                        log.write(b"step 2 \x1b[31m\xff no newline")
                    pilot.end(1)
            return got, stream.end or {}

    got, end = asyncio.run(go())
    assert got == b"step 1\nstep 2 \x1b[31m\xff no newline"
    assert (end["state"], end["offset"]) == ("failed", len(got))


def test_log_without_follow_returns_although_the_stage_runs(tmp_path: Path) -> None:
    pilot = Pilot(tmp_path, folder="stages/08-train")
    pilot.attempt.log.write_bytes(b"a\nb\nc\n")
    stream = streams.log(pilot.home, {"pipeline": "P1", "stage": "train", "tail_lines": 2})

    async def go() -> bytes:
        return b"".join([chunk.body async for chunk in stream.chunks])

    assert asyncio.run(go()) == b"b\nc\n"
    assert stream.end["state"] == "running"


def test_log_of_a_stage_or_attempt_that_never_was_names_those_that_were(tmp_path: Path) -> None:
    pilot = Pilot(tmp_path, folder="stages/08-train")
    with pytest.raises(UsageError, match="not attempted") as caught:
        streams.log(pilot.home, {"pipeline": "P1", "stage": "trian"})
    assert "train" in caught.value.fix
    with pytest.raises(UsageError, match="no attempt 4"):
        streams.log(pilot.home, {"pipeline": "P1", "stage": "train", "attempt": 4})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([b"", b"a", b"bc\r", b"def" * 9]), max_size=12), st.integers(1, 14), st.integers(1, 40))
def test_the_last_lines_are_those_that_a_slow_count_gives(
    tmp_path: Path, lines: list[bytes], wanted: int, block: int
) -> None:
    path = tmp_path / "log"
    for ending in (b"", b"\n"):
        text = b"\n".join(lines) + (ending if lines else b"")
        path.write_bytes(text)
        pieces = [piece + b"\n" for piece in text.split(b"\n")]
        pieces[-1] = pieces[-1][:-1]
        whole = [piece for piece in pieces if piece]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams.protocol, "CHUNK", block)
            assert text[streams.tail_offset(path, wanted) :] == b"".join(whole[-wanted:])


def test_a_last_line_written_while_we_look_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job writes its last line and ends between our two looks: state first, file second, or the line is lost."""
    pilot = Pilot(tmp_path, folder="stages/08-train")
    real = streams.state

    def ends_while_we_look(path: Path) -> AttemptState:
        if not pilot.attempt.exit.exists():
            pilot.attempt.log.write_bytes(b"the reason\n")
            pilot.end(1)
        return real(path)

    monkeypatch.setattr(streams, "state", ends_while_we_look)
    stream = streams.log(pilot.home, {"pipeline": "P1", "stage": "train", "follow": True})

    async def go() -> bytes:
        return b"".join([chunk.body async for chunk in stream.chunks])

    assert asyncio.run(go()) == b"the reason\n"


def test_a_last_event_written_while_we_look_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pilot = Pilot(tmp_path)
    real = streams.pilots.pilot_state

    def ends_while_we_look(pipeline: Pipeline) -> dict[str, object]:
        if not pilot.attempt.exit.exists():
            pilot.pipeline.events.write_bytes(b'{"ev":"pipeline_ended"}\n')
            pilot.end(0)
        return real(pipeline)

    monkeypatch.setattr(streams.pilots, "pilot_state", ends_while_we_look)
    stream = streams.watch(pilot.home, {"pipeline": "P1", "offset": 0})

    async def go() -> bytes:
        return b"".join([chunk.body async for chunk in stream.chunks if chunk.ch == "events"])

    assert asyncio.run(go()) == b'{"ev":"pipeline_ended"}\n'
