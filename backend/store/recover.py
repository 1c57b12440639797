"""Going on in a store whose writer was killed: looks at the tail only, never at "file exists".

A kill or a power cut can leave records written and not yet journalled, half a record, half a line. Whole records are
taken in (each proves itself by its checksum: no GPU time is lost), the rest goes to quarantine. Anything else is
damage: it is refused and named, and `backend.store.repair` mends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.store import folder
from backend.store.folder import Journal, ShardFile, damaged, map_file, read_journal, shard_files, shard_name
from backend.store.format import JOURNAL, Entry, Manifest
from backend.store.record import Buffer, entry_at, fault


@dataclass(frozen=True)
class Resumed:
    """A store ready to be appended to. `adopted` records stood whole in the tail; `quarantined` bytes did not."""

    entries: tuple[Entry, ...]
    journal_bytes: int
    next_shard: int
    open_end: int | None
    """End of the open shard `next_shard`, or None where that shard is not there yet."""
    adopted: int
    quarantined: int


def resume(root: Path, manifest: Manifest) -> Resumed:
    """Put the tail right. The caller holds the lock.

    Raises:
        OperatorError: reason `store_damaged`, naming shard and record.
    """
    journal, shards = read_journal(root), shard_files(root)
    listed = journal.by_shard()
    _refuse_damage(root, journal, listed, shards)
    if journal.torn:
        folder.quarantine(root, root / JOURNAL, journal.end, journal.end + journal.torn)
        folder.cut(root / JOURNAL, journal.end)
    last = max(shards, default=-1)
    if last < 0 or not shards[last].open:
        return Resumed(journal.entries, journal.end, last + 1, None, 0, journal.torn)
    shard, entries, sha = shards[last], listed.get(last, []), manifest.identity.sha()
    buffer = map_file(shard.path)
    for entry in entries:
        if why := fault(buffer, entry, sha):
            raise damaged(root, f"{shard.path.name}, record {entry.id}: {why}")
    end = entries[-1].end if entries else 0
    found = _whole_records(buffer, end, last, sha, {entry.id for entry in journal.entries})
    end = found[-1].end if found else end
    del buffer
    if end < shard.size:
        folder.quarantine(root, shard.path, end, shard.size)
    folder.cut(shard.path, end)
    lines = b"".join(entry.line() for entry in found)
    folder.append(root / JOURNAL, lines)
    quarantined = journal.torn + shard.size - end
    return Resumed((*journal.entries, *found), journal.end + len(lines), last, end, len(found), quarantined)


def _whole_records(buffer: Buffer, at: int, shard: int, sha: str, known: set[str]) -> list[Entry]:
    """The unbroken row of whole, new records from `at` on."""
    found: list[Entry] = []
    while True:
        try:
            entry = entry_at(buffer, at, shard, sha)
        except ValueError:
            return found
        if entry.id in known:
            return found
        known.add(entry.id)
        found.append(entry)
        at = entry.end


def _refuse_damage(root: Path, journal: Journal, listed: dict[int, list[Entry]], shards: dict[int, ShardFile]) -> None:
    for number, why in journal.bad:
        raise damaged(root, f"{JOURNAL}, line {number}: {why}")
    if len({entry.id for entry in journal.entries}) < len(journal.entries):
        raise damaged(root, f"{JOURNAL} names a record twice")
    for number, entries in listed.items():
        last = entries[-1]
        if number not in shards:
            raise damaged(root, f"{shard_name(number)} is missing with {len(entries)} records, last {last.id}")
        if shards[number].size < last.end:
            size = shards[number].size
            raise damaged(root, f"{shards[number].path.name} ends at {size}, its record {last.id} at {last.end}")
    for shard in shards.values():
        end = listed[shard.number][-1].end if shard.number in listed else 0
        if shard.open and shard.number != max(shards):
            raise damaged(root, f"{shard.path.name} is unfinished and not the last shard")
        if not shard.open and shard.size != end:
            raise damaged(root, f"{shard.path.name} has {shard.size - end} bytes that {JOURNAL} does not name")
