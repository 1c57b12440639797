"""Rotary position embedding exactly as SGLang's Llama draft computes it.

Owns: which `rope_parameters` / `rope_scaling` a draft may carry, its frequencies and the scale of cos and sin.
A draft trained with other frequencies than the server uses loses accept length with no error, so an unknown scheme
is refused here rather than approximated. Does not know heads or attention.

Rule source: sglang 0.5.14 `srt/layers/rotary_embedding/{factory,yarn,rope_variant}.py` as reached from
`srt/models/llama.py` (LlamaDecoderLayer): `yarn` there ignores `mscale` and `mscale_all_dim`, unlike DeepSeek's own.
Legend: T positions, F frequencies (= head_dim / 2), D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backend.errors import OperatorError

KNOWN_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary embedding. `scaling` is sorted (key, value) pairs without base and type."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float | int | bool], ...] = ()

    @staticmethod
    def from_model_config(config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4).

        Raises `OperatorError` (reason `rope_unsupported`) for a scheme that SGLang's Llama draft would compute
        differently or that is not implemented here. `partial_rotary_factor` is dropped: the draft rotates whole heads.
        """
        raw: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(raw.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
        kind = str(raw.pop("rope_type", None) or raw.get("type") or "default")
        for key in ("type", "partial_rotary_factor"):
            raw.pop(key, None)
        kind = "yarn" if kind == "deepseek_yarn" else kind
        if kind not in KNOWN_TYPES or "mrope_section" in raw:
            raise OperatorError(
                f"the target's rotary embedding {kind!r} ({sorted(raw)}) is not one a Llama draft can carry",
                fix=f"known: {', '.join(KNOWN_TYPES)}",
                reason="rope_unsupported",
            )
        nested = sorted(key for key, value in raw.items() if not isinstance(value, int | float | None))
        if nested:
            raise OperatorError(
                f"the target's rotary embedding has the keys {nested}, which a Llama draft cannot carry",
                reason="rope_unsupported",
            )
        kept = {key: value for key, value in raw.items() if value is not None} if kind != "default" else {}
        return RopeConfig(theta, kind, tuple(sorted(kept.items())))

    def as_rope_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` mapping of a config.json."""
        return {"rope_theta": self.theta, "rope_type": self.kind, **dict(self.scaling)}

    def number(self, key: str, default: float) -> float:
        """One scaling value as a float."""
        return float(dict(self.scaling).get(key, default))


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """(inv_freq_F in float32, factor on cos and sin). `max_positions` stands in for a missing original length."""
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain_F = 1.0 / rope.theta**exponent_F
    original = rope.number("original_max_position_embeddings", max_positions)
    factor = rope.number("factor", 1.0)
    if rope.kind == "linear":
        return plain_F / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain_F, rope, factor, original), 1.0
    if rope.kind == "yarn":
        scale = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        return _yarn(plain_F, rope, factor, original, head_dim), scale * rope.number("attn_factor", 1.0)
    return plain_F, 1.0


def _llama3(plain_F: torch.Tensor, rope: RopeConfig, factor: float, original: float) -> torch.Tensor:
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    wavelength_F = 2 * math.pi / plain_F
    smooth_F = (original / wavelength_F - low) / (high - low) if high != low else torch.zeros_like(plain_F)
    blended_F = (1 - smooth_F) * plain_F / factor + smooth_F * plain_F
    long_F = torch.where(wavelength_F > original / low, plain_F / factor, blended_F)
    return torch.where(wavelength_F < original / high, plain_F, long_F)


def _yarn(plain_F: torch.Tensor, rope: RopeConfig, factor: float, original: float, head_dim: int) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.number("beta_fast", 32)), dimension_of(rope.number("beta_slow", 1))
    if dict(rope.scaling).get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_F = ((torch.arange(len(plain_F), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_F = (1 - ramp_F) * rope.number("extrapolation_factor", 1.0)
    return plain_F / factor * (1 - kept_F) + plain_F * kept_F


def cos_sin(inv_freq_F: torch.Tensor, scale: float, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_TF and sin_TF in float32 for positions start … stop-1."""
    position_T = torch.arange(start, stop, dtype=torch.float32, device=inv_freq_F.device)
    angle_TF = position_T[:, None] * inv_freq_F.float()
    return angle_TF.cos() * scale, angle_TF.sin() * scale


def rotate(x_BhTD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Rotate whole heads, NeoX style (first half against second half), as SGLang's Llama does."""
    cos_TF, sin_TF = cos_TF.to(x_BhTD.dtype), sin_TF.to(x_BhTD.dtype)
    first_BhTF, second_BhTF = x_BhTD.chunk(2, dim=-1)
    return torch.cat([first_BhTF * cos_TF - second_BhTF * sin_TF, second_BhTF * cos_TF + first_BhTF * sin_TF], dim=-1)
