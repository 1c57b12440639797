"""Shared memory that a launch left behind: only what is proven ours, new since our launch, and used by nobody.

A killed server leaks `/dev/shm` segments, and the next one dies of a full `/dev/shm`; clearing the folder kills other
people's servers. So names are recorded before and after *our* launch, and each is unlinked one by one after a look at
owner, inode and users. Everything else is reported. Folders are never touched. Knows no server.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.runs.identity import boot_id
from backend.runs.inuse import uses

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Segment:
    """One plain file in `/dev/shm`. `size` in bytes; `boot` is the boot in which the inode means anything."""

    name: str
    dev: int
    inode: int
    uid: int
    size: int
    boot: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, for a launch's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Segment:
        """The segment that `as_json` wrote."""
        return cls(**data)


@dataclass(frozen=True)
class ScrubReport:
    """What a scrub removed, and what it left, with the reason.

    `foreign`, `replaced`, `in_use`, `other_boot`, or `unseen_users`: others may open it, and not all can be looked at.
    """

    removed: tuple[Segment, ...]
    kept: tuple[tuple[Segment, str], ...]

    @property
    def freed(self) -> int:
        """Bytes given back."""
        return sum(segment.size for segment in self.removed)


def snapshot(folder: Path = SHM) -> tuple[Segment, ...]:
    """All plain files there now, sorted by name."""
    boot, found = boot_id(), []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(info.st_mode):
                found.append(Segment(entry.name, info.st_dev, info.st_ino, info.st_uid, info.st_size, boot))
    return tuple(sorted(found, key=lambda segment: segment.name))


def new_since(before: Iterable[Segment], folder: Path = SHM) -> tuple[Segment, ...]:
    """Segments of our uid that were not there `before` (same name, other inode counts as new)."""
    known = {(segment.name, segment.inode, segment.boot) for segment in before}
    return tuple(
        segment
        for segment in snapshot(folder)
        if segment.uid == os.geteuid() and (segment.name, segment.inode, segment.boot) not in known
    )


def scrub(recorded: Iterable[Segment], folder: Path = SHM) -> ScrubReport:
    """Unlink the `recorded` segments that are still the same, ours, and neither mapped nor opened by any process.

    A segment that is gone already appears in neither list.
    """
    removed, kept = [], []
    dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for segment in recorded:
            try:
                info = os.stat(segment.name, dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            why = _why_keep(segment, info, folder)
            if why:
                kept.append((segment, why))
                continue
            os.unlink(segment.name, dir_fd=dir_fd)
            removed.append(segment)
    finally:
        os.close(dir_fd)
    return ScrubReport(tuple(removed), tuple(kept))


def _why_keep(segment: Segment, info: os.stat_result, folder: Path) -> str | None:
    if segment.boot != boot_id():
        return "other_boot"
    if (info.st_dev, info.st_ino) != (segment.dev, segment.inode) or not stat.S_ISREG(info.st_mode):
        return "replaced"
    if info.st_uid != os.geteuid():
        return "foreign"
    seen = uses(str(folder / segment.name), segment.dev, {segment.inode})
    if seen.found:
        return "in_use"
    return "unseen_users" if seen.unseen and info.st_mode & 0o066 else None
