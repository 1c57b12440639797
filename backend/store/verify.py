"""Is the store what it claims to be? Every problem is named with its shard and record; nothing is changed.

`verify` checks journal, seal, folder and the checksums of a sample, `full` those of every record and the bytes between
them. `stat` only counts. A store that is being written, or whose writer was killed, is no problem but a note.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backend.report import Check, Reporter
from backend.runs.locks import is_held
from backend.store.folder import (
    MEND,
    Journal,
    ShardFile,
    foreign_files,
    is_zero,
    map_file,
    read_journal,
    read_manifest,
    shard_files,
    shard_name,
)
from backend.store.format import JOURNAL, LOCK, QUARANTINE, Entry, Manifest, StoreIdentity
from backend.store.record import Buffer, fault
from backend.store.repair import gaps

SAMPLE = 64
"""Records whose checksum a verification checks that is not full, beside the last of each shard."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `kind` is a stable word; `shard` and `record` are empty where none is concerned."""

    kind: str
    text: str
    shard: str = ""
    record: str = ""

    def __str__(self) -> str:
        where = ", ".join([self.shard] * bool(self.shard) + [f"record {self.record}"] * bool(self.record))
        return f"{where}: {self.text}" if where else self.text


@dataclass(frozen=True)
class StoreReport:
    """The result of a verification. `checked` records had their checksum compared."""

    root: str
    records: int
    tokens: int
    nbytes: int
    checked: int
    full: bool
    sealed: bool
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if there is no problem."""
        return not self.problems

    def describe(self) -> str:
        """The result in one line."""
        scope = "every checksum" if self.full else f"{self.checked:,} checksums"
        what = f"{self.records:,} records, {self.tokens:,} tokens, {self.nbytes:,} bytes, {scope} compared"
        if self.ok:
            return f"{what}: sound{'' if self.sealed else ', not sealed'}"
        return f"{what}: {len(self.problems)} problems, first: {self.problems[0]}"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True)
class StoreStat:
    """What is in a store, from its index alone. `sources` maps a name to (records, tokens)."""

    root: str
    identity: StoreIdentity
    records: int
    tokens: int
    nbytes: int
    shards: int
    sealed: bool
    writing: bool
    quarantined: int
    """Bytes in quarantine."""
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "identity": self.identity.as_json()}


def stat(root: Path) -> StoreStat:
    """Count; raises `OperatorError` where `root` is no store."""
    manifest, journal = read_manifest(root), read_journal(root)
    records, tokens = Counter[str](), Counter[str]()
    for entry in journal.entries:
        records[entry.source] += 1
        tokens[entry.source] += entry.tokens
    return StoreStat(
        root=str(root),
        identity=manifest.identity,
        records=len(journal.entries),
        tokens=tokens.total(),
        nbytes=sum(entry.nbytes for entry in journal.entries),
        shards=len(shard_files(root)),
        sealed=manifest.seal is not None,
        writing=is_held(root / LOCK),
        quarantined=_quarantined(root),
        sources={source: (records[source], tokens[source]) for source in sorted(records)},
    )


def verify(root: Path, *, full: bool, reporter: Reporter) -> StoreReport:
    """Check the store and report to `reporter`, at the end as the check `store`.

    Raises:
        OperatorError: `root` is no store, or its manifest is not readable.
    """
    report = _Verification(root, read_manifest(root), full, reporter).run()
    reporter.check(Check("store", report.ok, report.describe(), report.as_json(), "" if report.ok else MEND))
    return report


@dataclass
class _Verification:
    root: Path
    manifest: Manifest
    full: bool
    reporter: Reporter
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: int = 0

    def run(self) -> StoreReport:
        # Journal before shards: a writer at work only ever makes the shards longer than what this journal names.
        journal = read_journal(self.root)
        shards = shard_files(self.root)
        self._journal(journal)
        self._seal(journal)
        self._folder(journal, shards)
        sample = self._sample(journal)
        for number, entries in journal.by_shard().items():
            self._shard(number, entries, shards.get(number), sample)
        return StoreReport(
            root=str(self.root),
            records=len(journal.entries),
            tokens=sum(entry.tokens for entry in journal.entries),
            nbytes=sum(entry.nbytes for entry in journal.entries),
            checked=self.checked,
            full=self.full,
            sealed=self.manifest.seal is not None,
            problems=tuple(self.problems),
            notes=tuple(self.notes),
        )

    def _found(self, kind: str, text: str, shard: str = "", record: str = "") -> None:
        self.problems.append(Problem(kind, text, shard, record))
        self.reporter.warning(str(self.problems[-1]))

    def _journal(self, journal: Journal) -> None:
        for number, why in journal.bad:
            self._found("journal_line", f"{JOURNAL}, line {number}: {why}")
        if journal.torn:
            self.notes.append(f"{JOURNAL} ends in {journal.torn} bytes of an unfinished line")
        for record, times in Counter(entry.id for entry in journal.entries).items():
            if times > 1:
                self._found("record_duplicate", f"{JOURNAL} names it {times} times", record=record)

    def _seal(self, journal: Journal) -> None:
        seal = self.manifest.seal
        if seal is None:
            self.notes.append("not sealed: records may still be missing")
            return
        now = journal.seal()
        for name in ("records", "tokens", "nbytes"):
            if (was := getattr(seal, name)) != (is_ := getattr(now, name)):
                self._found("seal_counts", f"sealed with {was} {name}, {JOURNAL} names {is_}")
        if seal.journal != now.journal:
            self._found("journal_changed", f"{JOURNAL} is not the one that was sealed")
        have = {shard.name: shard for shard in now.shards}
        for shard in seal.shards:
            if have.get(shard.name) != shard:
                self._found("shard_changed", "not the records that were sealed", shard=shard.name)

    def _folder(self, journal: Journal, shards: dict[int, ShardFile]) -> None:
        for name in foreign_files(self.root):
            self._found("foreign_file", f"{name} does not belong to a store")
        if size := _quarantined(self.root):
            self.notes.append(f"{size:,} bytes in {QUARANTINE}/")
        listed = {entry.shard for entry in journal.entries}
        for shard in shards.values():
            if shard.number in listed:
                continue
            if shard.open and shard.number == max(shards):
                self.notes.append(f"{shard.path.name}: {shard.size} bytes not yet journalled")
            else:
                self._found("shard_unknown", f"{JOURNAL} names no record in it", shard=shard.path.name)

    def _sample(self, journal: Journal) -> set[str]:
        if self.full:
            return {entry.id for entry in journal.entries}
        spread = journal.entries[:: max(1, len(journal.entries) // SAMPLE)]
        ends = [entries[-1] for entries in journal.by_shard().values()]
        return {entry.id for entry in (*spread, *ends)}

    def _shard(self, number: int, entries: list[Entry], file: ShardFile | None, sample: set[str]) -> None:
        name = shard_name(number)
        if file is None:
            self._found("shard_missing", f"gone with {len(entries)} records", name)
            return
        buffer = map_file(file.path)
        previous = 0
        for entry in entries:
            if entry.end > file.size:
                self._found("shard_truncated", f"the file ends at {file.size}, it at {entry.end}", name, entry.id)
            elif entry.offset < previous:
                self._found("record_overlap", f"begins at {entry.offset}, inside another", name, entry.id)
            elif entry.id in sample:
                self._record(buffer, entry, name, len(sample))
            previous = max(previous, entry.end)
        self._between(buffer, entries, file, name)

    def _record(self, buffer: Buffer, entry: Entry, name: str, total: int) -> None:
        if why := fault(buffer, entry, self.manifest.identity.sha()):
            self._found("record_broken", why, name, entry.id)
        self.checked += 1
        self.reporter.progress(self.checked, total, "records")

    def _between(self, buffer: Buffer, entries: list[Entry], file: ShardFile, name: str) -> None:
        end = max(entry.end for entry in entries)
        if file.open and file.size > end:
            self.notes.append(f"{file.path.name}: {file.size - end} bytes not yet journalled")
        elif file.size > end:
            self._found("stray_bytes", f"bytes {end} to {file.size} belong to no record", name)
        for start, stop in gaps(entries, min(end, file.size)) if self.full else ():
            if is_zero(buffer, start, stop):
                self.notes.append(f"{name}: a hole of {stop - start} bytes that repair left")
            else:
                self._found("stray_bytes", f"bytes {start} to {stop} belong to no record", name)


def _quarantined(root: Path) -> int:
    folder = root / QUARANTINE
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0
