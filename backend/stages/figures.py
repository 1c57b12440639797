"""The figures that plans are made of: the target's dimensions and weights, the tokens to come, bytes and hours.

Real values where they can be read (config.json, weight files, the merge's report), the config's planning figures
where not, and every figure says which of the two it is. Reads only; knows nothing of the host's free space policy
beyond the reserve rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from backend.agent import host
from backend.agent.host import DiskSpace
from backend.config import TargetConfig as TargetSection
from backend.data.chat import ChatFormat
from backend.eagle3.target import TargetConfig, read_target_config
from backend.engine.layers import default_layers
from backend.engine.parity import weight_bytes
from backend.errors import Exit, OperatorError
from backend.stages.base import StageContext
from backend.store.format import bytes_per_token

GB = 1_000_000_000
# Bytes of text per token, for sources that were never merged: English BPE gives 3.5 to 4.5. An estimate, said as such.
BYTES_PER_TOKEN_OF_TEXT = 4
# A checkpoint holds fp32 master weights and two Adam moments; two are kept while a third is written.
BYTES_PER_PARAMETER = 12
CHECKPOINTS = 3
# Files beside the shards: manifests, checkpoints, exports, events, merged data.
FEW_FILES = 200


@dataclass(frozen=True)
class Figures:
    """The target in numbers. `source` says where they come from."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    weight_bytes: int
    source: str
    intermediate_size: int
    kv_size: int
    q_size: int

    def default_layers(self) -> tuple[int, int, int]:
        """EAGLE-3's capture layers for this depth; see backend.engine.layers."""
        return default_layers(self.num_layers)

    def draft_parameters(self, draft_vocab: int) -> int:
        """Trainable parameters of a Llama-type draft (eagle3_training 2b): fc, one layer with 2H-wide q/k/v, head."""
        h = self.hidden_size
        attention = 2 * h * (self.q_size + 2 * self.kv_size) + self.q_size * h
        return 3 * h * h + attention + 3 * h * self.intermediate_size + draft_vocab * h + 4 * h


def target_figures(ctx: StageContext) -> Figures:
    """Dimensions from the checkpoint where it can be read, else from `[target]`.

    Raises:
        OperatorError: neither is there, or the checkpoint is broken.
    """
    section = ctx.config.target
    folder = ctx.path(section.model)
    if (folder / "config.json").is_file():
        return _from_checkpoint(read_target_config(folder), weight_bytes(folder))
    if section.hidden_size and section.num_layers and section.vocab_size:
        return _from_section(section)
    raise OperatorError(
        f"the target {folder} has no config.json",
        fix="set [target] model to the folder of the checkpoint on this host",
        reason="checkpoint_missing",
        code=Exit.PREFLIGHT_FAILED,
    )


def _from_checkpoint(config: TargetConfig, weights: int) -> Figures:
    return Figures(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        weight_bytes=weights,
        source=f"read from the checkpoint ({config.architecture})",
        intermediate_size=config.intermediate_size,
        kv_size=config.num_key_value_heads * config.head_dim,
        q_size=config.num_attention_heads * config.head_dim,
    )


def _from_section(section: TargetSection) -> Figures:
    hidden = section.hidden_size or 0
    return Figures(
        hidden_size=hidden,
        num_layers=section.num_layers or 0,
        vocab_size=section.vocab_size or 0,
        weight_bytes=int((section.weight_gb or 0.0) * GB),
        source="planning figures of the config: the checkpoint cannot be read here",
        intermediate_size=2 * hidden,
        kv_size=hidden,
        q_size=hidden,
    )


@dataclass(frozen=True)
class Tokens:
    """How many tokens the store will hold, and how that is known."""

    records: int
    tokens: int
    source: str


def token_figures(ctx: StageContext) -> Tokens:
    """From the merge's report; else `[data] expected_tokens`; else estimated from the bytes of the sources."""
    merged = ctx.products.get("merge")
    if merged is not None:
        return Tokens(int(merged.outputs["records"]), int(merged.outputs["tokens"]), "counted by merge")
    data = ctx.config.data
    if data.expected_tokens:
        return Tokens(data.expected_records or 0, data.expected_tokens, "[data] expected_tokens, until merge has run")
    text = sum(size for source in data.sources for size in _sizes(ctx, source.paths))
    tokens = text // BYTES_PER_TOKEN_OF_TEXT
    return Tokens(0, tokens, f"estimated from {text:,} bytes of sources, until merge has run")


def _sizes(ctx: StageContext, paths: list[str]) -> Iterator[int]:
    for given in paths:
        path = ctx.path(given)
        for found in [path] if path.exists() else path.parent.glob(path.name):
            files = [found] if found.is_file() else [p for p in found.rglob("*") if p.is_file()]
            yield from (file.stat().st_size for file in files)


@dataclass(frozen=True)
class Budget:
    """Disk that a run will need, in bytes and inodes. What is finished already needs none."""

    store: int
    checkpoints: int
    data: int
    have: int
    """Bytes of the plan's own store that are on disk already."""
    inodes: int
    in_flight: int
    """Bytes that captured requests may hold in the dump folder before the extractor has stored them."""
    tokens: Tokens

    @property
    def parts(self) -> dict[str, int]:
        """Bytes still to be written, by what they are."""
        return {"store": max(0, self.store - self.have), "checkpoints": self.checkpoints, "data": self.data}

    @property
    def needed(self) -> int:
        """Bytes still to be written."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """The sum in words."""
        parts = " + ".join(f"{name} {size / GB:,.2f}" for name, size in self.parts.items())
        return f"{parts}; {self.tokens.tokens:,} tokens {self.tokens.source}"


def disk_budget(ctx: StageContext, have: int = 0) -> Budget:
    """What the run will write under `[store] root`, `[train] out` and `[data] out`; finished stages write no more."""
    figures, tokens = target_figures(ctx), token_figures(ctx)
    store = tokens.tokens * scheme_bytes(figures, ctx.config.store.scheme)
    checkpoint = BYTES_PER_PARAMETER * figures.draft_parameters(ctx.config.train.draft_vocab_size)
    shards = int(store / (ctx.config.store.shard_gb * GB)) + 1
    return Budget(
        store=0 if "extract" in ctx.products else store,
        checkpoints=0 if "train" in ctx.products else CHECKPOINTS * checkpoint,
        data=0 if "merge" in ctx.products else tokens.tokens * 8,
        have=have,
        inodes=4 * shards + FEW_FILES,
        in_flight=ctx.config.extract.concurrency * ctx.config.data.max_tokens * scheme_bytes(figures, "float32"),
        tokens=tokens,
    )


def scheme_bytes(figures: Figures, scheme: str) -> int:
    """Bytes of one token in the store under a scheme (three captured layers and the last hidden state)."""
    return bytes_per_token(scheme, figures.hidden_size, 3)


def reserve_bytes(ctx: StageContext) -> int:
    """`reserve_of` the store's file system."""
    return reserve_of(ctx, host.disk_space(ctx.path(ctx.config.store.root)))


def reserve_of(ctx: StageContext, space: DiskSpace) -> int:
    """Free space that is never used: min(2 % of the disk, 50 GB, 10 % of what is free), or `[store] reserve_gb`."""
    if ctx.config.store.reserve_gb is not None:
        return int(ctx.config.store.reserve_gb * GB)
    return int(min(0.02 * space.total, 50 * GB, 0.10 * space.free))


def target_identity(ctx: StageContext) -> dict[str, str]:
    """What makes a target that target: its config and, per weight file, size and header (names, shapes, offsets).

    Not the weights themselves: hashing a 1 TB checkpoint costs an hour. A checkpoint whose values changed while every
    size and shape stayed is told by the canary, which compares real outputs.
    """
    folder = ctx.path(ctx.config.target.model)
    weights = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, path.stat().st_size))
        weights.update(f"{path.name}:{path.stat().st_size}:".encode() + header)
    config = hashlib.sha256((folder / "config.json").read_bytes())
    return {"name": ctx.config.target.name, "config": config.hexdigest()[:16], "weights": weights.hexdigest()[:16]}


def chat_hashes(ctx: StageContext) -> dict[str, str]:
    """What ties token ids to a target: hashes of its tokenizer and of its chat template."""
    return _chat_hashes(ctx.path(ctx.config.target.model), ctx.config.target.trust_remote_code)


@cache
def _chat_hashes(folder: Path, trust_remote_code: bool) -> dict[str, str]:
    chat = ChatFormat.load(folder, trust_remote_code=trust_remote_code)
    return {"tokenizer": chat.tokenizer_hash(), "template": chat.template_hash()}
