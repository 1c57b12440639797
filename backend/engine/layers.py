"""Layer ids: one canonical index, and the conversions to what engines mean by the same number.

Canonical `c` = the residual stream at the *input* of decoder layer c = Hugging Face's `hidden_states[c]`; c = 0 is the
embedding. Only canonical ids are stored; every conversion goes through here, because an id off by one costs about a
tenth of accept length and raises no error (sglang#25454).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from backend.errors import UsageError

# Families whose `set_eagle3_layers_to_capture` takes ids as they are, except that a list starting with 1 is shifted
# (sglang/srt/models/deepseek_v2.py since 2026-05; Kimi-K2.5 delegates to it). Every other family always adds one.
_DEEPSEEK_FAMILY = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"})


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's capture layers [2, N//2, N-3], canonical.

    Raises:
        UsageError: fewer than seven layers, where the three would not be distinct and ascending.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    validate_layers(layers, num_layers)
    return layers


def validate_layers(layers: Sequence[int], num_layers: int) -> None:
    """Refuse ids that cannot be captured: outside 0..N-1, repeated or not ascending.

    Raises:
        UsageError: naming the ids and the depth.
    """
    ascending = all(a < b for a, b in pairwise(layers))
    if not layers or not ascending or layers[0] < 0 or layers[-1] >= num_layers:
        raise UsageError(
            f"capture layers {list(layers)} do not fit a model of {num_layers} layers",
            fix=f"[capture] layers: distinct ascending ids from 0 to {num_layers - 1}, or none for the default",
            reason="bad_layers",
        )


def to_sglang_ids(layers: Sequence[int], architecture: str) -> list[int]:
    """Canonical ids as SGLang wants them in `eagle_config.eagle_aux_hidden_state_layer_ids` of a draft.

    Raises:
        UsageError: a set that the family's rule cannot express.
    """
    if architecture in _DEEPSEEK_FAMILY:
        if layers[0] == 1:
            raise UsageError(
                f"SGLang's {architecture} shifts a list of ids that starts with 1: {list(layers)} cannot be asked for",
                fix="choose a first layer other than 1",
                reason="bad_layers",
            )
        return list(layers)
    if layers[0] == 0:
        raise UsageError(
            f"SGLang's {architecture} adds 1 to every id: layer 0 cannot be asked for", reason="bad_layers"
        )
    return [layer - 1 for layer in layers]


def from_sglang_ids(ids: Sequence[int], architecture: str) -> tuple[int, ...]:
    """The canonical ids that SGLang captures when a draft's config asks for `ids`."""
    if architecture in _DEEPSEEK_FAMILY and ids[0] != 1:
        return tuple(ids)
    return tuple(layer + 1 for layer in ids)
