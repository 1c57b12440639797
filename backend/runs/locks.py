"""Locks that the kernel frees when their holder dies: flock with a record of who holds it.

Looking must not disturb taking: a look is a shared lock for an instant, and taking is serialised by a guard file, so
that a look can never make a start fail as "already running". Used for attempts, pipelines, the GPUs. On a network
file system flock may be local to one host: preflight tests that. Knows nothing of what is protected.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backend.runs.atomic import write_all

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Held(Exception):
    """The lock is held by another; `holder` is what that one wrote into it (empty where it wrote nothing)."""

    def __init__(self, path: Path, holder: Mapping[str, Any]) -> None:
        super().__init__(f"{path} is held by {dict(holder) or 'another process'}")
        self.holder = dict(holder)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold `path` exclusively for a short critical section, waiting for it."""
    fd = os.open(path, _FLAGS, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def guard_of(path: Path) -> Path:
    """The file that serialises changes of `path`."""
    return path.with_name(f".{path.name}.guard")


def _read(fd: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(fd, 65536, 0))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


class FileLock:
    """A lock held for as long as this process lives, or until `release`. The file itself is never removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self.previous: dict[str, Any] = {}

    def acquire(self, holder: Mapping[str, Any]) -> None:
        """Take the lock without waiting and record `holder` in it; raises Held.

        `previous` is then the record of the last holder if that one died without `release`, else empty.
        """
        with exclusive(guard_of(self.path)):
            fd = os.open(self.path, _FLAGS, 0o600)
            try:
                # Shared first: refused only by a holder, not by those who look. Then exclusive: waits only for them.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_EX)
                self.previous = _read(fd)
                self._record(fd, holder)
            except BlockingIOError:
                record = _read(fd)
                os.close(fd)
                raise Held(self.path, record) from None
            except BaseException:
                os.close(fd)
                raise
        self._fd = fd

    @staticmethod
    def _record(fd: int, holder: Mapping[str, Any]) -> None:
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        if holder:
            write_all(fd, json.dumps(dict(holder)).encode())

    def release(self, leave: Mapping[str, Any] | None = None) -> None:
        """Give the lock back, with no record in it, or with `leave` where what it protects is still in use."""
        if self._fd is not None:
            self._record(self._fd, leave or {})
            os.close(self._fd)
            self._fd = None


def is_held(path: Path) -> bool:
    """True while somebody holds the lock. Creates nothing and disturbs nobody."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def current_record(path: Path) -> dict[str, Any]:
    """What the last holder wrote into the lock; empty where there is no record."""
    if not path.exists():
        return {}
    with exclusive(guard_of(path)):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _read(fd)
        finally:
            os.close(fd)
