"""Layer ids: the table of what engines mean by a number, and round trips. An id off by one raises no error anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.layers import default_layers, from_sglang_ids, to_sglang_ids, validate_layers
from backend.errors import UsageError

LLAMA, DEEPSEEK, KIMI = "LlamaForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"


@pytest.mark.parametrize(
    "depth, layers", [(7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27)), (32, (2, 16, 29)), (61, (2, 30, 58))]
)
def test_default_layers_are_low_middle_and_high(depth: int, layers: tuple[int, ...]) -> None:
    assert default_layers(depth) == layers


def test_a_model_too_shallow_for_three_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="6 layers"):
        default_layers(6)


# What SGLang 0.5.14 captures (canonical) when a draft's config asks for these ids: llama.py adds one to every id,
# deepseek_v2.py only where the first id is 1, and Kimi-K2.5 delegates to it.
@pytest.mark.parametrize(
    "architecture, asked, captured",
    [
        (LLAMA, [1, 15, 26], (2, 16, 27)),
        (LLAMA, [2, 15, 27], (3, 16, 28)),
        (DEEPSEEK, [2, 30, 58], (2, 30, 58)),
        (DEEPSEEK, [1, 29, 57], (2, 30, 58)),
        (DEEPSEEK, [3, 29, 57], (3, 29, 57)),
        (KIMI, [1, 29, 57], (2, 30, 58)),
        (KIMI, [2, 30, 58], (2, 30, 58)),
        ("Qwen3ForCausalLM", [1, 15, 26], (2, 16, 27)),
    ],
)
def test_what_sglang_captures_for_ids_in_a_drafts_config(
    architecture: str, asked: list[int], captured: tuple[int, ...]
) -> None:
    assert from_sglang_ids(asked, architecture) == captured


@given(
    architecture=st.sampled_from([LLAMA, DEEPSEEK, KIMI]),
    layers=st.lists(st.integers(2, 60), min_size=1, max_size=5, unique=True).map(sorted),
)
def test_canonical_ids_survive_the_way_through_sglang(architecture: str, layers: list[int]) -> None:
    assert from_sglang_ids(to_sglang_ids(layers, architecture), architecture) == tuple(layers)


@pytest.mark.parametrize("architecture, layers", [(DEEPSEEK, [1, 30, 58]), (KIMI, [1]), (LLAMA, [0, 15, 27])])
def test_a_set_that_a_family_cannot_express_is_refused(architecture: str, layers: list[int]) -> None:
    with pytest.raises(UsageError, match=architecture) as caught:
        to_sglang_ids(layers, architecture)
    assert caught.value.reason == "bad_layers"


@pytest.mark.parametrize("layers", [[], [2, 2, 5], [5, 2], [-1, 3], [2, 8]])
def test_layers_that_cannot_be_captured_are_refused(layers: list[int]) -> None:
    with pytest.raises(UsageError, match="8 layers"):
        validate_layers(layers, 8)
    validate_layers([0, 7], 8)
