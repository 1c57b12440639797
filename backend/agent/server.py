"""One connection: requests in, replies and streams out, heartbeats both ways.

Owns the connection's life: the handshake comes first, every request runs as a task of its own, and the agent ends with
its input or after `silence_s` without a word from the other side. State on the host is in files alone; ending in the
middle of anything loses nothing but the answer. Knows no verb's meaning: those stand in `verbs` and `streams`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from typing import BinaryIO

from backend.agent import protocol, verbs
from backend.agent.protocol import Chunk, Heartbeat, Reply, Request
from backend.errors import OperatorError, UsageError
from backend.runs.layout import Home


class Connection:
    """The agent's end of one byte stream."""

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
        self._heard = time.monotonic()
        self._home: Home | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> str:
        """Serve until the other side is gone; why it ended, in a few words."""
        ending = {asyncio.create_task(part) for part in (self._read(), self._beat(), self._listen())}
        try:
            done, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in (*ending, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(*ending, *self._tasks.values(), return_exceptions=True)

    async def _read(self) -> str:
        decoder = protocol.Decoder()
        try:
            while data := await self._reader.read(protocol.CHUNK):
                self._heard = time.monotonic()
                for message in decoder.feed(data):
                    if isinstance(message, Request):
                        self._accept(message)
        except protocol.ProtocolError as error:
            return f"not our protocol: {error}"
        except ConnectionError as error:
            return f"connection lost: {error}"
        return "end of input"

    async def _beat(self) -> str:
        try:
            while True:
                await self._send(Heartbeat())
                await asyncio.sleep(self._heartbeat_s)
        except ConnectionError as error:
            return f"connection lost: {error}"

    async def _listen(self) -> str:
        """Ends when the other side is silent; apart from `_beat`, which a peer that does not read can hold up."""
        while (quiet := time.monotonic() - self._heard) < self._silence_s:
            await asyncio.sleep(self._silence_s - quiet)
        return f"nothing heard for {self._silence_s:.0f} s"

    def _accept(self, request: Request) -> None:
        task = asyncio.create_task(self._handle(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    async def _handle(self, request: Request) -> None:
        """Answer one request; an error of any kind is an answer too."""
        with contextlib.suppress(ConnectionError):  # nobody is there to be told; `_read` and `_beat` notice the same
            try:
                await self._answer(request)
            except OperatorError as error:
                await self._send(Reply(request.id, False, protocol.pack(error.as_json())))
            except ConnectionError:
                raise
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                bug = OperatorError(f"the agent failed at {request.verb}: {error!r}", reason="agent_bug")
                await self._send(Reply(request.id, False, protocol.pack(bug.as_json())))

    async def _answer(self, request: Request) -> None:
        try:
            args = protocol.unpack(request.body)
        except protocol.ProtocolError as error:
            raise UsageError(f"{request.verb}: {error}", reason="bad_request") from error
        if request.verb == "hello":
            self._home = verbs.home_of(args)
            verbs.check_protocol(args)
            await self._reply(request.id, verbs.hello(self._home))
        elif request.verb == "cancel":
            if (task := self._tasks.get(int(args.get("stream", 0)))) is not None:
                task.cancel()
            await self._reply(request.id, {})
        elif self._home is None:
            raise UsageError("the first request must be hello", reason="no_handshake")
        elif request.verb in verbs.STREAMS:
            await self._stream(request.id, verbs.STREAMS[request.verb](self._home, args))
        else:
            await self._reply(request.id, await verbs.call(request.verb, self._home, args))

    async def _stream(self, number: int, stream: verbs.Stream) -> None:
        """Opening reply, chunks as they come, and `end` whatever happens, unless the client has cancelled."""
        await self._reply(number, stream.opening)
        end: dict[str, object] = {}
        try:
            async for chunk in stream.chunks:
                await self._send(Chunk(number, chunk.ch, chunk.off, chunk.body))
            end = dict(stream.end)
        except OperatorError as error:
            end = {"error": error.as_json()}
        except OSError as error:
            end = {"error": OperatorError(f"the file cannot be read any more: {error}", reason="io").as_json()}
        await self._send(Chunk(number, "end", 0, protocol.pack(end)))

    async def _reply(self, number: int, answer: dict[str, object]) -> None:
        await self._send(Reply(number, True, protocol.pack(answer)))

    async def _send(self, message: protocol.Message) -> None:
        self._writer.write(protocol.encode(message))
        await self._writer.drain()


async def serve_stdio(stdin: BinaryIO, stdout: BinaryIO) -> str:
    """Serve one connection over two pipes or sockets, as `agent serve` does."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdin)
    answers = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _ = await loop.connect_write_pipe(lambda: answers, stdout)
    return await Connection(reader, asyncio.StreamWriter(transport, answers, None, loop)).serve()
