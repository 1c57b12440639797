"""Damage: a store cut or changed at any byte is named by verify, mended by repair, and filled up again.

Shards and journal of a sealed store of eleven records are cut and flipped at bytes of Hypothesis' choice.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.errors import OperatorError
from backend.report import Silent
from backend.store.format import QUARANTINE
from backend.store.reader import Store
from backend.store.repair import RepairReport, repair
from backend.store.verify import Problem, StoreReport, stat, verify
from tests.unit.store_support import Sample, build, content, identity, open_writer, sample

COUNT = 11
WHERE = st.floats(0, 1, exclude_max=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage") / "whole"
    build(root, COUNT)
    return root


@contextmanager
def copy_of(whole: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(whole, Path(folder) / "s"))


def files_of(root: Path) -> list[Path]:
    return [*sorted(root.glob("shard-*")), root / "journal.jsonl"]


def check(root: Path) -> StoreReport:
    return verify(root, full=True, reporter=Silent())


def mend(root: Path) -> RepairReport:
    return repair(root, Silent())


def fill(root: Path) -> list[Sample]:
    """Append what is missing; returns it."""
    with open_writer(root) as writer:
        missing = [sample(n) for n in range(COUNT) if sample(n).id not in writer.done_ids]
        for one in missing:
            one.append_to(writer)
        writer.seal()
    return missing


def holds_exactly(root: Path, samples: list[Sample]) -> bool:
    with Store.open(root) as store:
        return set(store.ids) == {one.id for one in samples} and all(one.same_as(store) for one in samples)


ALL = [sample(number) for number in range(COUNT)]


@settings(max_examples=60, deadline=None)
@given(which=st.integers(0, 4), where=WHERE)
@example(which=0, where=0.0)
@example(which=3, where=0.0)
@example(which=4, where=0.0)
def test_a_store_cut_at_any_byte_loses_only_the_records_under_the_cut(whole: Path, which: int, where: float) -> None:
    with copy_of(whole) as root:
        path = files_of(root)[min(which, len(files_of(root)) - 1)]
        at = int(where * path.stat().st_size)
        with Store.open(root) as store:
            lost = [e.id for e in store.entries if path.name == f"shard-{e.shard:06d}.hs" and e.end > at]
        with path.open("rb+") as file:
            file.truncate(at)
        assert not check(root).ok
        with pytest.raises(OperatorError) as caught:
            open_writer(root)
        assert caught.value.reason == "store_damaged"
        report = mend(root)
        assert sorted(report.dropped) == sorted(lost), "a cut journal loses nothing, a cut shard its tail"
        assert holds_exactly(root, [one for one in ALL if one.id not in lost])
        assert check(root).ok
        assert {one.id for one in fill(root)} == set(lost)
        assert holds_exactly(root, ALL)
        assert check(root).ok
        if not lost:
            assert content(root) == content(whole)


@settings(max_examples=80, deadline=None)
@given(which=st.integers(0, 4), where=WHERE, bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found_named_and_mended(whole: Path, which: int, where: float, bit: int) -> None:
    with copy_of(whole) as root:
        path = files_of(root)[min(which, len(files_of(root)) - 1)]
        data = bytearray(path.read_bytes())
        at = int(where * len(data))
        with Store.open(root) as store:
            hit = [e.id for e in store.entries if path.name == f"shard-{e.shard:06d}.hs" and e.offset <= at < e.end]
        data[at] ^= 1 << bit
        path.write_bytes(data)
        problems = check(root).problems
        if hit:
            assert [(p.kind, p.shard, p.record) for p in problems] == [("record_broken", path.name, hit[0])]
        else:
            assert problems, "the journal is covered by the seal"
        assert list(mend(root).dropped) == hit
        fill(root)
        assert holds_exactly(root, ALL)
        assert check(root).ok


@settings(max_examples=40, deadline=None)
@given(cut=WHERE, journalled=st.integers(0, 3), torn=st.booleans())
def test_what_a_kill_leaves_at_any_byte_is_resumed_to_the_undisturbed_store(
    whole: Path, cut: float, journalled: int, torn: bool
) -> None:
    """The state of a writer killed at any byte of the last shard, with any part of it journalled."""
    with copy_of(whole) as root:
        last = sorted(root.glob("shard-*"))[-1]
        with Store.open(root) as store:
            tail = [entry for entry in store.entries if last.name == f"shard-{entry.shard:06d}.hs"]
        kept = tail[: min(journalled, len(tail))]
        floor = kept[-1].end if kept else 0
        lines = (root / "journal.jsonl").read_bytes().splitlines(keepends=True)
        upto = COUNT - len(tail) + len(kept)
        rest = b"".join(lines[upto:])[: 50 if torn and len(kept) < len(tail) else 0]
        (root / "journal.jsonl").write_bytes(b"".join(lines[:upto]) + rest)
        size = floor + int(cut * (last.stat().st_size - floor))
        with last.open("rb+") as file:
            file.truncate(size)
        last.rename(last.with_name(last.name + ".tmp"))
        with open_writer(root) as writer:
            whole_in_tail = sum(floor < entry.end <= size for entry in tail)
            assert writer.adopted == whole_in_tail
            assert len(writer.done_ids) == upto + whole_in_tail
        fill(root)
        assert content(root) == content(whole)
        assert check(root).ok


def only(problems: tuple[Problem, ...], kind: str) -> list[Problem]:
    return [problem for problem in problems if problem.kind == kind]


def test_a_missing_shard_a_foreign_file_and_stray_bytes_are_named(whole: Path) -> None:
    with copy_of(whole) as root:
        (root / "shard-000001.hs").unlink()
        (root / "notes.txt").write_text("hello")
        with (root / "shard-000000.hs").open("ab") as file:
            file.write(b"x" * 4096)
        shutil.copy(root / "shard-000002.hs", root / "shard-000007.hs")
        problems = verify(root, full=False, reporter=Silent()).problems
        assert {(p.kind, p.shard) for p in problems} == {
            ("shard_missing", "shard-000001.hs"),
            ("foreign_file", ""),
            ("stray_bytes", "shard-000000.hs"),
            ("shard_unknown", "shard-000007.hs"),
        }
        assert "notes.txt" in str(only(problems, "foreign_file")[0])
        report = mend(root)
        assert len(report.dropped) == 4
        assert (root / "notes.txt").exists(), "repair does not touch what is not the store's"
        (root / "notes.txt").unlink()
        fill(root)
        assert holds_exactly(root, ALL)
        assert check(root).ok


def test_repair_deletes_nothing(whole: Path) -> None:
    with copy_of(whole) as root:
        path = root / "shard-000001.hs"
        data = bytearray(path.read_bytes())
        data[5000] ^= 255
        path.write_bytes(data)
        broken = bytes(data[:8192])
        journal = (root / "journal.jsonl").read_bytes()
        mend(root)
        kept = [path.read_bytes() for path in sorted((root / QUARANTINE).iterdir())]
        assert kept == [broken, journal]
        assert stat(root).quarantined == len(broken) + len(journal)


def test_repairing_a_sound_or_a_repaired_store_does_nothing(whole: Path) -> None:
    with copy_of(whole) as root:
        assert mend(root).actions == ()
        path = root / "shard-000001.hs"
        data = bytearray(path.read_bytes())
        data[5000] ^= 255
        path.write_bytes(data)
        assert mend(root).actions
        state = {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        assert mend(root).actions == ()
        assert {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()} == state


def test_a_lost_journal_is_rebuilt_from_the_shards(whole: Path) -> None:
    with copy_of(whole) as root:
        (root / "journal.jsonl").unlink()
        assert mend(root).adopted == COUNT
        assert content(root) == content(whole)
        assert stat(root).sealed
        assert check(root).ok


def test_records_of_another_store_are_not_taken_in(whole: Path, tmp_path: Path) -> None:
    build(tmp_path / "other", 3, identity(template_hash="x" * 16))
    with copy_of(whole) as root:
        shutil.copy(tmp_path / "other/shard-000000.hs", root / "shard-000009.hs")
        report = mend(root)
        assert (report.adopted, report.records) == (0, COUNT)
        assert any(path.name.endswith("shard-000009.hs") for path in (root / QUARANTINE).iterdir())


def test_a_duplicate_is_named_and_dropped_once(whole: Path) -> None:
    with copy_of(whole) as root:
        lines = (root / "journal.jsonl").read_bytes().splitlines(keepends=True)
        (root / "journal.jsonl").write_bytes(b"".join([*lines, lines[4]]))
        assert [p.record for p in only(check(root).problems, "record_duplicate")] == [ALL[4].id]
        assert mend(root).dropped == ()
        assert content(root) == content(whole)


def test_repair_is_refused_while_a_writer_is_at_work_and_verify_is_not(whole: Path) -> None:
    with copy_of(whole) as root, open_writer(root) as writer:
        sample(COUNT).append_to(writer)
        report = check(root)
        assert report.ok, report.describe()
        assert any("not yet journalled" in note for note in report.notes)
        with pytest.raises(OperatorError) as caught:
            mend(root)
        assert caught.value.reason == "store_locked"


def test_a_sampled_verification_says_how_much_it_looked_at(whole: Path) -> None:
    with copy_of(whole) as root:
        report = verify(root, full=False, reporter=Silent())
        assert report.ok
        assert report.checked == COUNT
        assert "11 checksums compared: sound" in report.describe()
        assert stat(root).sources == {
            f"source-{n}": (len(ALL[n::3]), sum(len(one.input_ids_T) for one in ALL[n::3])) for n in range(3)
        }
