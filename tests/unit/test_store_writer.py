"""The writer: refuses what must not be stored, goes on where it was, stops cleanly when the disk is full."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.errors import OperatorError, Refused
from backend.report import Silent
from backend.store.reader import Store
from backend.store.verify import stat, verify
from backend.store.writer import FLUSH_RECORDS
from tests.unit.store_support import Sample, build, content, identity, open_writer, sample


def bad(**changes: Any) -> Sample:
    return replace(sample(1), **changes)


def with_nan() -> torch.Tensor:
    rows = sample(1).last_TH.clone()
    rows[4, 2] = float("nan")
    return rows


ONE = sample(1)
REFUSED = {
    "rows fewer than ids": (bad(aux_TC=ONE.aux_TC[:-1]), "record_rows", "10 token ids need [10, 24]"),
    "last rows of another width": (bad(last_TH=ONE.aux_TC), "record_rows", "hidden_state is [10, 24]"),
    "NaN": (bad(last_TH=with_nan()), "record_not_finite", "hidden_state is not finite, first at token 4 of 10"),
    "minus infinity": (bad(last_TH=-ONE.last_TH.abs() / 0), "record_not_finite", "first at token 0 of 10"),
    "infinity": (bad(aux_TC=ONE.aux_TC / 0), "record_not_finite", "aux_hidden_state is not finite"),
    "float32 into bf16": (bad(aux_TC=ONE.aux_TC.float()), "record_dtype", "never rounds"),
    "no tokens": (bad(input_ids_T=ONE.input_ids_T[:0]), "record_tokens", "0 tokens"),
    "ids as floats": (bad(input_ids_T=ONE.input_ids_T.float()), "record_tokens", "int32 or int64"),
    "a negative id": (bad(input_ids_T=ONE.input_ids_T - 40000), "record_tokens", "negative"),
    "a turn past the end": (bad(spans=((1, 11),)), "record_spans", "[[1, 11]]"),
    "turns that overlap": (bad(spans=((1, 5), (4, 6))), "record_spans", "[[1, 5], [4, 6]]"),
    "an id that is no content id": (bad(id="7"), "record_id", "record 7:"),
    "a path as source": (bad(source="a\nb"), "record_source", "source name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_record_that_must_not_be_stored_is_named_and_leaves_no_trace(case: str, tmp_path: Path) -> None:
    record, reason, words = REFUSED[case]
    with open_writer(tmp_path / "s") as writer:
        with pytest.raises(OperatorError) as caught:
            record.append_to(writer)
        assert caught.value.reason == reason
        assert words in caught.value.what
        assert record.id in caught.value.what
        ONE.append_to(writer)
    with Store.open(tmp_path / "s") as store:
        assert store.ids == (ONE.id,)


def test_an_id_is_stored_once_whether_pending_flushed_or_from_an_earlier_run(tmp_path: Path) -> None:
    with open_writer(tmp_path / "s") as writer:
        ONE.append_to(writer)
        for _ in range(2):
            with pytest.raises(OperatorError, match=ONE.id) as caught:
                ONE.append_to(writer)
            assert caught.value.reason == "record_duplicate"
            writer.flush()
    with open_writer(tmp_path / "s") as writer, pytest.raises(OperatorError, match=ONE.id):
        ONE.append_to(writer)


@pytest.mark.parametrize("scheme", ["bf16", "float32"])
def test_what_comes_back_is_what_went_in(scheme: str, tmp_path: Path) -> None:
    samples = build(tmp_path / "s", 12, identity(scheme=scheme))
    with Store.open(tmp_path / "s") as store:
        assert store.ids == tuple(one.id for one in samples)
        assert all(one.same_as(store) for one in samples)
        assert len(list(store.by_shard())) > 2


def test_a_record_larger_than_a_shard_gets_a_shard_of_its_own(tmp_path: Path) -> None:
    samples = [sample(0), sample(1, tokens=2000), sample(2)]
    with open_writer(tmp_path / "s") as writer:
        for one in samples:
            one.append_to(writer)
    with Store.open(tmp_path / "s") as store:
        assert [len(indices) for _, indices in store.by_shard()] == [1, 1, 1]
        assert all(one.same_as(store) for one in samples)


def test_a_record_counts_only_when_it_is_durable(tmp_path: Path) -> None:
    with open_writer(tmp_path / "s", shard_bytes=1 << 30) as writer:
        for number in range(FLUSH_RECORDS - 1):
            sample(number).append_to(writer)
        assert writer.done_ids == set()
        assert len(Store.open(tmp_path / "s")) == 0
        sample(FLUSH_RECORDS).append_to(writer)
        assert len(writer.done_ids) == len(Store.open(tmp_path / "s")) == FLUSH_RECORDS


def test_a_store_written_in_several_sessions_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    samples = build(tmp_path / "once", 11)
    for stop in (0, 1, 5, 6, 11):
        with open_writer(tmp_path / "often", run_id=f"run-{stop}") as writer:
            assert writer.done_ids == {one.id for one in samples if one.id in writer.done_ids}
            for one in samples[len(writer.done_ids) : stop]:
                one.append_to(writer)
    with open_writer(tmp_path / "often") as writer:
        assert len(writer.done_ids) == 11
        writer.seal()
    assert content(tmp_path / "often") == content(tmp_path / "once")
    sessions = json.loads((tmp_path / "often/manifest.json").read_text())["sessions"]
    assert [(s["run_id"], s["first_record"]) for s in sessions] == [
        ("run-1", 0),
        ("run-5", 1),
        ("run-6", 5),
        ("run-11", 6),
    ]


def test_a_foreign_identity_is_refused_with_the_key_and_both_values(tmp_path: Path) -> None:
    build(tmp_path / "s", 2)
    before = content(tmp_path / "s")
    with pytest.raises(Refused) as caught:
        open_writer(tmp_path / "s", identity(layers=(2, 3, 6), max_tokens=9))
    assert caught.value.reason == "store_identity"
    assert "layers: [2, 3, 5] here, [2, 3, 6] wanted" in caught.value.what
    assert content(tmp_path / "s") == before


def test_a_folder_with_other_files_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(Refused, match=r"thesis\.tex"):
        open_writer(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_second_writer_is_refused_while_the_first_is_there(tmp_path: Path) -> None:
    with open_writer(tmp_path / "s", run_id="first"):
        assert stat(tmp_path / "s").writing
        with pytest.raises(OperatorError, match=f"process {os.getpid()} \\(run first\\)") as caught:
            open_writer(tmp_path / "s")
        assert caught.value.reason == "store_locked"
    open_writer(tmp_path / "s").close()
    assert not stat(tmp_path / "s").writing


def test_an_empty_store_is_a_store(tmp_path: Path) -> None:
    with open_writer(tmp_path / "s") as writer:
        assert (writer.seal().records, writer.done_ids) == (0, set())
    with Store.open(tmp_path / "s") as store:
        assert (len(store), store.ids, list(store), store.tokens) == (0, (), [], 0)
    assert verify(tmp_path / "s", full=True, reporter=Silent()).ok


def test_a_creation_that_was_killed_before_its_manifest_is_created_again(tmp_path: Path) -> None:
    build(tmp_path / "s", 0)
    (tmp_path / "s/manifest.json").rename(tmp_path / "s/.manifest.json.tmp.17.00000000")
    samples = build(tmp_path / "s", 2)
    with Store.open(tmp_path / "s") as store:
        assert all(one.same_as(store) for one in samples)


def test_sealing_twice_changes_nothing_and_a_new_record_breaks_the_seal(tmp_path: Path) -> None:
    build(tmp_path / "s", 3)
    before = (tmp_path / "s/manifest.json").read_bytes()
    with open_writer(tmp_path / "s", run_id="other") as writer:
        assert writer.seal().records == 3
    assert (tmp_path / "s/manifest.json").read_bytes() == before
    with open_writer(tmp_path / "s") as writer:
        sample(3).append_to(writer)
    assert not stat(tmp_path / "s").sealed
    with open_writer(tmp_path / "s") as writer:
        assert writer.seal().records == 4
    assert verify(tmp_path / "s", full=True, reporter=Silent()).ok


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "s")
    writer.close()
    writer.close()
    with pytest.raises(OperatorError) as caught:
        ONE.append_to(writer)
    assert caught.value.reason == "store_closed"


def test_the_reserve_stops_the_writer_before_the_disk_is_full(tmp_path: Path) -> None:
    with open_writer(tmp_path / "s", reserve_bytes=1 << 62) as writer, pytest.raises(OperatorError) as caught:
        ONE.append_to(writer)
    assert caught.value.reason == "disk_full"
    assert "stay in reserve" in caught.value.what
    samples = build(tmp_path / "s", 2)
    with Store.open(tmp_path / "s") as store:
        assert all(one.same_as(store) for one in samples)


@pytest.mark.parametrize("space", [0, 1, 4096, 5000, 20000, 33000, 60000, 61000, 82500, 84500])
def test_a_disk_that_fills_at_any_byte_leaves_a_store_that_goes_on(
    space: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = build(tmp_path / "whole", 10)
    real, left = os.write, space

    def write(fd: int, data: bytes) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[: min(left, 3000)])
        left -= written
        return written

    with monkeypatch.context() as patch:
        writer = open_writer(tmp_path / "s")
        patch.setattr(os, "write", write)
        with pytest.raises(OperatorError) as caught:
            for one in samples:
                one.append_to(writer)
            writer.seal()
    assert caught.value.reason == "disk_full"
    assert "No space left" in caught.value.what
    assert verify(tmp_path / "s", full=True, reporter=Silent()).ok
    with open_writer(tmp_path / "s") as writer:
        for one in samples:
            if one.id not in writer.done_ids:
                one.append_to(writer)
        writer.seal()
    assert content(tmp_path / "s") == content(tmp_path / "whole")


def test_after_a_failed_sync_nothing_unsynced_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = open_writer(tmp_path / "s")
    sample(0).append_to(writer)
    writer.flush()
    sample(1).append_to(writer)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OperatorError) as caught:
            writer.flush()
    assert caught.value.reason == "store_write"
    with open_writer(tmp_path / "s") as writer:
        assert (writer.done_ids, writer.adopted) == ({sample(0).id}, 0)
