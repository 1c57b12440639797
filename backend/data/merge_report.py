"""What a merge did, as values: per source, per split, and the sums that must hold.

Written into `report.json` beside the merged files and read back by every later stage that wants totals. Holds no time
and no host, so that the same sources and settings give the same report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1
NOT_BAD = frozenset({"duplicate", "heldout_prompt", "capped", "too_long"})
"""Reasons that say nothing about a source's quality; all others count against its `max_bad`."""


@dataclass
class Totals:
    """Records, tokens, and tokens inside spans."""

    records: int = 0
    tokens: int = 0
    supervised: int = 0

    def add(self, tokens: int, supervised: int) -> None:
        """Count one record."""
        self.records += 1
        self.tokens += tokens
        self.supervised += supervised


@dataclass
class SourceReport:
    """One source's books.

    A record read is kept or dropped: `read` = `kept` + sum(`dropped`). A kept record becomes one piece, or several
    where the template forces a split (`split_rewrite` counts the pieces beyond the first); a piece is written or
    dropped: `kept` + `split_rewrite` = sum(`written`) + sum(`pieces_dropped`). `cut` pieces lost their end to
    `max_tokens`. `lengths`: tokens of written pieces, by the next power of two.
    """

    name: str
    on_policy: bool
    files: int = 0
    bytes: int = 0
    formats: dict[str, str] = field(default_factory=dict)
    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    duplicate_of: dict[str, int] = field(default_factory=dict)
    split_rewrite: int = 0
    pieces_dropped: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    written: dict[str, Totals] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Records lost to damage or to a shape that cannot be trained on."""
        return sum(count for reason, count in self.dropped.items() if reason not in NOT_BAD)

    def adds_up(self) -> bool:
        """Whether no record and no piece is unaccounted for."""
        records = self.read == self.kept + sum(self.dropped.values())
        written = sum(totals.records for totals in self.written.values())
        return records and self.kept + self.split_rewrite == written + sum(self.pieces_dropped.values())

    def drop(self, reason: str, example: str = "") -> None:
        """Count a record that was read and not kept; the first few places are remembered."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if example and len(self.examples) < 8:
            self.examples.append(f"{reason}: {example}")


@dataclass
class SplitFile:
    """One written file: its totals, size and blake2b-128."""

    totals: Totals
    bytes: int
    digest: str


@dataclass
class MergeReport:
    """The whole merge. `settings` are those that shaped the records; the hashes tie them to a target's tokenizer."""

    settings: dict[str, Any]
    template_hash: str
    tokenizer_hash: str
    sources: list[SourceReport]
    splits: dict[str, SplitFile]
    version: int = VERSION

    @property
    def totals(self) -> Totals:
        """Over all splits."""
        every = [split.totals for split in self.splits.values()]
        return Totals(sum(t.records for t in every), sum(t.tokens for t in every), sum(t.supervised for t in every))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, with the sum of everything for readers that want one number."""
        return {**asdict(self), "totals": asdict(self.totals)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MergeReport:
        """Inverse of `as_json`.

        Raises:
            KeyError, TypeError: not a report.
        """
        sources = [
            SourceReport(**{**source, "written": {k: Totals(**v) for k, v in source["written"].items()}})
            for source in data["sources"]
        ]
        splits = {k: SplitFile(Totals(**v["totals"]), v["bytes"], v["digest"]) for k, v in data["splits"].items()}
        return cls(
            dict(data["settings"]), data["template_hash"], data["tokenizer_hash"], sources, splits, data["version"]
        )
