"""The EAGLE-3 draft model: one Llama layer over the token's embedding and the target's fused hidden states.

Owns: the forward of one chain step and the parameter names, which ARE the tensor names of SGLang's
`llama_eagle3.py`, so that an export is the plain state dict. Does not know tokens, masks, losses or files: it is given
embeddings, not ids, and the embedding table itself is the target's and is never exported.

Rules (sglang 0.5.14 `srt/models/llama_eagle3.py`): x = concat(input_layernorm(embedding), hidden_norm(g)), embedding
first; the residual is g un-normed; what is fed to the next step is the layer's output before `norm`.

Legend: B records, T anchors, H hidden, C captured width (layers × H), h heads, D head_dim, R draft vocabulary,
V target vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from backend.eagle3.attention import ChainCache, chain_attention
from backend.eagle3.draft_config import DraftConfig
from backend.eagle3.rope import cos_sin, inverse_frequencies, rotate
from backend.eagle3.vocab import DraftVocab
from backend.errors import UsageError


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Normed x_BTH."""
        return F.rms_norm(x_BTH, (x_BTH.shape[-1],), self.weight, self.eps)


class DraftAttention(nn.Module):
    """Grouped-query attention whose q, k and v read the 2H-wide concatenation."""

    inv_freq_F: torch.Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        wide, size = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(wide, self.heads * size, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, config.hidden_size, bias=False)
        inv_freq_F, self.rope_scale = inverse_frequencies(config.rope, size, config.max_position_embeddings)
        self.register_buffer("inv_freq_F", inv_freq_F, persistent=False)

    def forward(self, x_BTX: torch.Tensor, cache: ChainCache) -> torch.Tensor:
        """Attention output [B, T, H] of the step that `cache` says comes next; its keys are added to the cache."""
        batch, anchors, _ = x_BTX.shape
        start = cache.steps  # the embedding of step k belongs k positions further right
        cos_TF, sin_TF = cos_sin(self.inv_freq_F, self.rope_scale, start, start + anchors)

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, anchors, -1, self.head_dim).transpose(1, 2)

        query_BhTD = rotate(split(self.q_proj(x_BTX)), cos_TF, sin_TF)
        key_BgTD = rotate(split(self.k_proj(x_BTX)), cos_TF, sin_TF)
        cache.append(key_BgTD, split(self.v_proj(x_BTX)), self.heads // self.kv_heads)
        out_BhTD = chain_attention(query_BhTD, cache)
        out: torch.Tensor = self.o_proj(out_BhTD.transpose(1, 2).reshape(batch, anchors, -1))
        return out


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """MLP output [B, T, H]."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_BTH)) * self.up_proj(x_BTH))
        return out


class DraftLayer(nn.Module):
    """The draft's only decoder layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embed_BTH: torch.Tensor, g_BTH: torch.Tensor, cache: ChainCache) -> torch.Tensor:
        """The layer's output before the final norm: [B, T, H]."""
        x_BTX = torch.cat([self.input_layernorm(embed_BTH), self.hidden_norm(g_BTH)], dim=-1)
        h_BTH = g_BTH + self.self_attn(x_BTX, cache)
        out_BTH: torch.Tensor = h_BTH + self.mlp(self.post_attention_layernorm(h_BTH))
        return out_BTH


class LlamaEagle3Draft(nn.Module):
    """A draft as SGLang's `LlamaForCausalLMEagle3` runs it. Parameters are uninitialised guesses until `initial.py`
    has filled them."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: DraftConfig, vocab: DraftVocab) -> None:
        super().__init__()
        if len(vocab) != config.draft_vocab_size or vocab.target_size != config.vocab_size:
            raise ValueError(f"vocabulary {len(vocab)} of {vocab.target_size} does not fit {config}")
        self.config = config
        self.fc = nn.Linear(len(config.layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocab.d2t_R)
        self.register_buffer("t2d", vocab.t2d_V)

    @property
    def target_ids_R(self) -> torch.Tensor:
        """Target id of each draft token, on the model's device."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, aux_BTC: torch.Tensor) -> torch.Tensor:
        """The target's captured layers (concatenated low to high) as the first step's hidden state: g_BTH."""
        g_BTH: torch.Tensor = self.fc(aux_BTC)
        return g_BTH

    def step(self, embed_BTH: torch.Tensor, g_BTH: torch.Tensor, cache: ChainCache) -> torch.Tensor:
        """One chain step for all anchors: the next step's g_BTH, pre-norm. `cache` says which step it is."""
        out_BTH: torch.Tensor = self.midlayer(embed_BTH, g_BTH, cache)
        return out_BTH

    def logits(self, g_BTH: torch.Tensor) -> torch.Tensor:
        """Scores over the draft vocabulary for any leading shape: [..., R]."""
        logits_BTR: torch.Tensor = self.lm_head(self.norm(g_BTH))
        return logits_BTR


ARCHITECTURES: dict[str, type[LlamaEagle3Draft]] = {"llama": LlamaEagle3Draft}


def draft_class(arch: str) -> type[LlamaEagle3Draft]:
    """The draft model of an architecture name. Raises `UsageError` (reason `draft_arch`) for an unknown one."""
    if arch not in ARCHITECTURES:
        raise UsageError(
            f"no draft architecture {arch!r}", fix=f"[train] arch: one of {sorted(ARCHITECTURES)}", reason="draft_arch"
        )
    return ARCHITECTURES[arch]
