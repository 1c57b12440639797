"""The merged data on disk: writer, reader, proof. Owner of the format.

A folder holds `train.jsonl`, `validation.jsonl`, `heldout.jsonl` and `report.json`. A line is one record:
`{"id", "source", "input_ids": [...], "spans": [[start, end], ...]}`; spans are the supervised tokens, one per assistant
turn; a record's prompt is what stands before its first span. "heldout" holds on-policy records only and is never
trained or tuned on; "validation" is the set on which settings may be picked. The report is written last and carries
each file's digest, so files of two merges can never pass for one. Knows nothing of sources or templates.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Literal, get_args

from backend.data.idmap import IdMap
from backend.data.merge_report import MergeReport, SplitFile, Totals
from backend.errors import OperatorError
from backend.report import Check

Split = Literal["train", "validation", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
REPORT = "report.json"

_SCRATCH = ".merge.tmp"
_BUCKETS = 128
"""Records are sorted by a hash, one bucket of it at a time: memory is 1/128 of the data (5 MB for 90 M tokens)."""


@dataclass(frozen=True, slots=True)
class MergedRecord:
    """One line. `spans` are [start, end) over `input_ids`, ascending and disjoint."""

    id: str
    source: str
    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the first span: what the target was given."""
        return self.input_ids[: self.spans[0][0]]

    @property
    def supervised(self) -> int:
        """Tokens inside spans."""
        return sum(end - start for start, end in self.spans)


class MergedWriter:
    """Writes a merge's three files in an order that depends on the seed and the ids alone.

    Use as a context manager; nothing appears under its final name before `publish`.
    """

    def __init__(self, out_dir: Path, seed: int) -> None:
        self._out = out_dir
        self._key = f"order-{seed}".encode()
        self.scratch = out_dir / _SCRATCH
        """A folder for the duration of the merge."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self._buckets: list[IO[str]] = [
            (self.scratch / f"bucket-{i:03d}").open("w+", encoding="utf-8") for i in range(_BUCKETS)
        ]

    def add(self, split: Split, record: MergedRecord) -> None:
        """Put `record` into `split`."""
        key = hashlib.blake2b(record.id.encode(), digest_size=8, key=self._key).hexdigest()
        line = json.dumps(asdict(record), separators=(",", ":"))
        self._buckets[int(key[:2], 16) * _BUCKETS // 256].write(f"{key} {split} {line}\n")

    def publish(self) -> dict[str, SplitFile]:
        """Write the three files and put them in place; `publish_report` must follow. Returns their totals and digests.

        An older report is removed first: until the new one stands there, the folder does not pass as merged data.
        """
        written = self._write_sorted()
        (self._out / REPORT).unlink(missing_ok=True)
        for split in SPLITS:
            (self.scratch / split).replace(self._out / f"{split}.jsonl")
        return written

    def publish_report(self, report: MergeReport) -> None:
        """Write `report.json`: the folder is merged data from here on."""
        partial = self.scratch / REPORT
        with partial.open("w", encoding="utf-8") as file:
            json.dump(report.as_json(), file, indent=1)
            file.write("\n")
            _sync(file)
        partial.replace(self._out / REPORT)
        descriptor = os.open(self._out, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> MergedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bucket in self._buckets:
            bucket.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _write_sorted(self) -> dict[str, SplitFile]:
        files = {split: (self.scratch / split).open("wb") for split in SPLITS}
        digests = {split: hashlib.blake2b(digest_size=16) for split in SPLITS}
        totals = {split: Totals() for split in SPLITS}
        try:
            for bucket in self._buckets:
                bucket.seek(0)
                for entry in sorted(bucket):
                    _, name, line = entry.split(" ", 2)
                    split: Split = next(known for known in SPLITS if known == name)
                    record = parse_line(line)
                    totals[split].add(len(record.input_ids), record.supervised)
                    digests[split].update(line.encode())
                    files[split].write(line.encode())
            for file in files.values():
                _sync(file)
            return {s: SplitFile(totals[s], files[s].tell(), digests[s].hexdigest()) for s in SPLITS}
        finally:
            for file in files.values():
                file.close()


def read_report(folder: Path) -> MergeReport:
    """The report of a finished merge.

    Raises:
        OperatorError: there is none, or it cannot be read.
    """
    path = folder / REPORT
    try:
        return MergeReport.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise OperatorError(f"{path} is missing: no finished merge", fix="run merge", reason="not_merged") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise OperatorError(
            f"{path} is not a merge report: {error}", fix="run merge again", reason="damaged"
        ) from error


def read_split(folder: Path, split: Split) -> Iterator[MergedRecord]:
    """The records of one split, in file order, streaming.

    Raises:
        OperatorError: the file is missing, or a line is not a record (names file:line).
    """
    path = folder / f"{split}.jsonl"
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise OperatorError(f"{path} is missing", fix="run merge", reason="not_merged") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                record = parse_line(line)
            except (ValueError, KeyError, TypeError) as error:
                raise OperatorError(
                    f"{path}:{number} is not a merged record: {error}", fix="run merge again", reason="damaged"
                ) from error
            yield record


def parse_line(line: str | bytes) -> MergedRecord:
    """One line as a record.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    data = json.loads(line)
    spans = tuple((int(start), int(end)) for start, end in data["spans"])
    return MergedRecord(data["id"], data["source"], tuple(data["input_ids"]), spans)


def data_digest(folder: Path) -> str:
    """blake2b-128 (hex) over everything that training sees: the three files, the template and the tokenizer.

    Taken from the files themselves, not from the report. Equal for equal data, whatever the folder is called.

    Raises:
        OperatorError: no finished merge there.
    """
    report = read_report(folder)
    parts = [report.template_hash, report.tokenizer_hash, *(_digest_of(folder / f"{split}.jsonl") for split in SPLITS)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def verify_merged(folder: Path) -> list[Check]:
    """Re-check a finished merge from its files. A file that cannot be read is a failed check, not an exception.

    Raises:
        OperatorError: there is no report, so nothing that could be checked against.
    """
    report = read_report(folder)
    off = [source.name for source in report.sources if not source.adds_up()]
    read = f"{sum(source.read for source in report.sources)} read by {len(report.sources)} sources"
    checks = [_none("in = kept + dropped, per source", off, read)]
    survey = _Survey(report)
    try:
        for split in SPLITS:
            digest, expected = _digest_of(folder / f"{split}.jsonl"), report.splits[split].digest
            evidence = f"blake2b {digest}" + ("" if digest == expected else f", the report says {expected}")
            checks.append(Check(f"{split}.jsonl is the file of this merge", digest == expected, evidence))
        with TemporaryDirectory() as scratch, IdMap(Path(scratch) / "ids") as ids:
            for split in ("heldout", "validation", "train"):
                for record in read_split(folder, split):
                    survey.see(split, record, ids)
    except OperatorError as error:
        return [*checks, Check("every line is a record", False, error.what, fix=error.fix)]
    return checks + survey.checks()


class _Survey:
    """One pass over all records: collects what each check needs."""

    def __init__(self, report: MergeReport) -> None:
        self._report = report
        self._on_policy = {source.name for source in report.sources if source.on_policy}
        self._totals = {split: Totals() for split in SPLITS}
        self._by_source = {(s.name, split): 0 for s in report.sources for split in SPLITS}
        self._heldout_prompts: set[bytes] = set()
        self._twice: list[str] = []
        self._bad_spans: list[str] = []
        self._foreign: list[str] = []
        self._leaks: list[str] = []

    def see(self, split: Split, record: MergedRecord, ids: IdMap) -> None:
        """Count one record; held-out records must come first."""
        if ids.claim(record.id, split) is not None:
            self._twice.append(record.id)
        if not _spans_fit(record):
            self._bad_spans.append(record.id)
            return
        self._totals[split].add(len(record.input_ids), record.supervised)
        key = (record.source, split)
        self._by_source[key] = self._by_source.get(key, 0) + 1
        prompt = hashlib.blake2b(repr(record.prompt_ids).encode(), digest_size=16).digest()
        if split == "heldout":
            self._heldout_prompts.add(prompt)
            if record.source not in self._on_policy:
                self._foreign.append(record.id)
        elif prompt in self._heldout_prompts:
            self._leaks.append(record.id)

    def checks(self) -> list[Check]:
        """The verdicts."""
        records = sum(totals.records for totals in self._totals.values())
        totals_off = [s for s in SPLITS if self._totals[s] != self._report.splits[s].totals]
        written = {
            (s.name, split): s.written[split].records if split in s.written else 0
            for s in self._report.sources
            for split in SPLITS
        }
        sources_off = sorted(
            {
                name
                for name, split in written.keys() | self._by_source.keys()
                if written.get((name, split), 0) != self._by_source.get((name, split), 0)
            }
        )
        sums = ", ".join(f"{s} {t.records} records {t.tokens} tokens" for s, t in self._totals.items())
        return [
            _none("record ids are unique", self._twice, f"{records} ids"),
            _none("spans lie inside their records", self._bad_spans, f"{records} records"),
            _none("totals equal the report", totals_off, sums),
            _none("counts per source equal the report", sources_off, f"{len(self._report.sources)} sources"),
            _none("held-out is on-policy only", self._foreign, f"{self._totals['heldout'].records} held out"),
            _none("no held-out prompt is trained on", self._leaks, f"{len(self._heldout_prompts)} held-out prompts"),
        ]


def _none(name: str, wrong: Sequence[str], evidence: str) -> Check:
    if not wrong:
        return Check(name, True, evidence)
    named = f"{evidence}; wrong: {', '.join(wrong[:3])}" + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return Check(name, False, named, {"wrong": len(wrong)}, "run merge again")


def _spans_fit(record: MergedRecord) -> bool:
    """At least one span with a prompt before it; each non-empty, behind the one before it, inside the record."""
    before = 0
    for start, end in record.spans:
        if not before <= start < end <= len(record.input_ids):
            return False
        before = end
    return bool(record.spans) and record.spans[0][0] > 0


def _digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except FileNotFoundError as error:
        raise OperatorError(f"{path} is missing", fix="run merge", reason="not_merged") from error


def _sync(file: IO[str] | IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
