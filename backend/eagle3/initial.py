"""Starting weights of a draft: from the target's last decoder layer, or random.

Owns: the two recipes. Both take the rows of the target's head for the draft's vocabulary. Measured on the demo's
target (held-out accept length after two epochs, `docs/training.md`): "layer" is 0.03-0.04 above "random".
Does not know training.
"""

from __future__ import annotations

import torch

from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.target import TargetCheckpoint
from backend.errors import UsageError

INITS = ("layer", "random")
STD = 0.02
# fc starts as "pass the top captured layer on"; the lower two blocks begin near zero, so that their gradient is not
# drowned by noise of their own.
FC_STD = 0.002

_LAYER_TENSORS = frozenset(
    [f"self_attn.{n}_proj.weight" for n in ("q", "k", "v", "o")]
    + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    + ["input_layernorm.weight", "post_attention_layernorm.weight"]
)


def initialise(draft: LlamaEagle3Draft, target: TargetCheckpoint, *, init: str, seed: int) -> None:
    """Fill every parameter in place. The same seed gives the same weights on any machine (drawn on the CPU).

    Raises `UsageError` (reason `init_unsupported`) when `init = "layer"` and the target's last layer is not a plain
    Llama layer of the draft's shape (attention with latent projections, experts, biases, quantised weights).
    """
    if init not in INITS:
        raise UsageError(f"no initial weights {init!r}", fix=f"[train] init: one of {INITS}", reason="init_unknown")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape).normal_(std=STD, generator=generator))
            else:
                parameter.fill_(1.0)
        draft.lm_head.weight.copy_(target.head_rows(draft.target_ids_R.cpu()))
        if init == "layer":
            _from_last_layer(draft, target, generator)


def _from_last_layer(draft: LlamaEagle3Draft, target: TargetCheckpoint, generator: torch.Generator) -> None:
    last = target.config.num_hidden_layers - 1
    _require_plain_layer(draft, target, last)
    hidden = draft.config.hidden_size
    attention, mlp = draft.midlayer.self_attn, draft.midlayer.mlp
    # The token half of q, k and v keeps its random start: the target's layer has no such input.
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight[:, hidden:] = target.layer_tensor(last, f"self_attn.{name}.weight")
    attention.o_proj.weight.copy_(target.layer_tensor(last, "self_attn.o_proj.weight"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mlp, name).weight.copy_(target.layer_tensor(last, f"mlp.{name}.weight"))
    draft.midlayer.hidden_norm.weight.copy_(target.layer_tensor(last, "input_layernorm.weight"))
    draft.midlayer.post_attention_layernorm.weight.copy_(target.layer_tensor(last, "post_attention_layernorm.weight"))
    draft.norm.weight.copy_(target.final_norm())
    draft.fc.weight.copy_(torch.empty(draft.fc.weight.shape).normal_(std=FC_STD, generator=generator))
    draft.fc.weight[:, -hidden:] += torch.eye(hidden)


def _require_plain_layer(draft: LlamaEagle3Draft, target: TargetCheckpoint, layer: int) -> None:
    names = target.layer_names(layer)
    odd = sorted(names ^ _LAYER_TENSORS)
    reason = f"it has or lacks {odd[0]}" if odd else ""
    if not odd:
        size = draft.config.hidden_size
        wanted = {
            "self_attn.q_proj.weight": (draft.config.num_attention_heads * draft.config.head_dim, size),
            "self_attn.k_proj.weight": (draft.config.num_key_value_heads * draft.config.head_dim, size),
            "mlp.gate_proj.weight": (draft.config.intermediate_size, size),
        }
        found = {n: target.layer_shape(layer, n) for n in wanted}
        reason = next((f"{n} has shape {list(found[n])}" for n in wanted if found[n] != wanted[n]), "")
    if not reason and target.config.partial_rotary:
        reason = "it rotates only a part of each head"
    if reason:
        raise UsageError(
            f"the target's last layer {layer} cannot start a Llama draft: {reason}",
            fix='[train] init = "random"',
            reason="init_unsupported",
        )
