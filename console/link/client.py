"""The console's end of the protocol: calls and streams over one byte stream, multiplexed.

Owns request ids, heartbeats and the moment at which a connection counts as lost. Knows neither how the bytes travel
(`local`, later SSH) nor what any verb means. A lost connection is always `ConnectionLost`, never an empty answer: work
on the host goes on without us, and only the host knows how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

from backend.agent import protocol
from backend.agent.protocol import Chunk, Heartbeat, Reply, Request
from backend.errors import Exit, OperatorError

QUEUED_CHUNKS = 64  # 4 MiB: beyond that a slow reader slows the sender down, instead of filling our memory


class ConnectionLost(OperatorError):
    """The agent cannot be heard any more; whatever it had started goes on."""

    code = Exit.CONNECTION_LOST

    def __init__(self, why: str) -> None:
        super().__init__(
            f"connection to the agent lost: {why}",
            fix="work on the host goes on; `eagle3-console status` and `attach` find it again",
            reason="connection_lost",
        )


class Stream:
    """One open stream: iterate over its chunks; afterwards `end` holds what the agent said last."""

    def __init__(self, client: Client, number: int) -> None:
        self._client, self._id = client, number
        self._queue: asyncio.Queue[Chunk | None] = asyncio.Queue(QUEUED_CHUNKS)
        self._lost: ConnectionLost | None = None
        self.opening: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come.

        Raises:
            ConnectionLost: before the agent said `end`.
            OperatorError: the agent gave the stream up, with its reason.
        """
        while self.end is None:
            if self._lost is not None and self._queue.empty():
                raise self._lost
            item = await self._queue.get()
            if item is None:
                continue
            if item.ch == "end":
                self.end = protocol.unpack(item.body)
                if error := self.end.get("error"):
                    raise OperatorError.from_json(error)
            else:
                yield item

    async def close(self) -> None:
        """Stop listening; the agent stops sending. Never affects the work that is being watched."""
        if self.closed:
            return
        self.closed = True
        while not self._queue.empty():
            self._queue.get_nowait()
        await self._client.forget(self._id, tell=self.end is None)

    async def put(self, chunk: Chunk) -> None:
        """Called by the client's reader; waits while the consumer is behind."""
        if not self.closed:
            await self._queue.put(chunk)

    def lose(self, error: ConnectionLost) -> None:
        """Called by the client: after what is queued, the consumer gets `error`."""
        self._lost = error
        if not self._queue.full():
            self._queue.put_nowait(None)  # wakes a consumer that waits


class Client:
    """A connection to one agent. Use as an async context manager."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        heartbeat_s: float = protocol.HEARTBEAT_S,
        silence_s: float = protocol.SILENCE_S,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._streams: dict[int, Stream] = {}
        self._lost: ConnectionLost | None = None
        self._heard = time.monotonic()
        self._waiting_for_consumer = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Client:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the peer may have gone first; that is no news while closing
            await self._writer.wait_closed()

    async def hello(self, home: str) -> dict[str, Any]:
        """The handshake, first call of every connection.

        Raises:
            OperatorError: the agent speaks another protocol version (reason ``protocol_mismatch``).
        """
        return await self.call("hello", {"protocol": protocol.PROTOCOL, "home": home})

    async def call(self, verb: str, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call a verb and wait for its answer.

        Raises:
            OperatorError: what the agent answered instead.
            ConnectionLost: no answer any more; a mutating verb may or may not have been carried out.
        """
        return await self._ask(next(self._ids), verb, args)

    async def stream(self, verb: str, args: Mapping[str, Any] | None = None) -> Stream:
        """Open a stream; its `opening` is the agent's first answer."""
        number = next(self._ids)
        stream = self._streams[number] = Stream(self, number)
        try:
            stream.opening = await self._ask(number, verb, args)
        except BaseException:
            self._streams.pop(number, None)
            raise
        return stream

    async def forget(self, number: int, *, tell: bool) -> None:
        """Drop stream `number`; with `tell`, ask the agent to stop sending it."""
        self._streams.pop(number, None)
        if tell and self._lost is None:
            await self._send(Request(next(self._ids), "cancel", protocol.pack({"stream": number})))

    async def _ask(self, number: int, verb: str, args: Mapping[str, Any] | None) -> dict[str, Any]:
        if self._lost is not None:
            raise self._lost
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(Request(number, verb, protocol.pack(dict(args or {}))))
            reply = await answer
        finally:
            self._calls.pop(number, None)
        body = protocol.unpack(reply.body)
        if not reply.ok:
            raise OperatorError.from_json(body)
        return body

    async def _send(self, message: protocol.Message) -> None:
        try:
            self._writer.write(protocol.encode(message))
            await self._writer.drain()
        except ConnectionError as error:
            self._lose(str(error) or type(error).__name__)
            assert self._lost is not None
            raise self._lost from error

    async def _read(self) -> None:
        decoder = protocol.Decoder()
        try:
            while data := await self._reader.read(protocol.CHUNK):
                self._heard = time.monotonic()
                for message in decoder.feed(data):
                    await self._deliver(message)
            self._lose("it closed the connection" if decoder.idle else "it was cut in the middle of an answer")
        except (ConnectionError, protocol.ProtocolError) as error:
            self._lose(str(error) or type(error).__name__)

    async def _deliver(self, message: protocol.Message) -> None:
        if isinstance(message, Reply):
            answer = self._calls.get(message.id)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, Chunk) and (stream := self._streams.get(message.id)):
            self._waiting_for_consumer = True
            await stream.put(message)
            self._waiting_for_consumer = False
            self._heard = time.monotonic()

    async def _beat(self) -> None:
        """Say that we are here, and notice when the agent is not."""
        with contextlib.suppress(ConnectionLost):  # `_send` has told everybody who waits
            while self._lost is None:
                await self._send(Heartbeat())
                await asyncio.sleep(self._heartbeat_s)
                quiet = time.monotonic() - self._heard
                if quiet > self._silence_s and not self._waiting_for_consumer:
                    self._lose(f"nothing heard for {quiet:.0f} s")

    def _lose(self, why: str) -> None:
        if self._lost is not None:
            return
        self._lost = ConnectionLost(why)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._lost)
        for stream in self._streams.values():
            stream.lose(self._lost)
