"""Attention of a draft chain: step 0 is causal; a later step sees the step-0 keys up to its anchor and its diagonal.

Owns: that rule, which is exactly the KV cache a served draft has (EAGLE-3's training-time test; see
`docs/training.md`). Plain PyTorch, works for any dtype and device; the fast GPU kernels come beside it, not into it.
Does not know rotary embedding, projections or losses.

Legend: B records, h heads, g key/value heads, T anchors, D head_dim, k chain step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass
class ChainCache:
    """Keys and values of the steps so far; entry 0 is read causally, each later one only at its own anchor."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps have been run: the index of the step that comes next."""
        return len(self.keys)

    def append(self, key_BgTD: torch.Tensor, value_BgTD: torch.Tensor, groups: int) -> None:
        """Keep one step's keys and values, spread over the `groups` query heads that share each."""
        self.keys.append(key_BgTD.repeat_interleave(groups, dim=1))
        self.values.append(value_BgTD.repeat_interleave(groups, dim=1))


def chain_attention(query_BhTD: torch.Tensor, cache: ChainCache) -> torch.Tensor:
    """Attend with the newest step's queries (its keys are already the cache's last entry): o_BhTD.

    Records of a batch are padded on the right, so the causal rule alone keeps padding out of every real anchor.
    """
    if cache.steps == 1:
        return F.scaled_dot_product_attention(query_BhTD, cache.keys[0], cache.values[0], is_causal=True)
    anchors = query_BhTD.shape[-2]
    scale = query_BhTD.shape[-1] ** -0.5
    causal_TT = torch.ones(anchors, anchors, dtype=torch.bool, device=query_BhTD.device).tril()
    score_BhTT = (query_BhTD @ cache.keys[0].transpose(-1, -2)).masked_fill(~causal_TT, float("-inf"))
    diagonals = [(query_BhTD * key_BhTD).sum(-1, keepdim=True) for key_BhTD in cache.keys[1:]]
    score_BhTS = torch.cat([score_BhTT, *diagonals], dim=-1) * scale
    # Half precision is too coarse for the softmax of long rows; wider types stay as they are.
    wide = torch.promote_types(query_BhTD.dtype, torch.float32)
    weight_BhTS = score_BhTS.softmax(-1, dtype=wide).to(query_BhTD.dtype)
    out_BhTD: torch.Tensor = weight_BhTS[..., :anchors] @ cache.values[0]
    for i, value_BhTD in enumerate(cache.values[1:]):
        out_BhTD = out_BhTD + weight_BhTS[..., anchors + i, None] * value_BhTD
    return out_BhTD
