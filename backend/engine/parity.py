"""Reference states of a small target from Hugging Face Transformers, in float32 on the CPU.

Owns the one forward pass that the canary compares captured states with where the target is small enough to be loaded
twice. Knows nothing of servers or tolerances.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from backend.errors import OperatorError

_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def weight_bytes(folder: Path) -> int:
    """Size of a checkpoint's safetensors files in bytes: what a server has to read, 0 where there are none."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def is_mixture(folder: Path) -> bool:
    """Whether the model routes tokens to experts, under any of the names that config.json has for their number."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    return any(int(text.get(key) or 0) > 1 for key in _EXPERT_COUNTS)


def reference_states(folder: Path, ids: list[int], *, trust_remote_code: bool) -> list[Tensor]:
    """`hidden_states` of one prompt: N+1 tensors [T, H] in float32.

    Entry c < N is the residual stream at the input of decoder layer c; entry N is the output *after* the final norm.
    Raises OperatorError (`parity_model`) where Transformers cannot load the checkpoint.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise OperatorError(
            f"Transformers cannot load {folder}: {error}",
            fix="[gate] hf_parity = false leaves this comparison out; the other canary checks remain",
            reason="parity_model",
        ) from error
    model.eval()
    with torch.inference_mode():
        output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False, logits_to_keep=1)
    return [state_BTH[0].clone() for state_BTH in output.hidden_states]
