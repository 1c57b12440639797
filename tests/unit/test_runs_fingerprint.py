"""A fingerprint changes when and only when the material does, and `explain` can name what changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backend.runs.fingerprint import ABSENT, ContentHashes, canonical, digest, first_difference


def test_order_of_keys_does_not_matter_and_values_do() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert len({digest(value) for value in (1, 1.5, "1", True, None, [1], {"1": 1})}) == 7


@pytest.mark.parametrize("bad", [{1: "a"}, {"a": Path("/x")}, {"a": {1, 2}}, {"a": float("nan")}])
def test_a_material_that_is_not_plain_json_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical(bad)


def test_the_first_difference_names_key_and_both_values() -> None:
    old = {"train": {"lr": 1e-3, "layers": [1, 2]}, "z": 1}
    assert first_difference(old, {"z": 1, "train": {"layers": [1, 2], "lr": 1e-3}}) is None
    assert first_difference(old, {**old, "train": {"lr": 2e-3, "layers": [1, 2]}}) == ("train.lr", 1e-3, 2e-3)
    assert first_difference(old, {**old, "train": {"lr": 1e-3, "layers": [1]}}) == ("train.layers[1]", 2, ABSENT)
    assert first_difference({"a": 1}, {"a": 1, "b": 0}) == ("b", ABSENT, 0)
    assert first_difference({"a": 1}, {"a": True}) == ("a", 1, True)


def test_a_file_is_hashed_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, cache = tmp_path / "data", tmp_path / "hashes.json"
    data.write_text("one")
    monkeypatch.setattr("backend.runs.fingerprint._SETTLE_NS", -1)
    hashes = ContentHashes(cache)
    first = hashes.sha256(data)
    hashes.save()
    monkeypatch.setattr("hashlib.sha256", lambda *_: pytest.fail("hashed again although nothing changed"))
    assert ContentHashes(cache).sha256(data) == first
    monkeypatch.undo()
    data.write_text("two")
    assert ContentHashes(cache).sha256(data) != first


def test_a_change_that_keeps_size_and_mtime_is_still_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    monkeypatch.setattr("backend.runs.fingerprint._SETTLE_NS", -1)
    hashes = ContentHashes(tmp_path / "hashes.json")
    data.write_text("one")
    stamp = data.stat()
    first = hashes.sha256(data)
    data.write_text("two")
    os.utime(data, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert hashes.sha256(data) != first


def test_a_file_that_was_just_written_is_not_cached(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "hashes.json"
    data.write_text("one")
    hashes = ContentHashes(cache)
    hashes.sha256(data)
    hashes.save()
    assert not cache.exists()


def test_a_broken_cache_costs_time_and_nothing_else(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "hashes.json"
    data.write_text("one")
    cache.write_text("{broken")
    assert ContentHashes(cache).sha256(data) == ContentHashes(tmp_path / "other.json").sha256(data)
