"""The merge: sources -> tokens and loss spans -> three files and a report.

One pass per source (two where it has a cap), on-policy sources first, so that of two equal dialogues the on-policy one
stays and a held-out prompt is known before any other source is read. Memory does not grow with the data: ids and
buckets stand on disk. Owns the order of these steps and the split rule; the format of the result belongs to
`merged.py`, the rules for tokens to `chat.py`.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backend.data.chat import ChatFormat, Tokenised
from backend.data.idmap import IdMap
from backend.data.merge_report import MergeReport, SourceReport, Totals
from backend.data.merged import MergedRecord, MergedWriter, Split
from backend.data.records import Record, Unusable, content_id
from backend.data.sources import Dropped, Parsed, Source, SourceSpec
from backend.errors import OperatorError, UsageError
from backend.report import Reporter

_REPORT_EVERY = 500


@dataclass(frozen=True)
class MergeSettings:
    """What shapes the records. `model` is the target's folder (its tokenizer and template; no weight is read).

    The shares are of dialogues, decided by a hash of their prompt: dialogues with one prompt share one fate.
    `overlength`: what becomes of a record longer than `max_tokens`.
    """

    model: Path
    trust_remote_code: bool = False
    max_tokens: int = 8192
    overlength: Literal["drop", "cut"] = "cut"
    heldout_share: float = 0.01
    validation_share: float = 0.005
    seed: int = 0

    def shaping(self) -> dict[str, int | float | str]:
        """The settings that decide the result (the model is in the hashes of template and tokenizer)."""
        return {
            "max_tokens": self.max_tokens,
            "overlength": self.overlength,
            "heldout_share": self.heldout_share,
            "validation_share": self.validation_share,
            "seed": self.seed,
        }


def merge(sources: Sequence[SourceSpec], settings: MergeSettings, out_dir: Path, reporter: Reporter) -> MergeReport:
    """Merge `sources` into `out_dir` (created if need be; an older merge there is replaced when this one is complete).

    Raises:
        UsageError: no source, or a name used twice.
        OperatorError: a source is missing, empty, of no known format or loses more than its `max_bad`; the model has
            no tokenizer or template; nothing is left to train on. An older merge in `out_dir` then stands as it was.
    """
    names = [spec.name for spec in sources]
    if not names or len(set(names)) < len(names):
        raise UsageError("merge needs sources, each with a name of its own", fix="see [[data.sources]]")
    opened = [Source(spec) for spec in sources]
    for source in opened:
        next(iter(source))  # an unknown format must show before hours of work on the sources before it
    chat = ChatFormat.load(settings.model, trust_remote_code=settings.trust_remote_code)
    with MergedWriter(out_dir, settings.seed) as writer, IdMap(writer.scratch / "ids") as ids:
        run = _Merge(settings, chat, writer, ids, reporter, sum(source.size for source in opened))
        books = {s.spec.name: run.take(s) for s in sorted(opened, key=lambda source: not source.spec.on_policy)}
        if not run.trained:
            raise _nothing(list(books.values()))
        splits = writer.publish()
        report = MergeReport(
            settings.shaping(), chat.template_hash(), chat.tokenizer_hash(), [books[n] for n in names], splits
        )
        writer.publish_report(report)
    return report


class _Merge:
    """The state that the sources share while they are taken one after the other."""

    def __init__(
        self,
        settings: MergeSettings,
        chat: ChatFormat,
        writer: MergedWriter,
        ids: IdMap,
        reporter: Reporter,
        total_bytes: int,
    ) -> None:
        self._settings = settings
        self._chat = chat
        self._writer = writer
        self._ids = ids
        self._reporter = reporter
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._split_key = f"split-{settings.seed}".encode()
        self._rank_key = f"cap-{settings.seed}".encode()
        self.trained = 0

    def take(self, source: Source) -> SourceReport:
        """Everything of one source; returns its books, which add up."""
        books = SourceReport(source.spec.name, source.spec.on_policy, len(source.files), source.size)
        limit = self._cap(source)
        for item in source:
            books.read += 1
            if isinstance(item, Dropped):
                books.drop(item.reason, f"{item.where} {item.detail}")
                if item.rest_lost:
                    self._reporter.warning(f"source {books.name}: {item.where}: {item.detail}; the rest is not read")
            else:
                self._keep_or_drop(item, books, limit)
            if books.read % _REPORT_EVERY == 0:
                self._progress(source, books)
        books.formats = {name: detected.why for name, detected in source.formats.items()}
        self._progress(source, books)
        self._done_bytes += source.size
        _refuse_bad(source.spec, books)
        if not books.adds_up():
            raise AssertionError(f"the books of source {books.name} do not add up: {books}")
        return books

    def _keep_or_drop(self, item: Parsed, books: SourceReport, limit: int | None) -> None:
        record = item.record
        if limit is not None and self._rank(record.id) > limit:
            books.drop("capped")
            return
        owner = self._ids.owner(record.id)
        if owner is not None:
            books.drop("duplicate")
            books.duplicate_of[owner] = books.duplicate_of.get(owner, 0) + 1
            return
        split = self._split(record, on_policy=books.on_policy)
        if split is None:
            books.drop("heldout_prompt", f"{item.where} has the prompt of a held-out record")
            return
        try:
            pieces = self._chat.tokenise(record)
        except Unusable as error:
            books.drop(error.reason, f"{item.where} {error.detail}")
            return
        if not any(self._fits(piece) for piece in pieces):
            books.drop("too_long")
            return
        books.kept += 1
        books.split_rewrite += len(pieces) - 1
        for repair in item.repairs:
            books.repaired[repair] = books.repaired.get(repair, 0) + 1
        for piece in pieces:
            self._write(piece, content_id(record.messages[: piece.turns]), split, books)
        if split == "heldout":
            # A prompt's key can be no record's id: a prompt ends with somebody else's turn, a record with an answer.
            self._ids.claim(record.prompt_key, books.name)

    def _write(self, piece: Tokenised, id_: str, split: Split, books: SourceReport) -> None:
        if not self._fits(piece):
            books.pieces_dropped["too_long"] = books.pieces_dropped.get("too_long", 0) + 1
            return
        if self._ids.claim(id_, books.name) is not None:
            books.pieces_dropped["duplicate"] = books.pieces_dropped.get("duplicate", 0) + 1
            return
        ids, spans = piece.input_ids, piece.spans
        if len(ids) > self._settings.max_tokens:
            books.cut += 1
            ids, spans = _cut(ids, spans, self._settings.max_tokens)
        record = MergedRecord(id_, books.name, ids, spans)
        self._writer.add(split, record)
        books.written.setdefault(split, Totals()).add(len(ids), record.supervised)
        power = str(1 << (len(ids) - 1).bit_length())
        books.lengths[power] = books.lengths.get(power, 0) + 1
        self.trained += split == "train"

    def _fits(self, piece: Tokenised) -> bool:
        """Whether something to train on is left of the piece within `max_tokens`."""
        if self._settings.overlength == "drop":
            return len(piece.input_ids) <= self._settings.max_tokens
        return piece.spans[0][0] < self._settings.max_tokens

    def _split(self, record: Record, *, on_policy: bool) -> Split | None:
        """The split of a dialogue; None for one whose prompt an on-policy record holds out."""
        digest = hashlib.blake2b(record.prompt_key.encode(), digest_size=8, key=self._split_key).digest()
        place = int.from_bytes(digest, "big") / 2**64
        heldout, validation = self._settings.heldout_share, self._settings.validation_share
        if place < heldout and on_policy:
            return "heldout"
        if place < heldout and self._ids.owner(record.prompt_key) is not None:
            return None
        return "validation" if heldout <= place < heldout + validation else "train"

    def _rank(self, id_: str) -> int:
        digest = hashlib.blake2b(id_.encode(), digest_size=8, key=self._rank_key).digest()
        return int.from_bytes(digest, "big")

    def _cap(self, source: Source) -> int | None:
        """The highest rank within the source's cap, None where all fit. Takes a pass over the source."""
        cap = source.spec.max_records
        if cap is None:
            return None
        lowest: list[int] = []  # the `cap` lowest ranks so far, negated: a heap with the highest on top
        inside: set[int] = set()
        for item in source:
            if isinstance(item, Dropped) or self._ids.owner(item.record.id) is not None:
                continue
            rank = self._rank(item.record.id)
            if rank in inside or (len(lowest) == cap and rank > -lowest[0]):
                continue
            inside.add(rank)
            heapq.heappush(lowest, -rank)
            if len(lowest) > cap:
                inside.remove(-heapq.heappop(lowest))
        return -lowest[0] if len(lowest) == cap else None

    def _progress(self, source: Source, books: SourceReport) -> None:
        done = self._done_bytes + source.position
        self._reporter.progress(done, self._total_bytes, "bytes", source=books.name, records=books.read)


def _cut(
    ids: tuple[int, ...], spans: tuple[tuple[int, int], ...], limit: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """The first `limit` tokens, less those behind the last span; a span that is cut loses its end-of-turn token."""
    kept = tuple((start, min(end, limit)) for start, end in spans if start < limit)
    return ids[: kept[-1][1]], kept


def _refuse_bad(spec: SourceSpec, books: SourceReport) -> None:
    """Raise for a source that lost more than its `max_bad`."""
    if books.bad <= spec.max_bad * books.read:
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(books.dropped.items(), key=lambda x: -x[1]))
    raise OperatorError(
        f"source {spec.name} lost {books.bad} of {books.read} records, more than max_bad = {spec.max_bad:g} allows "
        f"({reasons}); first: {books.examples[0]}",
        fix=f"mend the source, or raise max_bad of [[data.sources]] {spec.name} if the loss is acceptable",
        reason="source_bad",
    )


def _nothing(books: Sequence[SourceReport]) -> OperatorError:
    dropped = "; ".join(f"{b.name}: {b.dropped}" for b in books)
    return OperatorError(
        f"nothing is left to train on ({dropped})",
        fix="raise max_tokens, lower the held-out share, or add sources",
        reason="nothing_left",
    )
