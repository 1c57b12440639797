"""The arithmetic of the canary on made-up tensors: right states pass, each kind of wrong state fails clearly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backend.engine.canary_math import (
    CONTROL_FACTOR,
    Measured,
    nearest_boundary,
    prompt_ids,
    prompt_logprobs,
    relative_errors,
    rms_norm,
)

T, H, V, N = 24, 32, 96, 8


def boundaries(dtype: torch.dtype = torch.float32, step: float = 0.3) -> dict[int, Tensor]:
    """A residual stream: every layer adds `step` of fresh noise to the one before."""
    generator = torch.Generator().manual_seed(1)
    state_TH = torch.randn(T, H, generator=generator)
    found = {}
    for c in range(N):
        found[c] = state_TH.to(dtype)
        state_TH = state_TH + step * torch.randn(T, H, generator=generator)
    return found


def test_log_probabilities_from_head_blocks_equal_log_softmax_over_the_whole_head() -> None:
    generator = torch.Generator().manual_seed(2)
    last_TH, head_VH = torch.randn(T, H, generator=generator), torch.randn(V, H, generator=generator)
    ids_T = torch.randint(V, (T,), generator=generator)
    whole_TV = torch.log_softmax(last_TH @ head_VH.T, -1)
    expected_T = whole_TV[:-1].gather(1, ids_T[1:, None]).squeeze(1)
    for rows in (1, 7, V, 2 * V):
        rebuilt_T = prompt_logprobs(last_TH, ids_T, head_VH.split(rows))
        torch.testing.assert_close(rebuilt_T, expected_T, rtol=1e-5, atol=1e-5)


def test_the_rounding_of_a_bf16_engine_is_not_taken_for_an_error() -> None:
    generator = torch.Generator().manual_seed(3)
    last_TH = (4 * torch.randn(T, H, generator=generator)).bfloat16()
    head_VH = torch.randn(V, H, generator=generator)
    ids_T = torch.randint(V, (T,), generator=generator)
    engine_TV = torch.log_softmax((last_TH @ head_VH.bfloat16().T).float(), -1)
    expected_T = engine_TV[:-1].gather(1, ids_T[1:, None]).squeeze(1)
    rebuilt_T = prompt_logprobs(last_TH, ids_T, head_VH.split(17))
    exact_T = prompt_logprobs(last_TH.float(), ids_T, head_VH.split(17))
    assert float((rebuilt_T - expected_T).abs().mean()) < 0.2 * float((exact_T - expected_T).abs().mean())


def test_a_token_outside_the_head_gives_nan_and_not_a_plausible_number() -> None:
    ids_T = torch.full((T,), V + 1)
    rebuilt_T = prompt_logprobs(torch.randn(T, H), ids_T, [torch.randn(V, H)])
    assert rebuilt_T.isnan().all()
    assert not Measured(error=float(rebuilt_T.abs().mean()), bound=1.0, control=100.0).ok


def test_rms_norm_is_the_one_of_the_models() -> None:
    weight_H, states_TH = torch.rand(H) + 0.5, torch.randn(T, H) * 50
    expected_TH = torch.nn.functional.rms_norm(states_TH, (H,), weight_H, 1e-6)
    torch.testing.assert_close(rms_norm(states_TH, weight_H, 1e-6), expected_TH)


def test_a_token_with_an_enormous_norm_does_not_hide_the_others() -> None:
    """Real models have attention sinks a thousand times larger than other tokens, equal in every layer."""
    reference_TH = torch.ones(T, H)
    reference_TH[0] *= 1e4
    wrong_TH = reference_TH.clone()
    wrong_TH[1:] *= 2
    assert float(relative_errors(wrong_TH, reference_TH).median()) == pytest.approx(1.0)
    assert float((wrong_TH - reference_TH).norm() / reference_TH.norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("c", [0, 2, 5, N - 1])
def test_a_right_layer_is_nearest_to_its_own_boundary(dtype: torch.dtype, c: int) -> None:
    stream = boundaries(dtype)
    found = nearest_boundary(c, stream[c], stream)
    assert found.ok and found.nearest == c and found.neighbour in (c - 1, c + 1)


@pytest.mark.parametrize("shift", [-1, 1])
def test_an_off_by_one_layer_is_caught_and_the_true_one_named(shift: int) -> None:
    stream = boundaries()
    found = nearest_boundary(4, stream[4 + shift], stream)
    assert not found.ok and found.nearest == 4 + shift


def test_layers_that_cannot_be_told_apart_do_not_pass() -> None:
    """All boundaries equal (a dead capture that repeats one buffer): zero error everywhere proves nothing."""
    stream = {c: torch.ones(T, H) for c in range(N)}
    assert not nearest_boundary(4, stream[4], stream).ok


def test_a_layer_that_lies_between_two_boundaries_does_not_pass() -> None:
    """A half-added residual: still nearest to its own boundary, but not clearly."""
    stream = boundaries()
    assert not nearest_boundary(4, 0.6 * stream[4] + 0.4 * stream[5], stream).ok


def test_noise_of_bf16_size_between_two_captures_is_accepted() -> None:
    stream = boundaries(torch.bfloat16)
    again_TH = (stream[4].float() * (1 + 2e-3 * torch.randn(T, H))).bfloat16()
    assert nearest_boundary(4, again_TH, stream).ok


def test_nan_states_are_never_right() -> None:
    stream = boundaries()
    assert not nearest_boundary(4, torch.full((T, H), math.nan), stream).ok
    assert not Measured(error=math.nan, bound=1.0, control=100.0).ok


def test_a_check_whose_negative_control_passes_is_no_proof() -> None:
    assert Measured(error=0.0, bound=0.05, control=CONTROL_FACTOR * 0.05).ok
    blind = Measured(error=0.0, bound=0.05, control=0.3)
    assert blind.right and not blind.telling and not blind.ok


@given(count=st.integers(1, 200), vocab=st.integers(64, 5_000), avoid=st.sets(st.integers(0, 63), max_size=20))
def test_the_canary_prompt_is_fixed_valid_and_free_of_special_ids(count: int, vocab: int, avoid: set[int]) -> None:
    ids = prompt_ids(count, vocab, avoid)
    assert ids == prompt_ids(count, vocab, avoid)
    assert len(ids) == count and all(0 <= i < vocab for i in ids)
    assert not avoid & set(ids)
    assert len(set(ids)) == min(count, len(set(prompt_ids(vocab, vocab, avoid))))
