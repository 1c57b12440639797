"""Where things stand: a home that others could write is refused, attempts never collide, ids sort by time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.errors import Refused, UsageError
from backend.runs.layout import Attempt, Home, new_ulid


def test_looking_at_a_home_creates_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert home.pipelines() == ()
    assert not home.path.exists()


def test_a_new_home_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        home = Home(tmp_path / "home").create()
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (home.path, home.locks, home.agents)] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_home_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "home"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(Refused, match="can be written by others") as error:
        Home(path)
    assert error.value.reason == "insecure_home"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another owner")
def test_a_home_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(Refused, match="belongs to uid 12345"):
        Home(path)


def test_the_home_comes_from_the_environment(tmp_path: Path) -> None:
    assert Home.from_environ({"EAGLE3_HOME": str(tmp_path / "x")}).path == tmp_path / "x"
    assert Home.from_environ({"XDG_STATE_HOME": str(tmp_path)}).path == tmp_path / "eagle3-console"
    assert Home.from_environ({"HOME": str(tmp_path)}).path == tmp_path / ".local/state/eagle3-console"


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "-flag", "x" * 65])
def test_an_id_that_could_leave_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        Home(tmp_path).pipeline(name)


def test_attempts_count_up_and_current_follows(tmp_path: Path) -> None:
    pipeline = Home(tmp_path / "home").create().pipeline(new_ulid()).create()
    first, second = (pipeline.new_attempt("extract", order=6) for _ in range(2))
    assert (first.number, second.number) == (1, 2)
    assert pipeline.current("extract") == second
    assert pipeline.attempts("extract") == (first, second)
    assert (second.stage, second.pipeline_id) == ("extract", pipeline.id)
    assert second.path == pipeline.path / "stages/06-extract/attempts/2"
    assert [(order, name) for order, name, _ in pipeline.stages()] == [(6, "extract")]


def test_attempts_allocated_at_the_same_time_are_different_folders(tmp_path: Path) -> None:
    pipeline = Home(tmp_path / "home").create().pipeline("p").create()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: pipeline.new_attempt("merge", order=1).number, range(24)))
    assert sorted(made) == list(range(1, 25))
    assert pipeline.current("merge") in pipeline.attempts("merge")


def test_an_attempt_outside_a_pipeline_has_a_name_and_no_pipeline(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "server-a").create()
    assert (attempt.stage, attempt.pipeline_id, attempt.number) == ("server-a", "", 0)


def test_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_ulid() for _ in range(500)]
    assert len(set(ids)) == 500
    assert {len(name) for name in ids} == {26}
    assert [name[:10] for name in ids] == sorted(name[:10] for name in ids)
