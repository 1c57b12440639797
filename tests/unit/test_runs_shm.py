"""/dev/shm is cleared name by name: only what is new since our launch, ours, and used by nobody."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backend.runs import shm
from backend.runs.layout import new_ulid
from backend.runs.shm import SHM, Segment, new_since, scrub, snapshot


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"eagle3-test-{new_ulid()}"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.unlink()


def make(prefix: str, name: str) -> Path:
    path = SHM / f"{prefix}-{name}"
    path.write_bytes(b"x" * 4096)
    path.chmod(0o600)
    return path


def recorded(before: tuple[Segment, ...], prefix: str) -> list[Segment]:
    """Other tests may run at the same time: only ours."""
    return [segment for segment in new_since(before) if segment.name.startswith(prefix)]


def test_only_what_is_new_since_the_launch_is_removed(prefix: str) -> None:
    old = make(prefix, "old")
    before = snapshot()
    new = make(prefix, "new")
    segments = recorded(before, prefix)
    assert [segment.name for segment in segments] == [new.name]
    assert Segment.from_json(segments[0].as_json()) == segments[0]
    report = scrub(segments)
    assert (report.removed, report.kept, report.freed) == (tuple(segments), (), 4096)
    assert old.exists() and not new.exists()


def test_mapped_and_opened_segments_stay(prefix: str) -> None:
    before = snapshot()
    mapped, opened = make(prefix, "mapped"), make(prefix, "opened")
    with mapped.open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
    with opened.open("rb"):
        report = scrub(recorded(before, prefix))
    assert sorted((segment.name, why) for segment, why in report.kept) == [
        (mapped.name, "in_use"),
        (opened.name, "in_use"),
    ]
    view.close()
    assert {segment.name for segment in scrub(recorded(before, prefix)).removed} == {mapped.name, opened.name}


def test_a_segment_that_was_replaced_under_its_name_stays(prefix: str) -> None:
    before = snapshot()
    path = make(prefix, "a")
    segments = recorded(before, prefix)
    other = make(prefix, "b")
    other.rename(path)
    assert [why for _, why in scrub(segments).kept] == ["replaced"]
    assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another owner")
def test_a_segment_of_another_user_stays(prefix: str) -> None:
    before = snapshot()
    path = make(prefix, "a")
    segments = recorded(before, prefix)
    os.chown(path, 12345, 12345)
    assert recorded(before, prefix) == []
    assert [why for _, why in scrub(segments).kept] == ["foreign"]


def test_a_record_of_another_boot_means_nothing(prefix: str) -> None:
    before = snapshot()
    make(prefix, "a")
    segments = [replace(segment, boot="another") for segment in recorded(before, prefix)]
    assert [why for _, why in scrub(segments).kept] == ["other_boot"]


def test_links_and_folders_are_never_recorded(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert snapshot(tmp_path) == ()
    assert shm.scrub([], tmp_path).removed == ()
