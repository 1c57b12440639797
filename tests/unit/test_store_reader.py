"""The reader: O(1) records over a map, a snapshot beside a writer, damage named instead of returned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.errors import OperatorError
from backend.store import folder
from backend.store.reader import Store
from tests.unit.store_support import build, content, identity, open_writer, sample


def test_a_record_is_reached_without_reading_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = build(tmp_path / "s", 12)
    mapped: list[str] = []
    real = folder.map_file

    def map_file(path: Path) -> object:
        mapped.append(path.name)
        return real(path)

    with Store.open(tmp_path / "s") as store:
        monkeypatch.setattr("backend.store.reader.map_file", map_file)
        assert samples[7].same_as(store)
        assert mapped == [f"shard-{store.entry(7).shard:06d}.hs"]
        # Everything outside the record is gone, and it is still there.
        entry, path = store.entry(7), tmp_path / "s" / mapped[0]
        data = path.read_bytes()
        path.write_bytes(bytes(entry.offset) + data[entry.offset : entry.end] + bytes(len(data) - entry.end))
    with Store.open(tmp_path / "s") as store:
        assert samples[7].same_as(store)


def test_id_and_index_name_the_same_record_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    samples = build(tmp_path / "s", 4)
    with Store.open(tmp_path / "s") as store:
        assert store.record(2).id == store.record(samples[2].id).id == samples[2].id
        assert (store.rows(2), store.rows(samples[2].id)) == (17, 17)
        assert samples[2].id in store
        assert "f" * 32 not in store
        assert store.tokens == sum(len(one.input_ids_T) for one in samples)
        for key in (4, "f" * 32):
            with pytest.raises(OperatorError) as caught:
                store.record(key)
            assert caught.value.reason == "record_missing"


def test_shards_partition_the_indices_in_disk_order(tmp_path: Path) -> None:
    build(tmp_path / "s", 12)
    with Store.open(tmp_path / "s") as store:
        ranges = [indices for _, indices in store.by_shard()]
        assert [index for indices in ranges for index in indices] == list(range(12))
        assert [record.id for record in store] == list(store.ids)


def test_writing_into_a_record_does_not_reach_the_disk(tmp_path: Path) -> None:
    samples = build(tmp_path / "s", 1)
    with Store.open(tmp_path / "s") as store:
        store.record(0).aux_TC.zero_()
    with Store.open(tmp_path / "s") as store:
        assert samples[0].same_as(store)


def test_a_tensor_outlives_its_store(tmp_path: Path) -> None:
    samples = build(tmp_path / "s", 1)
    with Store.open(tmp_path / "s") as store:
        rows = store.record(0).aux_TC
    del store
    assert torch.equal(rows, samples[0].aux_TC)


def test_a_store_is_readable_while_it_is_written(tmp_path: Path) -> None:
    with open_writer(tmp_path / "s") as writer:
        sample(0).append_to(writer)
        writer.flush()
        reader = Store.open(tmp_path / "s")
        sample(1).append_to(writer)
        writer.seal()
        assert reader.ids == (sample(0).id,)
        assert sample(0).same_as(reader), "the shard was renamed after the reader had looked"


def test_records_without_assistant_turns_are_allowed(tmp_path: Path) -> None:
    one = sample(1)
    with open_writer(tmp_path / "s") as writer:
        writer.append(one.id, one.source, one.input_ids_T.int(), [], one.aux_TC, one.last_TH)
    with Store.open(tmp_path / "s") as store:
        assert store.record(0).spans == ()


def test_sampled_reads_find_a_flipped_byte_that_plain_reads_return(tmp_path: Path) -> None:
    samples = build(tmp_path / "s", 1, identity(hidden_size=64))
    path = tmp_path / "s/shard-000000.hs"
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    with Store.open(tmp_path / "s") as store:
        assert not samples[0].same_as(store)
    with Store.open(tmp_path / "s", verify_every=2) as store:
        store.record(0)
        with pytest.raises(OperatorError, match=samples[0].id) as caught:
            store.record(0)
        assert caught.value.reason == "store_damaged"


def test_another_record_at_the_place_is_not_returned(tmp_path: Path) -> None:
    samples = build(tmp_path / "s", 3)
    path = tmp_path / "s/journal.jsonl"
    path.write_text(path.read_text().replace(samples[0].id, "f" * 32))
    with Store.open(tmp_path / "s") as store, pytest.raises(OperatorError, match=samples[0].id):
        store.record("f" * 32)


@pytest.mark.parametrize("name", ["shard-000000.hs", "journal.jsonl", "manifest.json"])
def test_an_unreadable_store_is_named_and_not_changed(name: str, tmp_path: Path) -> None:
    build(tmp_path / "s", 6)
    path = tmp_path / "s" / name
    path.write_bytes(b"\n" + path.read_bytes()[10:])
    before = content(tmp_path / "s")
    with pytest.raises(OperatorError, match=name):
        Store.open(tmp_path / "s")
    assert content(tmp_path / "s") == before


def test_a_folder_that_is_no_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(OperatorError) as caught:
        Store.open(tmp_path)
    assert caught.value.reason == "not_a_store"
