"""Small hidden-state records for the store's tests: the record of a number is the same in every process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.store.format import StoreIdentity, scheme_of
from backend.store.reader import Store
from backend.store.record import TORCH_DTYPES
from backend.store.writer import StoreWriter


def identity(**changes: Any) -> StoreIdentity:
    """A target with hidden size 8 whose layers 2, 3, 5 are captured."""
    values: dict[str, Any] = {
        "target": "tiny/target",
        "revision": "0123abcd",
        "engine": "sglang 0.5.14",
        "route": "plugin",
        "layers": (2, 3, 5),
        "post_norm": True,
        "hidden_size": 8,
        "tokenizer_hash": "t" * 16,
        "template_hash": "c" * 16,
        "max_tokens": 4096,
        "scheme": "bf16",
        "data_digest": "d" * 32,
    }
    return StoreIdentity(**{**values, **changes})


@dataclass(frozen=True)
class Sample:
    """The arguments of one `append`."""

    id: str
    source: str
    input_ids_T: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    aux_TC: torch.Tensor
    last_TH: torch.Tensor

    def append_to(self, writer: StoreWriter) -> None:
        writer.append(self.id, self.source, self.input_ids_T, self.spans, self.aux_TC, self.last_TH)

    def same_as(self, store: Store) -> bool:
        """True if the store gives back exactly this record (schemes without loss)."""
        got = store.record(self.id)
        return (
            (got.id, got.source, got.spans) == (self.id, self.source, self.spans)
            and torch.equal(got.input_ids_T.long(), self.input_ids_T)
            and torch.equal(got.aux_TC, self.aux_TC)
            and torch.equal(got.last_TH, self.last_TH)
        )


def sample(number: int, who: StoreIdentity | None = None, tokens: int | None = None) -> Sample:
    """Record `number`: 3 to 40 tokens, or as many as asked for."""
    who = who or identity()
    draw = torch.Generator().manual_seed(number)
    length = tokens or 3 + number * 7 % 38
    dtype = TORCH_DTYPES[scheme_of(who.scheme).accepts]
    return Sample(
        hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest(),
        f"source-{number % 3}",
        torch.randint(0, 32000, (length,), generator=draw),
        ((1, 2), (2, length)),
        torch.randn(length, who.width, generator=draw).to(dtype),
        torch.randn(length, who.hidden_size, generator=draw).to(dtype),
    )


def open_writer(root: Path, who: StoreIdentity | None = None, **changes: Any) -> StoreWriter:
    """A writer with shards of three to four small records and no reserve."""
    settings: dict[str, Any] = {
        "shard_bytes": 32768,
        "reserve_bytes": 0,
        "canary_digest": "canary",
        "run_id": "run-1",
        **changes,
    }
    return StoreWriter.open(root, who or identity(), **settings)


def build(root: Path, count: int, who: StoreIdentity | None = None, *, seal: bool = True) -> list[Sample]:
    """A store of records 0 to `count` - 1."""
    samples = [sample(number, who) for number in range(count)]
    with open_writer(root, who) as writer:
        for one in samples:
            one.append_to(writer)
        if seal:
            writer.seal()
    return samples


def content(root: Path) -> dict[str, bytes]:
    """The files that must not depend on how often a writer was killed: shards and journal."""
    return {path.name: path.read_bytes() for path in root.iterdir() if path.suffix in (".hs", ".jsonl", ".tmp")}
