"""Training records: token ids and assistant turns, and with them the captured hidden states.

Owns: the two record types, the protocol by which training reads them, and the adapters over a plain sequence and over
a hidden-state store. Tokens and states are read apart because planning (vocabulary, batches) needs every record's
tokens but no state. Does not know file formats.

Legend: T tokens of one record, C captured width (3H), H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from backend.errors import OperatorError

Span = tuple[int, int]


@dataclass(frozen=True)
class RecordTokens:
    """One record without its states. `spans` are assistant turns as half-open token ranges, end token inside."""

    id: str
    source: str
    input_ids_T: torch.Tensor
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        previous = 0
        for start, stop in self.spans:
            if not previous <= start < stop <= len(self.input_ids_T):
                raise OperatorError(
                    f"record {self.id} has {len(self.input_ids_T)} tokens and the assistant turns {list(self.spans)}",
                    fix="turns must ascend, not overlap and end inside the record: merge the data again",
                    reason="record_spans",
                )
            previous = stop


@dataclass(frozen=True)
class TrainingRecord(RecordTokens):
    """One record with its states: `aux_TC` the captured layers low to high, `last_TH` after the final norm."""

    aux_TC: torch.Tensor
    last_TH: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = len(self.input_ids_T)
        if len(self.aux_TC) != rows or len(self.last_TH) != rows:
            raise OperatorError(
                f"record {self.id} has {rows} tokens, {len(self.aux_TC)} captured and {len(self.last_TH)} last rows",
                fix="the states belong to other tokens: extract this record again",
                reason="record_rows",
            )


class RecordSource(Protocol):
    """Where training reads records from, by position. `tokens` is cheap and is called for every record at the start;
    `load` reads the states and is called once per epoch and record, in the order of the batch plan."""

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> RecordTokens:
        """Ids and turns of record `index`."""

    def load(self, index: int) -> TrainingRecord:
        """Record `index` with its states."""


class SequenceSource:
    """Records that are in memory already (small data, tests)."""

    def __init__(self, records: Sequence[TrainingRecord]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def tokens(self, index: int) -> RecordTokens:
        """The record itself: a `TrainingRecord` is a `RecordTokens`."""
        return self._records[index]

    def load(self, index: int) -> TrainingRecord:
        """The record itself."""
        return self._records[index]


class StoredStates(Protocol):
    """What one stored record offers (`backend.store.reader`)."""

    @property
    def input_ids_T(self) -> torch.Tensor:
        """Token ids."""

    @property
    def aux_TC(self) -> torch.Tensor:
        """Captured layers, low to high."""

    @property
    def last_TH(self) -> torch.Tensor:
        """Last hidden state, after the final norm."""


class StoreOrigin(Protocol):
    """What a store says about its making, as far as training must know it."""

    @property
    def post_norm(self) -> bool:
        """Whether the last hidden state was taken after the final norm."""


class StateStore(Protocol):
    """What a hidden-state store offers to training (`backend.store.reader.Store`)."""

    @property
    def identity(self) -> StoreOrigin:
        """What the store was made from."""

    def record(self, record_id: str, /) -> StoredStates:
        """The states of one record, or an error that names it."""


class StoreSource:
    """Merged records (ids, turns) joined with their states in a store, checked token by token as they are read."""

    def __init__(self, store: StateStore, merged: Iterable[RecordTokens]) -> None:
        """Raises `OperatorError` (reason `pre_norm`) for a store of un-normed last states: labels would be wrong."""
        if not store.identity.post_norm:
            raise OperatorError(
                "the hidden-state store holds last states from before the final norm; labels need them after it",
                fix="extract again with the capture plugin, which stores them after the norm",
                reason="pre_norm",
            )
        self._store = store
        self._merged = tuple(merged)

    def __len__(self) -> int:
        return len(self._merged)

    def tokens(self, index: int) -> RecordTokens:
        """Ids and turns from the merged data."""
        return self._merged[index]

    def load(self, index: int) -> TrainingRecord:
        """Raises `OperatorError` (reason `record_mismatch`) where the store's tokens are not the merged ones."""
        wanted = self._merged[index]
        states = self._store.record(wanted.id)
        if not torch.equal(states.input_ids_T.long(), wanted.input_ids_T.long()):
            raise OperatorError(
                f"record {wanted.id} has other tokens in the hidden-state store than in the merged data",
                fix="the store was made from other data: extract again",
                reason="record_mismatch",
            )
        return TrainingRecord(wanted.id, wanted.source, wanted.input_ids_T, wanted.spans, states.aux_TC, states.last_TH)


def all_tokens(source: RecordSource) -> list[RecordTokens]:
    """Ids and turns of every record, in the source's order."""
    return [source.tokens(index) for index in range(len(source))]
