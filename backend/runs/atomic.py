"""JSON files that are whole or absent: written beside, synced, renamed.

Owns the write order (file, fsync, rename, fsync of the folder) that survives SIGKILL, a full disk and a power cut; a
plain `open(path, "w")` left 48 of 60 files broken under SIGKILL. Knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.errors import OperatorError

RESERVED_BYTES = 4096


def encode(obj: Mapping[str, Any]) -> bytes:
    """One JSON object as UTF-8 with sorted keys and a final newline. NaN and infinity raise ValueError."""
    return (json.dumps(obj, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sync_dir(path: Path) -> None:
    """Make renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`; one write(2) may take less than it was given."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_json(path: Path, obj: Mapping[str, Any], *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace `path` by `obj`. Readers see the old file or the new one, never a part; on an error the old one stays.

    `durable=False` leaves out both fsyncs: still never half a file after a crash of the process, but a power cut may
    bring back an older one (progress, caches). Raises OSError (disk full, read-only) with the temporary file removed.
    """
    data = encode(obj)
    tmp = path.with_name(f".{path.name}.tmp.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        tmp.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            tmp.unlink()
        raise
    if durable:
        sync_dir(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None where there is no such file.

    Raises OperatorError (`bad_json`) for a file that is no JSON object: `write_json` never leaves one.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        obj = json.loads(data)
    except ValueError as error:
        raise OperatorError(
            f"{path} is not valid JSON: {error}",
            fix="it was changed by hand or the disk is damaged; restore it or remove it",
            reason="bad_json",
        ) from error
    if not isinstance(obj, dict):
        raise OperatorError(f"{path} holds {type(obj).__name__}, not an object", reason="bad_json")
    return obj


class Reserved:
    """A JSON file whose blocks are taken in advance, so that it can be written on a full disk.

    An end that cannot be recorded looks like a run that never ended; extraction fills disks. The reserve is written at
    the start; `write` overwrites it in place (no new block on ext4, xfs, tmpfs), cuts it and renames it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tmp = path.with_name(f".{path.name}.reserved")
        fd = os.open(self._tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_all(fd, b" " * RESERVED_BYTES)
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            self._tmp.unlink()
            raise
        self._fd = fd

    def write(self, obj: Mapping[str, Any]) -> None:
        """Write `obj` under the final name, once and durably."""
        data = encode(obj)
        os.lseek(self._fd, 0, os.SEEK_SET)
        write_all(self._fd, data)
        os.ftruncate(self._fd, len(data))
        os.fsync(self._fd)
        os.close(self._fd)
        self._tmp.replace(self._path)
        sync_dir(self._path.parent)
