"""The wire format between console and agent: length-prefixed frames over any byte stream.

Owns encoding and decoding, nothing else: no sockets, no processes, no verbs. Both sides import this one module.

A frame is one line of JSON (the head), a newline, then `len` bytes of body. Four kinds:

    {"id":n,"verb":"plan","len":L}            request; body = JSON object
    {"id":n,"ok":true,"len":L}                reply; body = JSON object, or `OperatorError.as_json()` if not ok
    {"id":n,"ch":"log","off":o,"len":L}       stream chunk; body = raw bytes of a file, `off` = absolute file offset
    {"hb":1}                                  heartbeat, no body

No user data stands in a head: names and paths travel in bodies, so no byte of them can be taken for framing. Unknown
keys in a head are ignored (forward compatible); a change that breaks a reader raises `PROTOCOL`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PROTOCOL = 1
HEARTBEAT_S = 5.0
SILENCE_S = 30.0  # six heartbeats: a peer that is quiet this long is gone
MAX_HEAD = 4096
MAX_BODY = 64 * 1024 * 1024
CHUNK = 64 * 1024
CHANNELS = ("events", "log", "state", "end")


class ProtocolError(Exception):
    """The peer sent something that is not a frame; the connection cannot be used any more."""


@dataclass(frozen=True)
class Request:
    """A call of one verb; `id` is chosen by the client and unique within the connection."""

    id: int
    verb: str
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    """The answer to the request with the same `id`."""

    id: int
    ok: bool
    body: bytes = b""


@dataclass(frozen=True)
class Chunk:
    """A piece of the stream that request `id` opened. `off` is the absolute offset of `body` in the source file."""

    id: int
    ch: str
    off: int = 0
    body: bytes = b""


@dataclass(frozen=True)
class Heartbeat:
    """Nothing to say, still here."""


Message = Request | Reply | Chunk | Heartbeat


def pack(value: Any) -> bytes:
    """JSON for a body. ASCII only, so that file names with undecodable bytes (lone surrogates) survive the way."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def unpack(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; an empty body is an empty object.

    Raises:
        ProtocolError: not JSON, or not an object.
    """
    if not body:
        return {}
    try:
        value = json.loads(body)
    except ValueError as error:  # also UnicodeDecodeError
        raise ProtocolError(f"body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"body is a JSON {type(value).__name__}, not an object")
    return value


def encode(message: Message) -> bytes:
    """The bytes of one frame."""
    head: dict[str, Any]
    if isinstance(message, Heartbeat):
        return b'{"hb":1}\n'
    if isinstance(message, Request):
        head = {"id": message.id, "verb": message.verb}
    elif isinstance(message, Reply):
        head = {"id": message.id, "ok": message.ok}
    else:
        head = {"id": message.id, "ch": message.ch, "off": message.off}
    if len(message.body) > MAX_BODY:
        raise ProtocolError(f"body of {len(message.body)} bytes is over the limit of {MAX_BODY}")
    head["len"] = len(message.body)
    return json.dumps(head, separators=(",", ":")).encode("ascii") + b"\n" + message.body


class Decoder:
    """Turns bytes, in pieces of any size, into messages. Holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: dict[str, Any] | None = None

    def feed(self, data: bytes) -> Iterator[Message]:
        """Every message that is complete after `data`.

        Raises:
            ProtocolError: a head that is too long or not a known frame, or a body over the limit.
        """
        self._buffer += data
        while True:
            if self._head is None:
                end = self._buffer.find(b"\n", 0, MAX_HEAD + 1)
                if end < 0:
                    if len(self._buffer) > MAX_HEAD:
                        raise ProtocolError(f"no end of head within {MAX_HEAD} bytes: {bytes(self._buffer[:80])!r}")
                    return
                self._head = _parse_head(bytes(self._buffer[:end]))
                del self._buffer[: end + 1]
            length = self._head.get("len", 0)
            if len(self._buffer) < length:
                return
            body, head = bytes(self._buffer[:length]), self._head
            del self._buffer[:length]
            self._head = None
            yield _message(head, body)

    @property
    def idle(self) -> bool:
        """True between frames: a stream that ends elsewhere was cut."""
        return self._head is None and not self._buffer


def _parse_head(line: bytes) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except ValueError as error:
        raise ProtocolError(f"head is not JSON: {line[:80]!r}") from error
    if not isinstance(head, dict):
        raise ProtocolError(f"head is not an object: {line[:80]!r}")
    length = head.get("len", 0)
    if type(length) is not int or not 0 <= length <= MAX_BODY:
        raise ProtocolError(f"length {length!r} is not within 0 … {MAX_BODY}")
    if "hb" not in head and type(head.get("id")) is not int:
        raise ProtocolError(f"head without a number as id: {line[:80]!r}")
    return head


def _message(head: dict[str, Any], body: bytes) -> Message:
    if "hb" in head:
        return Heartbeat()
    if isinstance(verb := head.get("verb"), str):
        return Request(head["id"], verb, body)
    if isinstance(ok := head.get("ok"), bool):
        return Reply(head["id"], ok, body)
    if isinstance(channel := head.get("ch"), str):
        offset = head.get("off", 0)
        if type(offset) is not int or offset < 0:
            raise ProtocolError(f"offset {offset!r} is not a position in a file")
        return Chunk(head["id"], channel, offset, body)
    raise ProtocolError(f"head is none of request, reply, chunk, heartbeat: {sorted(head)}")
