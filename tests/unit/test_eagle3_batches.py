"""Batches and records: a plan is a pure function, keeps its budget, loses no record; wrong records are named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.eagle3.batches import collate, plan_batches
from backend.eagle3.records import RecordTokens, StoreSource, TrainingRecord
from backend.errors import OperatorError
from tests.unit.eagle3_support import CPU


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120), st.integers(0, 3), st.integers(0, 3))
def test_a_plan_holds_every_record_once_within_the_budget(
    lengths: list[int], budget: int, seed: int, epoch: int
) -> None:
    plan = plan_batches(lengths, budget, seed=seed, epoch=epoch)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    assert plan == plan_batches(lengths, budget, seed=seed, epoch=epoch), "a resumed run must meet the same batches"


def test_epochs_and_seeds_differ() -> None:
    lengths = [5 + i % 9 for i in range(60)]
    plans = [plan_batches(lengths, 40, seed=s, epoch=e) for s in (0, 1) for e in (0, 1)]
    assert all(a != b for i, a in enumerate(plans) for b in plans[:i])


def test_grouping_by_length_keeps_padding_small() -> None:
    lengths = [10 + 7 * i % 400 for i in range(300)]
    padded = sum(len(b) * max(lengths[i] for i in b) for b in plan_batches(lengths, 2048, seed=0, epoch=0))
    assert padded < 1.15 * sum(lengths)


def test_collate_pads_on_the_right_and_counts_tokens_left_in_the_turn() -> None:
    def rec(tokens: int, spans: tuple[tuple[int, int], ...]) -> TrainingRecord:
        return TrainingRecord(
            "x", "s", torch.arange(1, tokens + 1, dtype=torch.int32), spans,
            torch.ones(tokens, 6, dtype=torch.bfloat16), torch.ones(tokens, 2, dtype=torch.bfloat16),
        )  # fmt: skip

    batch = collate([rec(5, ((1, 3), (3, 5))), rec(3, ())], 2, CPU)
    assert batch.input_ids_BS.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert batch.left_BS.tolist() == [[0, 2, 1, 2, 1, 0, 0, 0], [0] * 8]
    assert batch.aux_BTC.dtype == batch.last_BTH.dtype == torch.float32
    assert batch.aux_BTC[1, 3:].abs().max() == 0
    assert batch.tokens == 8


@pytest.mark.parametrize("spans", [((2, 2),), ((3, 2),), ((0, 6),), ((2, 4), (3, 5)), ((-1, 2),)])
def test_impossible_turns_are_refused_with_the_record_named(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(OperatorError, match="r17") as caught:
        RecordTokens("r17", "s", torch.zeros(5, dtype=torch.int64), spans)
    assert caught.value.reason == "record_spans"


def test_states_of_another_length_are_refused() -> None:
    with pytest.raises(OperatorError, match="r17") as caught:
        TrainingRecord("r17", "s", torch.zeros(5, dtype=torch.int64), (), torch.zeros(4, 3), torch.zeros(5, 1))
    assert caught.value.reason == "record_rows"


@dataclass(frozen=True)
class Stored:
    input_ids_T: torch.Tensor
    aux_TC: torch.Tensor
    last_TH: torch.Tensor


@dataclass(frozen=True)
class Origin:
    post_norm: bool


class Shelf:
    """A store of one record."""

    def __init__(self, ids: list[int], post_norm: bool = True) -> None:
        self.identity = Origin(post_norm)
        self.stored = Stored(torch.tensor(ids, dtype=torch.int32), torch.ones(len(ids), 3), torch.ones(len(ids), 1))

    def record(self, record_id: str) -> Stored:
        return self.stored


def test_a_store_source_joins_by_id_and_refuses_states_of_other_tokens() -> None:
    merged = RecordTokens("r17", "s", torch.tensor([4, 5, 6]), ((1, 3),))
    loaded = StoreSource(Shelf([4, 5, 6]), [merged]).load(0)
    assert (loaded.id, loaded.source, loaded.spans, len(loaded.aux_TC)) == ("r17", "s", ((1, 3),), 3)
    with pytest.raises(OperatorError, match="r17") as caught:
        StoreSource(Shelf([4, 5, 7]), [merged]).load(0)
    assert caught.value.reason == "record_mismatch"


def test_a_store_of_unnormed_last_states_is_refused() -> None:
    with pytest.raises(OperatorError) as caught:
        StoreSource(Shelf([4], post_norm=False), [])
    assert caught.value.reason == "pre_norm"
