"""The draft vocabulary: specials forced in, deterministic, and its two maps agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.eagle3.records import RecordTokens
from backend.eagle3.vocab import DraftVocab, build_vocab, coverage
from backend.errors import UsageError


def tokens(ids: list[int], *spans: tuple[int, int], source: str = "a") -> RecordTokens:
    return RecordTokens("r", source, torch.tensor(ids), spans)


def test_most_frequent_predictions_win_and_the_rest_is_filled_from_the_lowest_ids() -> None:
    records = [tokens([50, 50, 50, 60, 61, 61, 62, 9], (3, 8))]
    vocab = build_vocab(records, 6, target_size=100, special_ids=[])
    # prompt tokens (50) do not count, nor a turn's first token (60), which the target gives; 9 ends the turn
    assert vocab.ids_R.tolist() == [0, 1, 2, 9, 61, 62]


def test_specials_and_every_turns_end_are_in_whatever_their_counts() -> None:
    records = [tokens([5, 6, 6, 6, 7, 7, 90], (1, 3), (3, 7))]
    vocab = build_vocab(records, 4, target_size=100, special_ids=[99, 500])
    assert {6, 90, 99} <= set(vocab.ids_R.tolist()), "ids beyond the target's vocabulary are ignored, the others forced"


def test_too_small_for_the_specials_is_refused() -> None:
    with pytest.raises(UsageError, match="3 special tokens") as caught:
        build_vocab([], 2, target_size=100, special_ids=[1, 2, 3])
    assert caught.value.reason == "draft_vocab_size"


@pytest.mark.parametrize("size", [0, 101])
def test_a_size_outside_the_target_is_refused(size: int) -> None:
    with pytest.raises(UsageError) as caught:
        build_vocab([], size, target_size=100, special_ids=[])
    assert caught.value.reason == "draft_vocab_size"


@given(st.lists(st.lists(st.integers(0, 29), min_size=2, max_size=12), max_size=6), st.integers(6, 30))
def test_vocabulary_does_not_depend_on_record_order_and_its_maps_agree(texts: list[list[int]], size: int) -> None:
    records = [tokens(ids, (1, len(ids))) for ids in texts]
    vocab = build_vocab(records, size, target_size=30, special_ids=[])
    assert torch.equal(vocab.ids_R, build_vocab(records[::-1], size, target_size=30, special_ids=[]).ids_R)
    assert len(vocab) == size == int(vocab.t2d_V.sum())
    assert (torch.arange(size) + vocab.d2t_R).tolist() == vocab.t2d_V.nonzero().flatten().tolist()
    assert torch.equal(DraftVocab.from_offsets(vocab.d2t_R, 30).ids_R, vocab.ids_R)


@pytest.mark.parametrize("ids", [[3, 3], [4, 3], [-1, 3], [3, 30]])
def test_ids_that_do_not_ascend_inside_the_target_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        DraftVocab(torch.tensor(ids), 30)


def test_coverage_counts_predictions_per_source() -> None:
    records = [tokens([1, 2, 3, 4], (0, 4)), tokens([1, 8, 9, 3], (1, 4), source="b"), tokens([1], source="c")]
    report = coverage(DraftVocab(torch.tensor([2, 3, 9]), 30), records)
    assert (report.tokens, report.covered) == (5, 4)
    assert report.by_source == {"a": 2 / 3, "b": 1.0}
    assert report.share == 4 / 5
