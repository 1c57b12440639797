"""What a draft needs from its target's checkpoint: config values, embedding, head, final norm, last decoder layer.

Owns: where these stand in a checkpoint (`language_model.` prefixes, `text_config`, tied embeddings) and which token
ids are special. Reads only what is asked for, so a 1 TB target costs its embedding and its head.
Does not know: drafts, training, or how a server loads the same checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.eagle3.checkpoint_reader import CheckpointReader
from backend.eagle3.rope import RopeConfig
from backend.errors import OperatorError

_EMBED = "model.embed_tokens.weight"
_PREFIXES = ("", "language_model.")
_ROLE_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TargetConfig:
    """The values of a target's `config.json` (its `text_config` where it has one) that a draft follows."""

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    hidden_act: str
    partial_rotary: bool
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    special_ids: tuple[int, ...]


@dataclass(frozen=True)
class FrozenTarget:
    """The target's tensors that training reads and never changes. `lm_head_VH` is `embed_VH` itself where tied."""

    embed_VH: torch.Tensor
    lm_head_VH: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """The same tables on another device; a tied table stays one tensor."""
        embed_VH = self.embed_VH.to(device, dtype)
        tied = self.lm_head_VH is self.embed_VH
        return FrozenTarget(embed_VH, embed_VH if tied else self.lm_head_VH.to(device, dtype))


class TargetCheckpoint:
    """An opened target checkpoint. Opening reads JSON and headers only."""

    def __init__(self, folder: Path) -> None:
        """Raises `OperatorError`: `checkpoint_missing`, `checkpoint_broken`, `config_incomplete`, `rope_unsupported`,
        `tensor_missing` (no embedding under any known prefix)."""
        self.folder = Path(folder)
        self.reader = CheckpointReader(self.folder)
        self.config = read_target_config(self.folder)
        self.prefix = self._find_prefix()
        # The checkpoint decides, not the config: models exist whose config says "tied" beside a separate head.
        self._head_name = next(
            (n for n in (f"{self.prefix}lm_head.weight", "lm_head.weight") if n in self.reader),
            f"{self.prefix}{_EMBED}",
        )

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self._head_name.endswith(_EMBED)

    def embed_rows(self, ids: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Embedding rows of some token ids: [len(ids), H]."""
        return self.reader.rows(f"{self.prefix}{_EMBED}", ids, dtype)

    def head_rows(self, ids: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows of the output head for some token ids: [len(ids), H]."""
        return self.reader.rows(self._head_name, ids, dtype)

    def final_norm(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Weight of the final RMSNorm: [H]."""
        return self.reader.tensor(f"{self.prefix}model.norm.weight", dtype)

    def frozen(self, dtype: torch.dtype = torch.float32) -> FrozenTarget:
        """Embedding and head, one tensor where they are tied."""
        embed_VH = self.reader.tensor(f"{self.prefix}{_EMBED}", dtype)
        if self.tied:
            return FrozenTarget(embed_VH, embed_VH)
        return FrozenTarget(embed_VH, self.reader.tensor(self._head_name, dtype))

    def layer_names(self, layer: int) -> frozenset[str]:
        """Tensor names of one decoder layer, without its prefix (``self_attn.q_proj.weight`` …)."""
        prefix = f"{self.prefix}model.layers.{layer}."
        return frozenset(name.removeprefix(prefix) for name in self.reader.names() if name.startswith(prefix))

    def layer_shape(self, layer: int, name: str) -> tuple[int, ...]:
        """Shape of one tensor of one decoder layer, from the header alone."""
        return self.reader.shape(f"{self.prefix}model.layers.{layer}.{name}")

    def layer_tensor(self, layer: int, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor of one decoder layer, `name` as `layer_names` gives it."""
        return self.reader.tensor(f"{self.prefix}model.layers.{layer}.{name}", dtype)

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            if f"{prefix}{_EMBED}" in self.reader:
                return prefix
        raise OperatorError(
            f"no {_EMBED} in {self.folder}, with none of the prefixes {[p for p in _PREFIXES if p]}",
            fix="only decoder checkpoints in Hugging Face layout are known",
            reason="tensor_missing",
        )


def read_target_config(folder: Path) -> TargetConfig:
    """Read `config.json` and the special ids beside it.

    Raises `OperatorError` with reason `checkpoint_missing`, `config_incomplete` or `rope_unsupported`.
    """
    whole = _read_json(folder / "config.json", required=True)
    text: dict[str, Any] = whole.get("text_config") or whole
    heads = _whole_number(text, "num_attention_heads", folder)
    hidden = _whole_number(text, "hidden_size", folder)
    roles = {key: text.get(key, whole.get(key)) for key in _ROLE_KEYS}
    generation = _read_json(folder / "generation_config.json", required=False)
    eos = _ids(roles["eos_token_id"]) | _ids(generation.get("eos_token_id"))
    rope = text.get("rope_parameters") or {}
    partial = float(text.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0)
    names = whole.get("architectures") or text.get("architectures") or ["unknown"]
    return TargetConfig(
        architecture=str(names[0]),
        model_type=str(text.get("model_type", "unknown")),
        hidden_size=hidden,
        intermediate_size=_whole_number(text, "intermediate_size", folder),
        num_hidden_layers=_whole_number(text, "num_hidden_layers", folder),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        # DeepSeek's family has no head_dim; its value heads are what a Llama draft's heads correspond to.
        head_dim=int(text.get("head_dim") or text.get("v_head_dim") or hidden // heads),
        vocab_size=_whole_number(text, "vocab_size", folder),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(text.get("max_position_embeddings", 8192)),
        hidden_act=str(text.get("hidden_act", "silu")),
        partial_rotary=partial != 1.0,
        rope=RopeConfig.from_model_config(text),
        bos_token_id=_first(roles["bos_token_id"]),
        eos_token_ids=tuple(sorted(eos)),
        pad_token_id=_first(roles["pad_token_id"]),
        special_ids=tuple(sorted(_tokenizer_specials(folder) | eos | _ids(roles["bos_token_id"]))),
    )


def _tokenizer_specials(folder: Path) -> set[int]:
    """Ids that the tokenizer's files mark as special: turn markers, tool-call markers, end of text."""
    decoder = _read_json(folder / "tokenizer_config.json", required=False).get("added_tokens_decoder") or {}
    found = {int(token) for token, entry in decoder.items() if entry.get("special")}
    added = _read_json(folder / "tokenizer.json", required=False).get("added_tokens") or []
    return found | {int(entry["id"]) for entry in added if entry.get("special")}


def _whole_number(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise OperatorError(
            f"{folder / 'config.json'} has no {key}", fix="not a decoder model's config", reason="config_incomplete"
        )
    return value


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(v) for v in value} if isinstance(value, list) else {int(value)}


def _first(value: Any) -> int | None:
    return min(_ids(value), default=None)


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if not required:
            return {}
        raise OperatorError(
            f"{path} does not exist", fix="point [target] model at a model folder", reason="checkpoint_missing"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OperatorError(f"{path} is not JSON: {error}", reason="checkpoint_broken") from error
    if not isinstance(value, dict):
        raise OperatorError(f"{path} does not hold a JSON object", reason="checkpoint_broken")
    return value
