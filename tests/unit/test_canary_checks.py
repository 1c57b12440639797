"""The canary's checks on a made-up capture of a small checkpoint: the right one passes, each wrong one fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.eagle3.target import TargetCheckpoint
from backend.engine.canary import (
    Evidence,
    check_embedding,
    check_last_hidden,
    check_layers,
    check_parity,
    check_ranks,
    digest_of,
)
from backend.engine.canary_math import prompt_ids, prompt_logprobs, rms_norm

H, V, N, T = 32, 96, 8, 24
LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetCheckpoint:
    """A checkpoint that holds what the canary reads: embedding, head, final norm."""
    folder = tmp_path_factory.mktemp("target")
    generator = torch.Generator().manual_seed(0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "num_hidden_layers": N,
        "num_attention_heads": 4,
        "vocab_size": V,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.randn(V, H, generator=generator),
        "model.norm.weight": 1 + 0.2 * torch.randn(H, generator=generator),
        "lm_head.weight": torch.randn(V, H, generator=generator),
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return TargetCheckpoint(folder)


def stream(target: TargetCheckpoint, ids: list[int], dtype: torch.dtype) -> list[Tensor]:
    """N+1 residual states: embedding rows, and after every layer something added."""
    generator = torch.Generator().manual_seed(1)
    states = [target.embed_rows(ids)]
    for _ in range(N):
        states.append(states[-1] + 0.4 * torch.randn(T, H, generator=generator))
    return [state_TH.to(dtype) for state_TH in states]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def evidence(target: TargetCheckpoint, request: pytest.FixtureRequest) -> Evidence:
    ids = prompt_ids(T, V, target.config.special_ids)
    states = stream(target, ids, request.param)
    last_TH = rms_norm(states[N], target.final_norm(), target.config.rms_norm_eps).to(request.param)
    return Evidence(
        target=target,
        ids=ids,
        boundaries=dict(enumerate(states[:N])),
        layers={c: states[c] for c in LAYERS},
        last_TH=last_TH,
        logprobs_T=prompt_logprobs(last_TH, torch.tensor(ids), [target.head_rows(range(V))]),
    )


def test_a_right_capture_passes_every_check(evidence: Evidence) -> None:
    reference = [*(evidence.boundaries[c].float() for c in range(N)), evidence.last_TH.float()]
    for check in (
        check_last_hidden(evidence),
        check_embedding(evidence),
        check_layers(evidence),
        check_parity(evidence, reference),
    ):
        assert check.ok is True, check
    assert check_ranks(1).ok is None and check_ranks(8).ok is None


def test_states_before_the_final_norm_fail(evidence: Evidence, target: TargetCheckpoint) -> None:
    before_TH = stream(target, evidence.ids, evidence.last_TH.dtype)[N]
    check = check_last_hidden(replace(evidence, last_TH=before_TH))
    assert check.ok is False and check.detail["error"] > 5 * check.detail["bound"]


def test_the_last_hidden_of_the_layer_before_fails(evidence: Evidence, target: TargetCheckpoint) -> None:
    wrong_TH = rms_norm(evidence.boundaries[N - 1], target.final_norm(), target.config.rms_norm_eps)
    assert check_last_hidden(replace(evidence, last_TH=wrong_TH.to(evidence.last_TH.dtype))).ok is False


def test_rows_of_another_order_fail(evidence: Evidence) -> None:
    """A batch sliced at the wrong row: states of the right layer, of other tokens."""
    assert check_last_hidden(replace(evidence, last_TH=evidence.last_TH.roll(1, 0))).ok is False
    rolled = {c: state_TH.roll(1, 0) for c, state_TH in evidence.boundaries.items()}
    assert check_embedding(replace(evidence, boundaries=rolled)).ok is False


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_that_are_off_by_one_fail_and_the_true_ones_are_named(evidence: Evidence, shift: int) -> None:
    check = check_layers(replace(evidence, layers={c: evidence.boundaries[c + shift] for c in LAYERS}))
    assert check.ok is False
    assert [check.detail[str(c)]["nearest"] for c in LAYERS] == [c + shift for c in LAYERS]


def test_one_wrong_layer_among_right_ones_fails(evidence: Evidence) -> None:
    mixed = {**evidence.layers, 4: evidence.boundaries[3]}
    assert check_layers(replace(evidence, layers=mixed)).ok is False


def test_boundaries_that_start_after_the_first_layer_fail(evidence: Evidence) -> None:
    """All boundaries shifted alike would agree with the layers: the embedding is what pins them down."""
    shifted = {c: evidence.boundaries[min(c + 1, N - 1)] for c in range(N)}
    assert check_embedding(replace(evidence, boundaries=shifted)).ok is False


def test_one_flipped_bit_in_an_embedding_row_is_seen(evidence: Evidence) -> None:
    touched_TH = evidence.boundaries[0].clone()
    touched_TH[3, 5] *= 1.01
    check = check_embedding(replace(evidence, boundaries={**evidence.boundaries, 0: touched_TH}))
    assert check.ok is False and check.detail["equal"] == T - 1


def test_parity_fails_for_a_single_bad_token_although_the_median_is_fine(evidence: Evidence) -> None:
    reference = [*(evidence.boundaries[c].float() for c in range(N)), evidence.last_TH.float()]
    spoiled_TH = evidence.last_TH.clone()
    spoiled_TH[7] = spoiled_TH[8]
    check = check_parity(replace(evidence, last_TH=spoiled_TH), reference)
    assert check.ok is False and check.detail["error"] <= check.detail["bound"]


def test_a_target_whose_layers_do_nothing_cannot_be_judged(evidence: Evidence) -> None:
    """Every layer the identity: off-by-one would pass, so the check must say that it cannot tell."""
    same = dict.fromkeys(range(N), evidence.boundaries[0])
    check = check_layers(replace(evidence, boundaries=same, layers={c: same[c] for c in LAYERS}))
    assert check.ok is False


def test_the_digest_names_what_was_proven_and_no_rounding(evidence: Evidence) -> None:
    """A store must accept the next launch of the same model, and refuse other layers."""
    checks = [check_last_hidden(evidence), check_layers(evidence)]
    again = replace(evidence, logprobs_T=evidence.logprobs_T + 1e-5)
    assert digest_of(again, [check_last_hidden(again), check_layers(again)]) == digest_of(evidence, checks)
    others = replace(evidence, layers={c: evidence.boundaries[c] for c in (1, 4, 5)})
    assert digest_of(others, checks) != digest_of(evidence, checks)
