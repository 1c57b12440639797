"""Reading a store: every record in O(1), as tensors over the shard's map; nothing is copied for bf16 and float32.

Training, verification and export read through this. It takes a snapshot of the journal at `open`, so it may look at a
store that is being written. Knows nothing of batches and devices.

Legend: T tokens, C captured width, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from backend.errors import OperatorError
from backend.store.folder import damaged, map_file, read_journal, read_manifest, shard_files, shard_name
from backend.store.format import AUX, IDS, JOURNAL, LAST, PAD, SCALE, SPANS, Entry, Manifest, StoreIdentity
from backend.store.record import Buffer, Span, dequantise, fault, header_at, view


@dataclass(frozen=True)
class StoreRecord:
    """One record. `input_ids_T` int32; `aux_TC` the captured layers low to high and `last_TH` the last hidden state, in
    bf16 (schemes bf16, aux8) or float32. Views of a private map: writing into them does not reach the disk."""

    id: str
    source: str
    spans: tuple[Span, ...]
    input_ids_T: torch.Tensor
    aux_TC: torch.Tensor
    last_TH: torch.Tensor


class Store:
    """A store opened for reading. Indices run over the records in the order in which they stand on disk."""

    def __init__(self, root: Path, manifest: Manifest, entries: tuple[Entry, ...], verify_every: int) -> None:
        self.root = root
        self.manifest = manifest
        self.entries = entries
        self._sha = manifest.identity.sha()
        self._index = {entry.id: index for index, entry in enumerate(entries)}
        self._maps: dict[int, Buffer] = {}
        self._verify_every = verify_every
        self._reads = itertools.count(1)

    @classmethod
    def open(cls, root: Path, *, verify_every: int = 0) -> Self:
        """Open `root`. With `verify_every` = n, each n-th record read is checked against its checksum.

        Raises:
            OperatorError: `not_a_store`, `store_version`, `store_manifest`; `store_damaged` for a journal that is not
                readable or a shard that is missing or too short.
        """
        root = Path(root)
        manifest, journal = read_manifest(root), read_journal(root)
        for number, why in journal.bad:
            raise damaged(root, f"{JOURNAL}, line {number}: {why}")
        shards, listed = shard_files(root), journal.by_shard()
        for number, entries in listed.items():
            size = shards[number].size if number in shards else 0
            if size < entries[-1].end:
                last = entries[-1]
                raise damaged(root, f"{shard_name(number)} ends at {size}, its record {last.id} at {last.end}")
        return cls(root, manifest, tuple(itertools.chain.from_iterable(listed.values())), verify_every)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Forget the maps; tensors that are still held keep theirs."""
        self._maps.clear()

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, record_id: object) -> bool:
        return record_id in self._index

    def __iter__(self) -> Iterator[StoreRecord]:
        return (self.record(index) for index in range(len(self)))

    @property
    def identity(self) -> StoreIdentity:
        """What the store was made from."""
        return self.manifest.identity

    @property
    def ids(self) -> tuple[str, ...]:
        """Record ids by index."""
        return tuple(entry.id for entry in self.entries)

    @property
    def tokens(self) -> int:
        """Tokens of all records."""
        return sum(entry.tokens for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all records on disk."""
        return sum(entry.nbytes for entry in self.entries)

    def rows(self, key: str | int) -> int:
        """Tokens of one record, from the index alone."""
        return self.entry(key).tokens

    def by_shard(self) -> Iterator[tuple[str, range]]:
        """Shard name and the indices of its records, for reading shard by shard."""
        start = 0
        for number, group in itertools.groupby(self.entries, key=lambda entry: entry.shard):
            stop = start + sum(1 for _ in group)
            yield shard_name(number), range(start, stop)
            start = stop

    def entry(self, key: str | int) -> Entry:
        """The index line of a record by id or index; raises `OperatorError` (reason `record_missing`)."""
        try:
            return self.entries[self._index[key] if isinstance(key, str) else key]
        except (KeyError, IndexError):
            raise OperatorError(
                f"record {key} is not among the {len(self)} of {self.root}",
                fix="run extract again: it captures what is missing",
                reason="record_missing",
            ) from None

    def raw(self, key: str | int) -> dict[str, torch.Tensor]:
        """The tensors of a record as they stand on disk (`aux_hidden_state`, `hidden_state`, `input_ids`, `spans`, and
        `aux_scale` under aux8), for callers that dequantise on a device. Errors as in `record`."""
        entry = self.entry(key)
        buffer = self._map(entry.shard)
        try:
            header = header_at(buffer, entry.offset)
        except ValueError as error:
            raise self._broken(entry, str(error)) from error
        if (header.id, header.tokens, header.nbytes) != (entry.id, entry.tokens, entry.nbytes):
            raise self._broken(entry, f"record {header.id} with {header.tokens} tokens stands there")
        due = self._verify_every and next(self._reads) % self._verify_every == 0
        if due and (why := fault(buffer, entry, self._sha)):
            raise self._broken(entry, why)
        return {name: view(buffer, entry.offset, slot) for name, slot in header.tensors.items() if name != PAD}

    def record(self, key: str | int) -> StoreRecord:
        """One record by id or index.

        Raises:
            OperatorError: `record_missing`; `store_damaged` where its bytes are not those that were written.
        """
        entry, tensors = self.entry(key), self.raw(key)
        aux_TC = dequantise(tensors[AUX], tensors[SCALE]) if SCALE in tensors else tensors[AUX]
        spans = tuple((start, stop) for start, stop in tensors[SPANS].tolist())
        return StoreRecord(entry.id, entry.source, spans, tensors[IDS], aux_TC, tensors[LAST])

    def _broken(self, entry: Entry, why: str) -> OperatorError:
        return damaged(self.root, f"{shard_name(entry.shard)}, record {entry.id}: {why}")

    def _map(self, number: int) -> Buffer:
        if number not in self._maps:
            # The writer may rename the shard between the listing and the map: its final name is then there.
            try:
                self._maps[number] = map_file(self.root / shard_name(number))
            except FileNotFoundError:
                self._maps[number] = self._map_open(number)
        return self._maps[number]

    def _map_open(self, number: int) -> Buffer:
        try:
            return map_file(self.root / shard_name(number, open=True))
        except FileNotFoundError:
            return map_file(self.root / shard_name(number))
