"""A map of record ids on disk: membership for any number of records in a few megabytes of memory.

Used for exact deduplication while merging and for uniqueness while verifying. The file is scratch: it is not durable
and goes with its folder.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType


class IdMap:
    """Id (hex) -> the name of who put it there first."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode=off", "synchronous=off", "cache_size=-16384"):
            self._base.execute(f"pragma {pragma}")
        self._base.execute("create table ids (id blob primary key, owner text) without rowid")
        self._base.execute("begin")

    def claim(self, id_: str, owner: str) -> str | None:
        """Put `id_` in for `owner`. None if it is new, else the owner it already has."""
        key = bytes.fromhex(id_)
        done = self._base.execute("insert or ignore into ids values (?, ?)", (key, owner))
        return None if done.rowcount == 1 else self.owner(id_)

    def owner(self, id_: str) -> str | None:
        """Who put `id_` in; None if nobody did."""
        row = self._base.execute("select owner from ids where id = ?", (bytes.fromhex(id_),)).fetchone()
        return None if row is None else str(row[0])

    def __enter__(self) -> IdMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._base.close()
