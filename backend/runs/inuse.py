"""Which processes use a file or a folder now: open descriptors, mappings, working directories.

Looks through `/proc`, by path and by device and inode, so that a use through another path (a container's volume, a
bind mount) is found too. Processes of other users cannot be looked into without root: they are counted, not guessed.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Use:
    """One process that uses something: `how` is `fd`, `map`, `cwd` or `root`; `path` as that process sees it."""

    pid: int
    how: str
    path: str


@dataclass(frozen=True)
class Uses:
    """All uses that were seen, and how many processes could not be looked into."""

    found: tuple[Use, ...]
    unseen: int

    def pids(self) -> str:
        """The processes, for a sentence."""
        return ", ".join(str(pid) for pid in sorted({use.pid for use in self.found}))


def uses(below: str, dev: int, inodes: Container[int], *, own_fds: Container[int] = ()) -> Uses:
    """Uses of anything at or below the real path `below`, or of one of `inodes` on device `dev`.

    `own_fds` are descriptors of the calling process that do not count (those it does the looking with).
    """
    found: list[Use] = []
    unseen = 0
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            for how, link, path in _links(process):
                own = how == "fd" and pid == os.getpid() and int(link.name) in own_fds
                if not own and (_inside(path, below) or (how == "fd" and _is_one(process, link, dev, inodes))):
                    found.append(Use(pid, how, path))
            found.extend(Use(pid, "map", path) for path in _maps(process, below, dev, inodes))
        except PermissionError:
            unseen += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Uses(tuple(found), unseen)


def _inside(path: str, below: str) -> bool:
    path = path.removesuffix(" (deleted)")
    return path == below or path.startswith(f"{below}/")


def _links(process: Path) -> Iterator[tuple[str, Path, str]]:
    for name in ("cwd", "root"):
        yield name, process / name, str((process / name).readlink())
    for fd in (process / "fd").iterdir():
        try:
            yield "fd", fd, str(fd.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue


def _is_one(process: Path, fd: Path, dev: int, inodes: Container[int]) -> bool:
    """By inode first, from fdinfo: a stat of every open file would hang on a dead network file system."""
    try:
        facts = (process / "fdinfo" / fd.name).read_text(encoding="ascii", errors="replace").splitlines()
        named = [int(line.split()[1]) for line in facts if line.startswith("ino:")]
        if named and named[0] not in inodes:
            return False
        info = fd.stat()
    except FileNotFoundError:  # closed meanwhile
        return False
    return info.st_dev == dev and info.st_ino in inodes


def _maps(process: Path, below: str, dev: int, inodes: Container[int]) -> Iterator[str]:
    with (process / "maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            words = line.rstrip("\n").split(maxsplit=5)
            if len(words) < 6 or not words[5].startswith("/"):
                continue
            major, _, minor = words[3].partition(":")
            same = os.makedev(int(major, 16), int(minor, 16)) == dev and int(words[4]) in inodes
            if same or _inside(words[5], below):
                yield words[5]
