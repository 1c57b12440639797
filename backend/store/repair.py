"""Mending a damaged store: every whole record is kept and indexed, everything else goes to quarantine.

Works from the shards, since each record proves itself: a lost or broken journal costs nothing. Nothing is deleted;
copies first, then the journal, then the cuts, so that it may be interrupted and run again. Reads every byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from backend.report import Reporter
from backend.store import folder
from backend.store.folder import Journal, ShardFile, map_file, read_journal, read_manifest, shard_files, shard_name
from backend.store.format import JOURNAL, PAGE, Entry, Manifest
from backend.store.record import Buffer, entry_at, fault

Range = tuple[int, int]


@dataclass(frozen=True)
class RepairReport:
    """What a repair did, in words. `dropped` names the records that are gone: extraction captures them again."""

    records: int
    adopted: int
    dropped: tuple[str, ...]
    quarantined: int
    """Bytes, journal not counted."""
    actions: tuple[str, ...]


def repair(root: Path, reporter: Reporter) -> RepairReport:
    """Make the store whole.

    Raises:
        OperatorError: `store_locked` while a writer is at work; `not_a_store`, `store_version`, `store_manifest` where
            the manifest does not say what the store is.
    """
    manifest = read_manifest(root)
    held = folder.lock(root, "repair")
    try:
        return _Repair(root, manifest, reporter).run()
    finally:
        held.release()


@dataclass
class _Repair:
    root: Path
    manifest: Manifest
    reporter: Reporter
    good: dict[int, list[Entry]] = field(default_factory=dict)
    """Whole records by shard, in offset order."""
    waste: dict[int, list[Range]] = field(default_factory=dict)
    """Stretches by shard that are neither a record nor zero."""
    known: set[str] = field(default_factory=set)
    doubted: list[Entry] = field(default_factory=list)
    """Journalled, but not what the journal says."""
    actions: list[str] = field(default_factory=list)
    adopted: int = 0
    quarantined: int = 0

    def run(self) -> RepairReport:
        journal, shards = read_journal(self.root), shard_files(self.root)
        self._check_journalled(journal, shards)
        for shard in shards.values():
            self._search(shard)
        for shard in shards.values():
            self._copy_aside(shard)
        self._write_journal(journal)
        for shard in shards.values():
            self._tidy(shard, last=shard.number == max(shards))
        if self.manifest.seal and read_journal(self.root).seal() != self.manifest.seal:
            folder.write_manifest(self.root, replace(self.manifest, seal=None))
            self._did("broke the seal: the store holds other records than when it was sealed")
        return RepairReport(len(self.known), self.adopted, self._dropped(), self.quarantined, tuple(self.actions))

    def _dropped(self) -> tuple[str, ...]:
        """Ids that are gone. Where a whole record stands in the place, only its journal line was wrong."""
        places = {(entry.shard, entry.offset) for entries in self.good.values() for entry in entries}
        gone = (entry for entry in self.doubted if (entry.shard, entry.offset) not in places)
        return tuple(entry.id for entry in gone if entry.id not in self.known)

    def _did(self, what: str) -> None:
        self.actions.append(what)
        self.reporter.note(what)

    def _check_journalled(self, journal: Journal, shards: dict[int, ShardFile]) -> None:
        sha, seen = self.manifest.identity.sha(), 0
        for number, entries in journal.by_shard().items():
            buffer = map_file(shards[number].path) if number in shards else b""
            for entry in entries:
                why = f"{JOURNAL} names it twice" if entry.id in self.known else fault(buffer, entry, sha)
                if why:
                    self.doubted.append(entry)
                    self._did(f"{shard_name(number)}, record {entry.id}: {why}")
                else:
                    self.known.add(entry.id)
                    self.good.setdefault(number, []).append(entry)
                seen += 1
                self.reporter.progress(seen, len(journal.entries), "records")

    def _search(self, shard: ShardFile) -> None:
        """Whole records where the journal names none, and the waste between."""
        buffer, entries = map_file(shard.path), self.good.get(shard.number, [])
        found: list[Entry] = []
        for stretch in gaps(entries, shard.size):
            whole, rest = salvage(buffer, stretch, shard.number, self.manifest.identity.sha(), self.known)
            found += whole
            self.waste.setdefault(shard.number, []).extend(r for r in rest if not folder.is_zero(buffer, *r))
        if found:
            self.good[shard.number] = sorted([*entries, *found], key=lambda entry: entry.offset)
            self.adopted += len(found)
            self._did(f"{shard.path.name}: took in {len(found)} whole records that {JOURNAL} did not name")

    def _copy_aside(self, shard: ShardFile) -> None:
        if shard.number not in self.good:
            return
        for start, stop in self.waste.get(shard.number, []):
            folder.quarantine(self.root, shard.path, start, stop)
            self.quarantined += stop - start
            self._did(f"{shard.path.name}: bytes {start} to {stop} to quarantine")

    def _write_journal(self, journal: Journal) -> None:
        path = self.root / JOURNAL
        lines = b"".join(entry.line() for number in sorted(self.good) for entry in self.good[number])
        old = path.read_bytes() if path.exists() else None
        if old == lines:
            return
        if old:
            folder.quarantine(self.root, path, 0, len(old))
        folder.replace_file(path, lines)
        left_out = f"{len(journal.bad)} unreadable lines and {journal.torn} torn bytes"
        self._did(f"rewrote {JOURNAL}: {len(self.known)} records ({left_out}; the old one is in quarantine)")

    def _tidy(self, shard: ShardFile, *, last: bool) -> None:
        """Cut what follows the last record, zero what stands between, move aside a shard that holds none."""
        if shard.number not in self.good:
            folder.quarantine_file(self.root, shard.path)
            self.quarantined += shard.size
            self._did(f"{shard.path.name} holds no whole record: to quarantine")
            return
        end = self.good[shard.number][-1].end
        with shard.path.open("rb+") as file:
            for start, stop in self.waste.get(shard.number, []):
                for at in range(start, min(stop, end), PAGE):
                    os.pwrite(file.fileno(), bytes(PAGE), at)
            file.truncate(end)
            os.fsync(file.fileno())
        if shard.open and not last:
            folder.finish_shard(self.root, shard.number)
            self._did(f"{shard.path.name} finished: it is not the last shard")


def gaps(entries: Iterable[Entry], size: int) -> Iterator[Range]:
    """Stretches of a shard of `size` bytes that no entry covers; `entries` in offset order."""
    at = 0
    for entry in entries:
        if at < entry.offset:
            yield (at, entry.offset)
        at = max(at, entry.end)
    if at < size:
        yield (at, size)


def salvage(buffer: Buffer, within: Range, shard: int, sha: str, known: set[str]) -> tuple[list[Entry], list[Range]]:
    """Whole records of identity `sha` in a stretch of a shard, and the stretches left over.

    Records begin on pages, so each page is asked. A record that is in `known` is left over; new ones are added to it.
    """
    found: list[Entry] = []
    rest: list[Range] = []
    at = lost = within[0]
    while at < within[1]:
        try:
            entry = entry_at(buffer, at, shard, sha)
        except ValueError:
            at += PAGE
            continue
        if entry.id in known or entry.end > within[1]:
            at += PAGE
            continue
        if lost < at:
            rest.append((lost, at))
        known.add(entry.id)
        found.append(entry)
        at = lost = entry.end
    if lost < within[1]:
        rest.append((lost, within[1]))
    return found, rest
