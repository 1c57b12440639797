"""Accept-length estimates: the roll-out proposes what a sequential draft would, and the walk jumps as a server does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.eagle3.accept import RecordAccept, estimate_accept, roll_out, serving_walk, summarise
from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.records import SequenceSource, TrainingRecord
from backend.eagle3.target import FrozenTarget
from tests.unit.eagle3_support import CPU, Reference, double_batch, random_draft, record, write_target


def sequential_proposals(
    draft: LlamaEagle3Draft, target: FrozenTarget, rec: TrainingRecord, anchor: int, steps: int
) -> list[int]:
    """What a draft proposes after `anchor`, one token at a time with its own KV cache and its own proposals."""
    reference, ids = Reference(draft, target), draft.target_ids_R.tolist()
    prefix = reference.prefix(rec, anchor)
    state, seen = prefix[anchor][0], [kv for _, kv in prefix]
    proposals = [ids[int(reference.scores(state).argmax())]]
    for k in range(1, steps):
        state, mine = reference.token(proposals[-1], state, anchor + k, seen)
        seen = [*seen, mine]
        proposals.append(ids[int(reference.scores(state).argmax())])
    return proposals


@pytest.mark.parametrize(("steps", "heads", "kv_heads"), [(1, 2, 2), (3, 4, 2), (4, 3, 1)])
def test_roll_out_proposes_what_a_sequential_draft_proposes(
    tmp_path: Path, steps: int, heads: int, kv_heads: int
) -> None:
    checkpoint = write_target(tmp_path, heads=heads, kv_heads=kv_heads)
    draft, frozen = random_draft(checkpoint, 30), checkpoint.frozen(torch.float64)
    records = [record(checkpoint, 9, [(2, 5), (6, 9)], 1), record(checkpoint, 13, [(3, 13)], 2)]
    with torch.no_grad():
        batch = double_batch(records, steps)
        _, proposals_KBT = roll_out(draft, frozen, batch, steps)
        for row, rec in enumerate(records):
            anchors = batch.supervised(0)[row].nonzero().flatten().tolist()
            assert anchors
            for p in anchors:
                expected = sequential_proposals(draft, frozen, rec, p, steps)
                assert proposals_KBT[:, row, p].tolist() == expected


def test_hits_count_the_unbroken_prefix_inside_the_turn(tmp_path: Path) -> None:
    """A vocabulary of two tokens makes matches common: also after a miss, and past a turn's end (padding is token 0),
    where a server would have stopped."""
    checkpoint, steps = write_target(tmp_path), 3
    frozen = checkpoint.frozen(torch.float64)
    after_a_miss = past_the_end = deep = 0
    for seed in range(12):
        draft = random_draft(checkpoint, 2, seed)
        draft.d2t.copy_(torch.tensor([0, 1]))  # tokens 0 and 2
        rec = record(checkpoint, 14, [(4, 9), (9, 14)], seed)
        chosen = torch.tensor([0, 2])[torch.randint(2, (14,), generator=torch.Generator().manual_seed(seed))]
        rec = TrainingRecord(rec.id, rec.source, chosen, rec.spans, rec.aux_TC, rec.last_TH)
        batch = double_batch([rec], steps)
        hits_BT, proposals_KBT = roll_out(draft, frozen, batch, steps)
        tokens = [*rec.input_ids_T.tolist(), *[0] * steps]
        for p in range(len(rec.input_ids_T) - 1):
            inside = [any(start <= p + 1 and p + 2 + k < stop for start, stop in rec.spans) for k in range(steps)]
            right = [int(proposals_KBT[k, 0, p]) == tokens[min(p + 2 + k, 16)] for k in range(steps)]
            good = [a and b for a, b in zip(inside, right, strict=True)]
            expected = next((k for k in range(steps) if not good[k]), steps)
            assert int(hits_BT[0, p]) == expected
            after_a_miss += any(good[expected:])
            past_the_end += all(right[: expected + 1]) and 0 < expected < steps and not inside[expected]
            deep += expected == steps
    assert min(after_a_miss, past_the_end, deep) > 0, "the cases above must have occurred"


def test_a_token_outside_the_draft_vocabulary_breaks_the_chain(tmp_path: Path) -> None:
    checkpoint = write_target(tmp_path)
    draft, frozen = random_draft(checkpoint, 12), checkpoint.frozen(torch.float64)
    rec = record(checkpoint, 20, [(2, 20)], 4)
    hits_BT, _ = roll_out(draft, frozen, double_batch([rec], 2), 2)
    outside = ~draft.t2d[rec.input_ids_T]
    for p in range(1, 17):
        if outside[p + 2]:
            assert int(hits_BT[0, p]) == 0
        if outside[p + 3]:
            assert int(hits_BT[0, p]) <= 1
    assert outside.any()


def simulate_server(hits: list[int], start: int, stop: int) -> tuple[int, int]:
    """A server's loop over one answer, token list and all."""
    written, verifies = [start], 0  # the prefill wrote the first token
    while written[-1] != stop - 1:
        anchor = written[-1] - 1  # the last position whose hidden state the target has given
        accepted = hits[anchor]
        verifies += 1
        for _ in range(accepted + 1):  # the accepted proposals and the target's own next token
            if written[-1] != stop - 1:
                written.append(written[-1] + 1)
    return len(written) - 1, verifies


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_serving_walk_equals_a_simulated_server(start: int, length: int, hits: list[int]) -> None:
    stop = start + length
    capped = [min(h, max(0, stop - 2 - p)) for p, h in enumerate(hits)]  # a hit never reaches past the turn
    assert serving_walk(capped, (start, stop)) == simulate_server(capped, start, stop)


def test_an_untouched_chain_gives_one_and_a_perfect_chain_gives_k_plus_one() -> None:
    nothing = RecordAccept("a", "s", 10, (0, 0, 0), 1, 12, 12)
    perfect = RecordAccept("b", "t", 10, (10, 10, 10), 1, 12, 3)
    assert summarise([nothing], 3).anchor_mean == summarise([nothing], 3).walk.accept_length == 1.0
    assert summarise([perfect], 3).anchor_mean == summarise([perfect], 3).walk.accept_length == 4.0
    both = summarise([nothing, perfect], 3)
    assert both.anchor_mean == 2.5 and both.by_depth == (0.5, 0.5, 0.5)
    assert both.walk.accept_length == 24 / 15
    assert both.by_source == {"s": 1.0, "t": 4.0}
    assert both.walk.as_sglang_counts == 26 / 15, "SGLang's completion tokens include the prefill's one per turn"


def test_the_interval_holds_the_estimate_and_narrows_with_more_records() -> None:
    def shares(count: int) -> list[RecordAccept]:
        return [RecordAccept(str(i), "s", 10, (5, 2, 1), 1, 20, 10 + i % 7) for i in range(count)]

    few, many = summarise(shares(14), 3).walk, summarise(shares(280), 3).walk
    assert few.low < few.accept_length < few.high
    assert many.high - many.low < few.high - few.low
    assert summarise(shares(14), 3).walk == few, "the same records must give the same interval"


def test_nothing_to_judge_is_an_accept_length_of_one() -> None:
    empty = summarise([], 3)
    assert (empty.anchor_mean, empty.walk.accept_length, empty.anchors) == (1.0, 1.0, 0)


def test_estimate_does_not_depend_on_how_records_are_batched(tmp_path: Path) -> None:
    checkpoint = write_target(tmp_path)
    draft, frozen = random_draft(checkpoint, 38).float(), checkpoint.frozen()
    records = [record(checkpoint, 8 + i, [(3, 8 + i)], i, source="ab"[i % 2]) for i in range(7)]
    results = [
        estimate_accept(draft, frozen, SequenceSource(records), steps=3, batch_tokens=budget, device=CPU)
        for budget in (1, 40, 1000)
    ]
    assert results[0] == results[1] == results[2]
    estimate, shares = results[0]
    assert [share.id for share in shares] == [rec.id for rec in records]
    assert estimate.walk.tokens == sum(len(rec.input_ids_T) - 4 for rec in records)
    assert draft.training, "estimating must leave the draft as it found it"
