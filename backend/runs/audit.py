"""The audit log: who asked for which change, written before it is made and again with its result.

Owns `audit.jsonl` (append-only, 0600, each line synced). Unlike events, an audit line that cannot be written stops
the change: what cannot be recorded is not done. Any number of processes may append; a line is one write(2).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.errors import OperatorError
from backend.runs.atomic import write_all
from backend.runs.marker import host_name


@dataclass(frozen=True)
class Audited:
    """One line: `action` of `who` on `host` at `t` (epoch seconds); `phase` is `before`, `after` or `refused`."""

    t: float
    host: str
    who: str
    uid: int
    action: str
    phase: str
    facts: Mapping[str, Any]


class AuditLog:
    """The audit log of one home."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, action: str, phase: str, *, who: str, **facts: Any) -> Audited:
        """Append one line and sync it. Raises OSError where it cannot be written."""
        entry = Audited(round(time.time(), 3), host_name(), who, os.getuid(), action, phase, facts)
        data = json.dumps(vars(entry), ensure_ascii=False, sort_keys=True).encode(errors="replace") + b"\n"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data  # a writer was killed in mid-line: its part must not swallow ours
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        return entry

    def entries(self) -> tuple[Audited, ...]:
        """All lines, oldest first. A part of a line (of a killed writer) is passed over.

        Raises OperatorError (`audit_damaged`) for whole lines that are no entries: decisions rest on this file.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return ()
        found = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                found.append(Audited(**json.loads(line)))
            except ValueError:
                continue
            except TypeError as error:
                raise OperatorError(
                    f"{self.path}:{number} is no audit entry: {error}",
                    fix="the file was edited; put that line aside",
                    reason="audit_damaged",
                ) from error
        return tuple(found)
