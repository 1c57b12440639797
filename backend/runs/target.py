"""A folder held by descriptors, and what is in it: the looks that every step of a deletion repeats.

Nothing that is opened here was reached through a symlink, `..` or a mount, and nothing in a path can be swapped under
a descriptor. Only looks: renames and unlinks are in `deletion`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backend.errors import Refused
from backend.runs.allow import Allow
from backend.runs.beneath import Opener
from backend.runs.marker import Marker, host_name, read_marker

MAX_DEPTH = 200
TRASH_PREFIX = ".eagle3-trash-"


@dataclass
class Target:
    """A folder held by descriptors: nothing in a path can be swapped under them."""

    parent_fd: int
    name: str
    fd: int
    marker: Marker
    opener: Opener
    own_fds: frozenset[int]


@dataclass(frozen=True)
class Content:
    """One walk's findings; `inodes` are those of everything met."""

    files: int
    folders: int
    bytes: int
    disk_bytes: int
    newest_mtime_ns: int
    inodes: frozenset[int]


@contextlib.contextmanager
def open_folder(root: Path, rel: str, opener: Opener) -> Iterator[tuple[int, ...]]:
    """Descriptors of root, parent (the root itself where there is none between) and folder. Raises Refused."""
    with contextlib.ExitStack() as stack:

        def hold(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        try:
            top = hold(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW))
        except OSError as error:
            raise Refused(f"{root}: {error.strerror}", fix="nothing was changed", reason="unreadable") from error
        if Path(f"/proc/self/fd/{top}").readlink() != root:
            raise Refused(f"{root} was swapped for a symlink while it was opened", reason="symlink")
        parent, _, name = rel.rpartition("/")
        above = hold(opener(top, parent)) if parent else top
        yield top, above, hold(opener(above, name))


@contextlib.contextmanager
def open_target(root: Path, rel: str, opener: Opener) -> Iterator[Target]:
    """Open a folder that carries a marker. Raises Refused."""
    with open_folder(root, rel, opener) as fds:
        marker = read_marker(fds[-1], f"{root}/{rel}")
        yield Target(fds[-2], rel.rpartition("/")[2], fds[-1], marker, opener, frozenset(fds))


def check_names(root: Path, rel: str, allow: Allow) -> None:
    """Root allowed and sane, relative path plain. Raises Refused."""
    allow.check(root)
    parts = rel.split("/")
    if not rel or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise Refused(f"{rel!r} is not a plain path below {root}", reason="bad_path")
    if any(part.startswith(TRASH_PREFIX) for part in parts):
        raise Refused(f"{rel} is trash already; it is purged, not deleted", reason="bad_path")


def check_identity(target: Target, path: Path) -> os.stat_result:
    """Owner and marker of the open folder. Raises Refused: `foreign_owner`, `foreign_marker`."""
    info = os.fstat(target.fd)
    check_owner(info, str(path))
    marker = target.marker
    if (marker.inode, marker.dev) != (info.st_ino, info.st_dev):
        raise Refused(
            f"the marker in {path} belongs to another folder: it was copied or moved here",
            fix="adopt the folder after looking at what is in it",
            reason="foreign_marker",
        )
    if marker.host != host_name():
        raise Refused(
            f"{path} was made on {marker.host}, this is {host_name()}: processes there cannot be seen from here",
            fix=f"delete it on {marker.host}, or adopt it here",
            reason="foreign_marker",
        )
    return info


def check_owner(info: os.stat_result, name: str) -> None:
    """Raise Refused (`foreign_owner`) for what is not ours; root too deletes only what root owns."""
    if info.st_uid != os.geteuid():
        raise Refused(
            f"{name} belongs to uid {info.st_uid}, we are uid {os.geteuid()}",
            fix="its owner must delete it",
            reason="foreign_owner",
        )


def walk(target: Target, path: Path) -> Content:
    """Count everything below the open folder, entering only folders of ours on the same mount.

    Raises Refused for the first thing that cannot be looked at: half a listing is no listing.
    """
    top = os.fstat(target.fd)
    count = _Count(newest=top.st_mtime_ns, inodes={top.st_ino})
    _count_below(target, target.fd, str(path), count, depth=0)
    return Content(count.files, count.folders, count.size, count.blocks, count.newest, frozenset(count.inodes))


@dataclass
class _Count:
    newest: int
    inodes: set[int]
    files: int = 0
    folders: int = 0
    size: int = 0
    blocks: int = 0


def _count_below(target: Target, fd: int, name: str, count: _Count, depth: int) -> None:
    for child, info in entries_of(fd, name, depth):
        count.newest = max(count.newest, info.st_mtime_ns)
        count.inodes.add(info.st_ino)
        if not stat.S_ISDIR(info.st_mode):
            count.files += 1
            count.size += info.st_size
            count.blocks += info.st_blocks * 512
            continue
        count.folders += 1
        check_owner(info, f"{name}/{child}")
        below = target.opener(fd, child)
        try:
            _count_below(target, below, f"{name}/{child}", count, depth + 1)
        finally:
            os.close(below)


def entries_of(fd: int, name: str, depth: int) -> list[tuple[str, os.stat_result]]:
    """Names and lstat of an open folder. Raises Refused: `unreadable`, `too_deep` (one descriptor a level)."""
    if depth > MAX_DEPTH:
        raise Refused(f"{name} is more than {MAX_DEPTH} folders deep", reason="too_deep")
    try:
        with os.scandir(fd) as entries:
            return [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError as error:
        raise Refused(f"{name} cannot be read: {error.strerror}", reason="unreadable") from error
