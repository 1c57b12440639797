"""Files -> raw values, each with its place: JSON lines, JSON arrays, YAML, and gzip around any of them.

Streaming: no file is held in memory, only one record of it (YAML files are read whole). A damaged place is a `Broken`
item, never an exception and never silence: it names file:line or the byte, and what can be read behind it is read.
Knows nothing of what the values mean.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

import yaml

from backend.errors import OperatorError

Container = Literal["jsonl", "json-array", "yaml"]

MAX_RECORD_BYTES = 64 << 20
"""A record longer than this is taken for a missing bracket or line break, so that it cannot eat the memory."""

_CHUNK = 1 << 20
_YamlLoader: Any = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader
"""Every scalar stays text: an answer of `1963` or `yes` is not a number or a truth value."""
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Found:
    """One value and where it stands: ``file:line`` or ``file@byte``."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A place that holds no value. `rest_lost` says that nothing behind it in this file can be read."""

    reason: str
    where: str
    detail: str
    rest_lost: bool = False


class SourceFile:
    """One file of a source, opened once; `position` of `size` bytes on disk are consumed (for progress)."""

    def __init__(self, path: Path) -> None:
        """Decide the container.

        Raises:
            OperatorError: the file cannot be read, is empty, or is neither JSON nor YAML.
        """
        self.path = path
        try:
            self.size = path.stat().st_size
            self._raw = path.open("rb")
        except OSError as error:
            raise OperatorError(
                f"{path} cannot be read: {error.strerror}",
                fix="check the path and its permissions",
                reason="unreadable",
            ) from error
        self._stream: BufferedIOBase = self._raw
        if self._raw.peek(2)[:2] == _GZIP_MAGIC:
            self._stream = gzip.GzipFile(fileobj=self._raw)
        try:
            self.container = self._sniff()
        except BaseException:
            self._raw.close()
            raise

    @property
    def position(self) -> int:
        """Bytes of the file on disk that have been consumed."""
        return self.size if self._raw.closed else self._raw.tell()

    def close(self) -> None:
        """Let go of a file that was only looked at."""
        self._raw.close()

    def __iter__(self) -> Iterator[Found | Broken]:
        """The values in file order. Can be iterated once."""
        read = {"jsonl": _read_jsonl, "json-array": _read_array, "yaml": _read_yaml}[self.container]
        with self._raw:
            yield from read(self._stream, str(self.path))

    def _sniff(self) -> Container:
        """By content; by name only for YAML, which can begin with anything."""
        names = self.path.name.lower().removesuffix(".gz")
        try:
            head = self._stream.read1(_CHUNK)
            while head and not head.removeprefix(_BOM).strip():
                head = self._stream.read1(_CHUNK)
            self._stream.seek(0)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise OperatorError(
                f"{self.path} is a damaged gzip file: {error}", fix="fetch or make it again", reason="unreadable"
            ) from error
        start = head.removeprefix(_BOM).lstrip()[:1]
        if not start:
            raise OperatorError(
                f"{self.path} is empty", fix="remove it from the source's paths, or fill it", reason="empty_source"
            )
        if names.endswith((".yml", ".yaml")):
            return "yaml"
        if start == b"{" or (start == b"[" and _is_line_of_several(head)):
            return "jsonl"
        if start == b"[":
            return "json-array"
        raise OperatorError(
            f"{self.path} holds neither JSON lines, a JSON array nor YAML: it begins with {head[:16]!r}",
            fix="name YAML files .yml or .yaml; convert other files to JSON lines",
            reason="unknown_container",
        )


def _is_line_of_several(head: bytes) -> bool:
    """Whether a file that begins with '[' is JSON lines of lists: its first line is whole, and more follows."""
    first, _, rest = head.removeprefix(_BOM).lstrip().partition(b"\n")
    if not rest.strip():
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _read_jsonl(stream: BufferedIOBase, name: str) -> Iterator[Found | Broken]:
    number = offset = 0
    while True:
        try:
            line = stream.readline(MAX_RECORD_BYTES + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            yield Broken("truncated", f"{name}:{number + 1}", f"the gzip stream breaks off: {error}", rest_lost=True)
            return
        if not line:
            return
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            detail = f"the line is longer than {MAX_RECORD_BYTES >> 20} MiB"
            yield Broken("too_big", f"{name}:{number}", detail, rest_lost=True)
            return
        body = line.removeprefix(_BOM) if number == 1 else line
        if body.strip():
            item = _decode(body, f"{name}:{number}", offset + len(line) - len(body))
            if isinstance(item, Broken) and item.reason == "bad_json" and not line.endswith(b"\n"):
                item = Broken("truncated", item.where, f"the last line breaks off at byte {offset + len(line)}")
            yield item
        offset += len(line)


def _decode(body: bytes, where: str, offset: int) -> Found | Broken:
    """One JSON text at byte `offset` of its file."""
    try:
        return Found(json.loads(body.decode("utf-8")), where)
    except UnicodeDecodeError as error:
        detail = f"invalid UTF-8: byte {body[error.start]:#04x} at byte {offset + error.start} of the file"
        return Broken("bad_utf8", where, detail)
    except json.JSONDecodeError as error:
        at = offset + len(body.decode("utf-8")[: error.pos].encode("utf-8"))
        return Broken("bad_json", where, f"{error.msg} at byte {at} of the file")
    except RecursionError:
        return Broken("bad_json", where, "nested too deep")


_STRING_OR_BRACKET = re.compile(rb'[^"{}\[\]]*+("(?:[^"\\]++|\\.)*+"|["{}\[\]])', re.DOTALL)
_BARE_VALUE = re.compile(rb"[^,\]\s]++(?=[,\]\s])")
_GAP = re.compile(rb"[\s,]*+")


class _ArrayScanner:
    """Cuts a stream into the elements of one JSON array, by brackets and strings alone.

    A hand-made cut, because an element with an error inside must not end the reading, and because the byte at which a
    file breaks off has to be named; event parsers stop at the first and do not tell the second.
    """

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._base = 0  # byte of the file at which the buffer begins
        self.ended = False
        self.damage = ""

    @property
    def file_end(self) -> int:
        """The byte behind the last one read."""
        return self._base + len(self._buffer)

    def fill(self) -> bool:
        """Read on; False at the end of the file."""
        try:
            chunk = self._stream.read1(_CHUNK)  # `read` would lose what a torn gzip file still holds
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.damage, chunk = f"; the gzip stream is damaged: {error}", b""
        self._buffer += chunk
        return bool(chunk)

    def open_array(self) -> None:
        """Step behind the opening bracket, which `SourceFile` has seen."""
        self.fill()
        self._drop(self._buffer.index(b"[") + 1)

    def next_element(self) -> tuple[int, bytes] | None:
        """(byte, text) of the next element; None when the array has ended.

        Raises:
            EOFError: the file ends first. The argument is the byte at which the open element began, -1 between two.
            OverflowError: the element grows beyond `MAX_RECORD_BYTES`; the argument is its first byte.
        """
        while True:
            gap = _GAP.match(self._buffer)
            self._drop(gap.end() if gap else 0)
            if self._buffer:
                break
            if not self.fill():
                raise EOFError(-1)
        if self._buffer[:1] == b"]":
            self._drop(1)
            self.ended = True
            return None
        end = self._bracketed() if self._buffer[0] in b'{["' else self._bare()
        start, element = self._base, bytes(self._buffer[:end])
        self._drop(end)
        return start, element

    def rest(self) -> tuple[int, bytes] | None:
        """(byte, first bytes) of what stands behind the array, None for nothing but space."""
        while True:
            kept = bytes(self._buffer.lstrip())
            if kept:
                return self.file_end - len(kept), kept[:32]
            self._drop(len(self._buffer))
            if not self.fill():
                return None

    def _bracketed(self) -> int:
        position = depth = 0
        while True:
            found = _STRING_OR_BRACKET.match(self._buffer, position)
            if found is None or found[1] == b'"':  # an open string, or no token yet
                if len(self._buffer) > MAX_RECORD_BYTES:
                    raise OverflowError(self._base)
                if not self.fill():
                    raise EOFError(self._base)
                continue
            position = found.end()
            token = found[1][:1]
            depth += 1 if token in b"{[" else -1 if token in b"}]" else 0
            if depth == 0:
                return position

    def _bare(self) -> int:
        while (found := _BARE_VALUE.match(self._buffer)) is None:
            if len(self._buffer) > MAX_RECORD_BYTES:
                raise OverflowError(self._base)
            if not self.fill():
                raise EOFError(self._base)
        return found.end()

    def _drop(self, count: int) -> None:
        del self._buffer[:count]
        self._base += count


def _read_array(stream: BufferedIOBase, name: str) -> Iterator[Found | Broken]:
    scanner = _ArrayScanner(stream)
    scanner.open_array()
    count = 0
    try:
        while (element := scanner.next_element()) is not None:
            start, text = element
            count += 1
            yield _decode(text, f"{name}@{start}", start)
    except EOFError as error:
        where = "between two records" if error.args[0] < 0 else f"inside the record that begins at byte {error.args[0]}"
        detail = f"the array breaks off at byte {scanner.file_end}, {where}, after {count} records{scanner.damage}"
        yield Broken("truncated", f"{name}@{scanner.file_end}", detail, rest_lost=True)
        return
    except OverflowError as error:
        detail = f"the record that begins at byte {error.args[0]} is longer than {MAX_RECORD_BYTES >> 20} MiB"
        yield Broken("too_big", f"{name}@{error.args[0]}", detail, rest_lost=True)
        return
    if (rest := scanner.rest()) is not None:
        detail = f"{rest[1]!r} stands behind the end of the array at byte {rest[0]}"
        yield Broken("trailing_bytes", f"{name}@{rest[0]}", detail, rest_lost=True)


def _read_yaml(stream: BufferedIOBase, name: str) -> Iterator[Found | Broken]:
    """The items of the `conversations` list (chatterbot's files), or of a list at the top. Every scalar is text.

    Read whole: YAML has no record boundary that could be found without parsing.
    """
    try:
        text = stream.read().decode("utf-8-sig")
        loader = _YamlLoader(text)
        root = loader.get_single_node()
        items = _yaml_items(root)
        for item in items:
            yield Found(loader.construct_document(item), f"{name}:{item.start_mark.line + 1}")
    except UnicodeDecodeError as error:
        detail = f"invalid UTF-8: byte {error.object[error.start]:#04x} at byte {error.start} of the file"
        yield Broken("bad_utf8", f"{name}@{error.start}", detail, rest_lost=True)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Broken("truncated", name, f"the gzip stream breaks off: {error}", rest_lost=True)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        yield Broken("bad_yaml", where, getattr(error, "problem", None) or str(error), rest_lost=True)


def _yaml_items(root: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if key.value == "conversations" and isinstance(value, yaml.SequenceNode):
                return list(value.value)
    if isinstance(root, yaml.SequenceNode):
        return list(root.value)
    raise yaml.MarkedYAMLError(problem="no list of conversations", problem_mark=root.start_mark if root else None)
