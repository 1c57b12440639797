"""One connection, both real ends over a socket pair: handshake, errors, streams, heartbeats, and every way to end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backend.agent import protocol
from backend.agent.protocol import Decoder, Heartbeat, Reply, Request, encode, pack
from backend.agent.server import Connection
from backend.errors import Exit, OperatorError
from backend.runs.layout import Home
from backend.runs.locks import FileLock
from console.link.client import Client, ConnectionLost

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def socket_pair() -> tuple[Streams, Streams]:
    ours, theirs = socket.socketpair()
    return await asyncio.open_connection(sock=ours), await asyncio.open_connection(sock=theirs)


@asynccontextmanager
async def connected(home: Path | None, **timing: float) -> AsyncIterator[tuple[Client, asyncio.Task[str]]]:
    """A client, shaken hands if `home` is given, and the task of the agent that serves it."""
    near, far = await socket_pair()
    agent = asyncio.create_task(Connection(*far, **timing).serve())
    try:
        async with Client(*near, **timing) as client:
            if home is not None:
                await client.hello(str(home))
            yield client, agent
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        far[1].close()


def error_of(call: Callable[[Client], Awaitable[Any]], home: Path | None) -> OperatorError:
    async def go() -> OperatorError:
        async with connected(home) as (client, _):
            with pytest.raises(OperatorError) as caught:
                await call(client)
            return caught.value

    return asyncio.run(go())


def running_pipeline(home: Home, name: str = "P1") -> tuple[Path, FileLock]:
    """A pipeline whose pilot counts as running: its attempt's lock is held, as a supervisor holds it."""
    pipeline = home.create().pipeline(name).create()
    attempt = pipeline.path / "pilot/attempts/1"
    attempt.mkdir(parents=True)
    lock = FileLock(attempt / "lock")
    lock.acquire({"pid": 1})
    return pipeline.path, lock


def test_hello_says_who_and_where(tmp_path: Path) -> None:
    async def go() -> dict[str, Any]:
        async with connected(None) as (client, _):
            return await client.hello(str(tmp_path))

    answer = asyncio.run(go())
    assert answer["protocol"] == protocol.PROTOCOL
    assert answer["home"] == str(tmp_path)
    assert {"version", "host", "host_id", "boot_id", "time", "user", "python", "pid"} <= answer.keys()


def test_an_unknown_verb_is_an_answer_and_the_connection_lives_on(tmp_path: Path) -> None:
    async def go() -> None:
        async with connected(tmp_path) as (client, _):
            with pytest.raises(OperatorError) as caught:
                await client.call("reboot")
            assert (caught.value.reason, caught.value.code) == ("unknown_verb", Exit.USAGE)
            assert (await client.call("snapshot"))["pipelines"] == []

    asyncio.run(go())


def test_nothing_is_done_before_the_handshake() -> None:
    assert error_of(lambda client: client.call("snapshot"), None).reason == "no_handshake"


def test_another_protocol_version_is_refused_at_the_handshake(tmp_path: Path) -> None:
    wrong = {"protocol": protocol.PROTOCOL + 1, "home": str(tmp_path)}
    assert error_of(lambda client: client.call("hello", wrong), None).reason == "protocol_mismatch"


def test_a_pipeline_id_that_is_a_path_does_not_leave_the_home(tmp_path: Path) -> None:
    assert error_of(lambda client: client.stream("watch", {"pipeline": "../../etc"}), tmp_path).code == Exit.USAGE


def test_a_home_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert error_of(lambda client: client.hello(str(tmp_path)), None).reason == "insecure_home"


def test_a_request_that_is_no_json_gets_an_error_reply(tmp_path: Path) -> None:
    async def go() -> Reply:
        (reader, writer), far = await socket_pair()
        agent = asyncio.create_task(Connection(*far).serve())
        writer.write(encode(Request(5, "snapshot", b"{not json")))
        reply = await first_reply(reader)
        writer.close()
        assert await agent == "end of input"
        return reply

    reply = asyncio.run(go())
    assert (reply.id, reply.ok) == (5, False)
    assert protocol.unpack(reply.body)["reason"] == "bad_request"


async def first_reply(reader: asyncio.StreamReader) -> Reply:
    decoder = Decoder()
    while data := await reader.read(4096):
        for message in decoder.feed(data):
            if isinstance(message, Reply):
                return message
    raise AssertionError("the agent closed without a reply")


def test_the_agent_ends_when_its_input_ends(tmp_path: Path) -> None:
    async def go() -> str:
        (_, writer), far = await socket_pair()
        agent = asyncio.create_task(Connection(*far).serve())
        writer.close()
        return await agent

    # It may notice while it reads, or while it says that it is still here.
    assert asyncio.run(go()).startswith(("end of input", "connection lost"))


def test_the_agent_ends_by_itself_when_the_console_falls_silent() -> None:
    """A laptop that sleeps closes nothing: without this, agents pile up on the host."""

    async def go() -> str:
        (_, writer), far = await socket_pair()
        why = await Connection(*far, heartbeat_s=0.02, silence_s=0.1).serve()
        writer.close()
        return why

    assert "nothing heard" in asyncio.run(go())


def test_the_agent_ends_although_the_silent_console_reads_nothing_either(tmp_path: Path) -> None:
    """A stalled peer blocks our writes; the watch for silence must not wait behind them."""

    async def go() -> str:
        path, lock = running_pipeline(Home(tmp_path / "home"))
        (path / "events.jsonl").write_bytes(b"x" * 200 + b"\n" + (b"y" * 60000 + b"\n") * 400)
        (_, writer), far = await socket_pair()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(encode(Request(1, "hello", pack({"protocol": 1, "home": str(tmp_path / "home")}))))
        writer.write(encode(Request(2, "watch", pack({"pipeline": "P1", "offset": 0}))))
        why = await Connection(*far, heartbeat_s=0.02, silence_s=0.3).serve()
        writer.close()
        lock.release()
        return why

    assert "nothing heard" in asyncio.run(go())


def test_heartbeats_keep_an_idle_connection_open_past_the_limit_of_silence(tmp_path: Path) -> None:
    async def go() -> None:
        (reader, writer), far = await socket_pair()
        agent = asyncio.create_task(Connection(*far, heartbeat_s=0.03, silence_s=0.25).serve())
        decoder, heard = Decoder(), 0
        while heard < 20:  # 20 × 0.03 s: more than twice the limit
            for message in decoder.feed(await reader.read(4096)):
                heard += isinstance(message, Heartbeat)
            writer.write(encode(Heartbeat()))
        assert not agent.done()
        writer.close()
        assert await agent == "end of input"

    asyncio.run(go())


def test_a_silent_agent_is_a_lost_connection_not_an_answer() -> None:
    async def go() -> None:
        near, far = await socket_pair()
        async with Client(*near, heartbeat_s=0.02, silence_s=0.1) as client:
            with pytest.raises(ConnectionLost, match="nothing heard"):
                await client.call("snapshot")
        far[1].close()

    asyncio.run(go())


def test_a_cut_inside_an_answer_is_a_lost_connection() -> None:
    async def go() -> None:
        near, far = await socket_pair()
        async with Client(*near) as client:
            call = asyncio.create_task(client.call("snapshot"))
            await far[0].read(1)
            far[1].write(encode(Reply(1, True, b'{"pipelines":[]}'))[:-3])
            far[1].close()
            with pytest.raises(ConnectionLost, match="in the middle"):
                await call
            with pytest.raises(ConnectionLost):
                await client.call("snapshot")

    asyncio.run(go())


def test_a_lost_connection_ends_open_streams_after_what_had_arrived(tmp_path: Path) -> None:
    async def go() -> bytes:
        path, lock = running_pipeline(Home(tmp_path / "home"))
        (path / "events.jsonl").write_bytes(b"one\ntwo\n")
        got = b""
        async with connected(tmp_path / "home") as (client, _):
            stream = await client.stream("watch", {"pipeline": "P1", "offset": 0})
            with pytest.raises(ConnectionLost):
                async for chunk in stream:
                    got += chunk.body if chunk.ch == "events" else b""
                    if got:
                        client._writer.transport.abort()
        lock.release()
        return got

    assert asyncio.run(go()) == b"one\ntwo\n"


def test_a_closed_stream_is_not_sent_any_more_and_other_calls_go_on(tmp_path: Path) -> None:
    async def go() -> None:
        path, lock = running_pipeline(Home(tmp_path / "home"))
        (path / "events.jsonl").write_bytes(b"z" * 99 + b"\n")
        async with connected(tmp_path / "home") as (client, _):
            stream = await client.stream("watch", {"pipeline": "P1", "offset": 0})
            await stream.close()
            assert len((await client.call("snapshot"))["pipelines"]) == 1
        lock.release()

    asyncio.run(go())


def test_a_slow_reader_of_one_stream_loses_nothing(tmp_path: Path) -> None:
    """More than the queue holds: the sender waits, no chunk is dropped and no memory filled."""

    async def go() -> int:
        path, lock = running_pipeline(Home(tmp_path / "home"))
        line = b"q" * 1023 + b"\n"
        (path / "events.jsonl").write_bytes(line * 8192)
        size, next_offset = 0, 0
        async with connected(tmp_path / "home") as (client, _):
            stream = await client.stream("watch", {"pipeline": "P1", "offset": 0})
            async for chunk in stream:
                await asyncio.sleep(0)
                if chunk.ch == "events":
                    assert chunk.off == next_offset
                    next_offset += len(chunk.body)
                    size += len(chunk.body)
                    if size == 8192 * 1024:
                        break
            await stream.close()
        lock.release()
        return size

    assert asyncio.run(go()) == 8 * 1024 * 1024
