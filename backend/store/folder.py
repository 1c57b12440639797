"""The store's folder: the files in it and how each is read and replaced.

Owns shard names on disk, the lock of the one writer, manifest and journal files, maps of shards and the quarantine.
Durable replacement is `backend.runs.atomic`'s. Knows the format's names but no record's content.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from backend.errors import OperatorError
from backend.runs.atomic import read_json, sync_dir, write_all, write_json
from backend.runs.locks import FileLock, Held, guard_of
from backend.runs.marker import MARKER
from backend.store.format import JOURNAL, LOCK, MANIFEST, QUARANTINE, SHARD, Entry, Manifest, Seal, SealedShard

MODE = 0o644
MEND = "run extract again: it repairs the store and fills in what is missing"
_CHUNK = 16 << 20
_OURS = {MARKER, MANIFEST, JOURNAL, LOCK, guard_of(Path(LOCK)).name, QUARANTINE}


@dataclass(frozen=True)
class ShardFile:
    """A shard on disk. `open` = it still bears `.tmp`: records may be appended."""

    number: int
    path: Path
    size: int
    open: bool


@dataclass(frozen=True)
class Journal:
    """The journal as read. `end` is where the last whole line ends, `torn` counts the bytes after it; `bad` are whole
    lines that are no entries, as (line number, why); `digest` is the xxh3-128 of the whole lines."""

    entries: tuple[Entry, ...]
    end: int
    torn: int
    bad: tuple[tuple[int, str], ...]
    digest: str

    def by_shard(self) -> dict[int, list[Entry]]:
        """Entries of each shard, in offset order."""
        shards: dict[int, list[Entry]] = {}
        for entry in sorted(self.entries, key=lambda entry: (entry.shard, entry.offset)):
            shards.setdefault(entry.shard, []).append(entry)
        return shards

    def seal(self) -> Seal:
        """The final counts of a store with this journal."""
        shards = tuple(
            SealedShard(shard_name(number), len(group), group[-1].end, hash_of_hashes(group))
            for number, group in self.by_shard().items()
        )
        return Seal(
            records=len(self.entries),
            tokens=sum(entry.tokens for entry in self.entries),
            nbytes=sum(shard.nbytes for shard in shards),
            journal=self.digest,
            shards=shards,
        )


def hash_of_hashes(entries: Iterable[Entry]) -> str:
    """A shard's checksum: xxh3-128 over the 16-byte checksums of its records in order."""
    hasher = xxhash.xxh3_128()
    for entry in entries:
        hasher.update(bytes.fromhex(entry.xxh3))
    return hasher.hexdigest()


def shard_name(number: int, *, open: bool = False) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}.hs{'.tmp' if open else ''}"


def shard_files(root: Path) -> dict[int, ShardFile]:
    """The shards in `root` by number, ascending. Where both names of one exist the finished one is meant."""
    found: dict[int, ShardFile] = {}
    for path in sorted(root.iterdir(), reverse=True):
        match = SHARD.fullmatch(path.name)
        if match and path.is_file():
            found[int(match[1])] = ShardFile(int(match[1]), path, path.stat().st_size, open=match[2] is not None)
    return dict(sorted(found.items()))


def damaged(root: Path, what: str) -> OperatorError:
    """The error of a store that no kill can have left like this."""
    return OperatorError(f"{root}: {what}", fix=MEND, reason="store_damaged")


def foreign_files(root: Path) -> list[str]:
    """Names in `root` that no store has, leftovers of an interrupted replacement apart."""
    shards = {shard.path.name for shard in shard_files(root).values()}
    names = {path.name for path in root.iterdir()} - shards - _OURS
    leftovers = tuple(f".{name}.tmp." for name in (MANIFEST, JOURNAL, MARKER))
    return sorted(name for name in names if not name.startswith(leftovers))


def read_manifest(root: Path) -> Manifest:
    """Raises `OperatorError`: `not_a_store`, `store_version`, `store_manifest` or `bad_json`."""
    data = read_json(root / MANIFEST)
    if data is None:
        raise OperatorError(
            f"{root} has no {MANIFEST}", fix="name the folder of one hidden-state store", reason="not_a_store"
        )
    return Manifest.from_json(data, str(root / MANIFEST))


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Replace the manifest durably; raises OSError with the old one in place."""
    write_json(root / MANIFEST, manifest.as_json(), mode=MODE)


def read_journal(root: Path) -> Journal:
    """The journal, an absent one being empty. A last line without its newline was never committed."""
    path = root / JOURNAL
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    entries: list[Entry] = []
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            entries.append(Entry.parse(line))
        except ValueError as error:
            bad.append((number, str(error)))
    digest = xxhash.xxh3_128_hexdigest(data[:whole])
    return Journal(tuple(entries), whole, len(data) - whole, tuple(bad), digest)


def lock(root: Path, who: str) -> FileLock:
    """Become the one that may change the store; raises `OperatorError` (reason `store_locked`) naming the other."""
    held = FileLock(root / LOCK)
    try:
        held.acquire({"pid": os.getpid(), "run_id": who})
    except Held as other:
        pid, run = other.holder.get("pid", "unknown"), other.holder.get("run_id", "unknown")
        raise OperatorError(
            f"{root} is being written by process {pid} (run {run})",
            fix="wait until it has ended, or stop that run",
            reason="store_locked",
        ) from other
    return held


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file's bytes as a private map: a caller that writes into a tensor over it never reaches the disk."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def quarantine(root: Path, path: Path, start: int, stop: int) -> Path:
    """Copy bytes of `path` aside durably, before they are cut off or zeroed; returns the copy."""
    copy = _next_in_quarantine(root, f"{path.name}.{start}-{stop}")
    with path.open("rb") as source, copy.open("xb") as target:
        source.seek(start)
        left = stop - start
        while left and (chunk := source.read(min(left, _CHUNK))):
            target.write(chunk)
            left -= len(chunk)
        target.flush()
        os.fsync(target.fileno())
    sync_dir(copy.parent)
    return copy


def quarantine_file(root: Path, path: Path) -> Path:
    """Move a whole file aside."""
    aside = _next_in_quarantine(root, path.name)
    path.rename(aside)
    sync_dir(aside.parent)
    sync_dir(root)
    return aside


def _next_in_quarantine(root: Path, name: str) -> Path:
    folder = root / QUARANTINE
    folder.mkdir(exist_ok=True)
    sync_dir(root)
    number = max((int(path.name.split("-")[0]) for path in folder.iterdir()), default=0) + 1
    return folder / f"{number:04d}-{name}"


def cut(path: Path, size: int) -> None:
    """Shorten a file durably."""
    with path.open("rb+") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content durably; readers see the old or the new."""
    tmp = path.with_name(f".{path.name}.tmp.{os.getpid()}")
    with tmp.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    tmp.rename(path)
    sync_dir(path.parent)


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file durably."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def finish_shard(root: Path, number: int) -> None:
    """Give a synced open shard its final name."""
    (root / shard_name(number, open=True)).rename(root / shard_name(number))
    sync_dir(root)


def is_zero(buffer: mmap.mmap | bytes, start: int, stop: int) -> bool:
    """True if all bytes of the range are zero: a hole that repair left."""
    for at in range(start, stop, _CHUNK):
        chunk = buffer[at : min(stop, at + _CHUNK)]
        if chunk.count(0) != len(chunk):
            return False
    return True
