"""The TTT loss and its gradients are those of the definition, computed one anchor and one token at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.eagle3.batches import collate, has_supervision
from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.records import RecordTokens, TrainingRecord
from backend.eagle3.target import FrozenTarget
from backend.eagle3.ttt import TttSums, step_weights, ttt_sums
from tests.unit.eagle3_support import (
    CPU,
    Reference,
    brute_supervised,
    double_batch,
    random_draft,
    record,
    teacher_of,
    write_target,
)


def reference_sums(
    draft: LlamaEagle3Draft, target: FrozenTarget, records: list[TrainingRecord], steps: int
) -> tuple[list[torch.Tensor], list[int], list[int], list[int]]:
    """Loss sums, counts, off-vocabulary counts and hits per step, by loops over records, anchors and steps."""
    reference, ids = Reference(draft, target), draft.target_ids_R.tolist()
    zero = sum(p.sum() * 0 for p in draft.parameters())
    loss, count, off, hit = [zero] * steps, [0] * steps, [0] * steps, [0] * steps
    for rec in records:
        tokens = rec.input_ids_T.tolist()
        for p in range(len(tokens) - 2):
            if not brute_supervised(rec, p, 0):
                continue
            prefix = reference.prefix(rec, p)
            state, seen = prefix[p][0], [kv for _, kv in prefix]
            for k in range(steps):
                if k > 0 and p + 1 + k < len(tokens):
                    state, mine = reference.token(tokens[p + 1 + k], state, p + k, seen)
                    seen = [*seen, mine]
                if not brute_supervised(rec, p, k):
                    continue
                full = target.lm_head_VH @ rec.last_TH[p + 1 + k].double()
                choice = int(full.argmax())
                if choice not in ids:
                    off[k] += 1
                    continue
                label, score = full[ids].softmax(-1), reference.scores(state)
                loss[k] = loss[k] - (label * score.log_softmax(-1)).sum()
                count[k] += 1
                hit[k] += int(ids[int(score.argmax())] == choice)
    return loss, count, off, hit


def product_sums(
    draft: LlamaEagle3Draft, records: list[TrainingRecord], steps: int, parts: tuple[FrozenTarget, object]
) -> TttSums:
    target, teacher = parts
    batch = double_batch(records, steps)
    argmax_BS = teacher.argmax_of_batch(records, batch.input_ids_BS.shape[1])  # type: ignore[attr-defined]
    return ttt_sums(draft, target, teacher, batch, argmax_BS, steps)  # type: ignore[arg-type]


CASES = [
    # (steps, heads, kv heads, [(tokens, spans)]): odd lengths, several turns, adjacent turns, empty masks, GQA
    (1, 4, 2, [(7, [(3, 7)])]),
    (2, 4, 1, [(9, [(2, 5), (6, 9)]), (5, [(4, 5)])]),
    (3, 2, 2, [(11, [(1, 4), (4, 8), (9, 11)]), (6, []), (3, [(1, 3)])]),
    (4, 6, 3, [(8, [(0, 8)]), (10, [(5, 10)])]),
]


@pytest.mark.parametrize(("steps", "heads", "kv_heads", "shapes"), CASES)
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_the_one_token_at_a_time_reference(
    tmp_path: Path, steps: int, heads: int, kv_heads: int, shapes: list[tuple[int, list[tuple[int, int]]]], tied: bool
) -> None:
    checkpoint = write_target(tmp_path, hidden=10, heads=heads, kv_heads=kv_heads, head_dim=4, inner=12, tied=tied)
    draft = random_draft(checkpoint, 25)
    records = [record(checkpoint, tokens, spans, seed) for seed, (tokens, spans) in enumerate(shapes)]
    parts = teacher_of(checkpoint, draft)

    sums = product_sums(draft, records, steps, parts)
    loss, count, off, hit = reference_sums(draft, parts[0], records, steps)

    assert sums.count_K.tolist() == count
    assert sums.off_vocab_K.tolist() == off
    assert sums.hit_K.tolist() == hit
    # float32 rotary angles are the only difference
    torch.testing.assert_close(sums.loss_K, torch.stack(loss), rtol=1e-6, atol=1e-6)
    weight = step_weights(steps)
    expected = sum(weight[k] * loss[k] / max(count[k], 1) for k in range(steps))
    torch.testing.assert_close(sums.mean(), expected, rtol=1e-6, atol=1e-6)

    names, parameters = zip(*draft.named_parameters(), strict=True)
    ours = torch.autograd.grad(sums.mean(), parameters)
    theirs = torch.autograd.grad(expected, parameters)
    for name, mine, reference in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        assert mine.abs().max() > 0, f"{name} gets no gradient"


def test_cases_cover_both_kinds_of_pairs(tmp_path: Path) -> None:
    """Guards the test above: its random targets must choose tokens inside and outside the draft vocabulary."""
    checkpoint = write_target(tmp_path, hidden=10, head_dim=4, inner=12)
    draft = random_draft(checkpoint, 25)
    sums = product_sums(draft, [record(checkpoint, 20, [(2, 20)], 5)], 3, teacher_of(checkpoint, draft))
    assert (sums.count_K > 0).all() and (sums.off_vocab_K > 0).all()


def test_a_batch_without_supervision_has_zero_loss_and_zero_gradients(tmp_path: Path) -> None:
    """A rank whose share has no pair must still take part in the step, with finite numbers."""
    checkpoint = write_target(tmp_path)
    draft = random_draft(checkpoint, 10)
    parts = teacher_of(checkpoint, draft)
    mean = product_sums(draft, [record(checkpoint, 6, [], 1)], 3, parts).mean()
    gradients = torch.autograd.grad(mean, list(draft.parameters()))
    assert mean.item() == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in gradients)


def test_padding_and_neighbours_do_not_change_a_record(tmp_path: Path) -> None:
    checkpoint = write_target(tmp_path)
    draft = random_draft(checkpoint, 30)
    parts = teacher_of(checkpoint, draft)
    short, long = record(checkpoint, 6, [(2, 6)], 1), record(checkpoint, 15, [(3, 9)], 2)
    alone = [product_sums(draft, [r], 3, parts) for r in (short, long)]
    together = product_sums(draft, [short, long], 3, parts)
    torch.testing.assert_close(together.loss_K, alone[0].loss_K + alone[1].loss_K)
    assert torch.equal(together.count_K, alone[0].count_K + alone[1].count_K)


def test_the_mean_is_over_the_global_batch(tmp_path: Path) -> None:
    """Two ranks' losses over the global counts add up to the loss of one big batch."""
    checkpoint = write_target(tmp_path)
    draft = random_draft(checkpoint, 30)
    parts = teacher_of(checkpoint, draft)
    records = [record(checkpoint, 6, [(2, 6)], 1), record(checkpoint, 15, [(3, 14)], 2)]
    shares = [product_sums(draft, [r], 3, parts) for r in records]
    total_K = shares[0].count_K + shares[1].count_K
    whole = product_sums(draft, records, 3, parts).mean()
    torch.testing.assert_close(shares[0].mean(total_K) + shares[1].mean(total_K), whole)


def test_step_weights_are_normalised() -> None:
    weights = step_weights(4)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((3,), 0.8, dtype=torch.float64))


@st.composite
def _masked_records(draw: st.DrawFn) -> TrainingRecord:
    tokens = draw(st.integers(1, 14))
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=6)))
    spans = tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b)
    return TrainingRecord("r", "s", torch.zeros(tokens, dtype=torch.int64), spans,
                          torch.zeros(tokens, 3), torch.zeros(tokens, 1))  # fmt: skip


@settings(deadline=None)
@given(st.lists(_masked_records(), min_size=1, max_size=3), st.integers(1, 5))
def test_a_pair_is_supervised_iff_its_whole_chain_is_one_turn(records: list[TrainingRecord], steps: int) -> None:
    batch = collate(records, steps, CPU)
    for k in range(steps):
        mask_BT = batch.supervised(k)
        for row, rec in enumerate(records):
            for p in range(mask_BT.shape[1]):
                assert bool(mask_BT[row, p]) == brute_supervised(rec, p, k), (rec.spans, p, k)
    for row, rec in enumerate(records):
        plain = RecordTokens(rec.id, rec.source, rec.input_ids_T, rec.spans)
        assert has_supervision(plain) == bool(batch.supervised(0)[row].any())
