"""Supervised attempts when something is killed, full or stuck, and attempts inside attempts.

Everything here is a real fault: SIGKILL at any moment, a file system without inodes, a process that even SIGKILL does
not end. What must hold: what is left can always be found and ended, and no end is claimed that was not one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from backend.errors import Refused
from backend.runs import identity, tree
from backend.runs.atomic import read_json, write_json
from backend.runs.layout import Attempt
from backend.runs.state import state
from backend.runs.stop import stop
from backend.runs.supervisor import start
from tests.integration.runs_support import SLEEP, TREE, Runs, alive, await_end, kill, managed, nest

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    yield from managed(tmp_path)


def test_a_killed_supervisor_leaves_a_stale_attempt_that_can_be_stopped(runs: Runs) -> None:
    started = runs.sh("a", TREE + SLEEP)
    children = [int(line) for line in runs.lines(4)]
    kill(started.supervisor)
    now = state(started.attempt)
    assert (now.state, now.reason, now.job_alive) == ("stale", "supervisor_died", True)
    with pytest.raises(Refused) as error:
        start(started.attempt)
    assert error.value.reason == "stale"
    report = stop(started.attempt)
    assert (report.ok, report.how) == (True, "tagged")
    assert set(children) <= set(report.signalled)
    assert alive(children) == set()
    now = state(started.attempt)
    assert (now.state, now.job_alive) == ("stale", False)
    assert not Attempt(started.attempt).exit.exists()


@pytest.mark.parametrize("count", [24, pytest.param(300, marks=pytest.mark.long)])
def test_a_supervisor_killed_at_any_moment_leaves_nothing_that_cannot_be_found(runs: Runs, count: int) -> None:
    seen: dict[str, int] = {}
    for number in range(count):
        attempt = runs.spec(str(number), ["sleep", "1000"])
        run_id = str((read_json(attempt.spec) or {})["run_id"])
        environ = {**os.environ, identity.SUPERVISOR: run_id}
        argv = [sys.executable, "-m", "backend.runs.supervisor", str(attempt.path)]
        with subprocess.Popen(argv, env=environ) as supervisor:
            while not attempt.lock.exists():
                os.sched_yield()
            while number % 2 and not attempt.intent.exists():
                os.sched_yield()
            for _ in range(number % 60):
                state(attempt.path)
            supervisor.kill()
        before = state(attempt.path)
        seen[before.state] = seen.get(before.state, 0) + 1
        # "running": the job, between fork and exec, still holds the lock that it inherited.
        assert before.state in ("pending", "stale", "running")
        assert before.state != "pending" or identity.tagged(run_id, orphaned=True) == ()
        assert stop(attempt.path, 0).ok
        assert identity.tagged(run_id, orphaned=True) == ()
        assert state(attempt.path).state in ("pending", "stale") and not state(attempt.path).job_alive
    assert seen.get("stale"), f"no kill hit a started job: {seen}"


def test_reboot_and_container_restart_are_told_apart(runs: Runs) -> None:
    started = runs.sh("a", f"echo up > $FIFO; {SLEEP}")
    runs.lines(1)
    kill(started.supervisor)
    assert started.job is not None
    kill(started.job)
    path = Attempt(started.attempt).proc
    record = read_json(path) or {}
    for change, reason in (({"boot_id": "another"}, "reboot"), ({"pid1_ticks": 10**9}, "container_restart")):
        write_json(path, {**record, "supervisor": {**record["supervisor"], **change}})
        now = state(started.attempt)
        assert (now.state, now.reason, now.job_alive) == ("stale", reason, False)


def test_a_crash_between_intent_and_record_is_no_fresh_start(runs: Runs) -> None:
    started = runs.sh("a", f"echo up > $FIFO; {SLEEP}")
    runs.lines(1)
    kill(started.supervisor)
    Attempt(started.attempt).proc.unlink()
    now = state(started.attempt)
    assert (now.state, now.job_alive, now.job) == ("stale", True, None)
    assert stop(started.attempt).how == "tagged"


@pytest.mark.parametrize("ending", ["stop", "own end", "kill -9"])
def test_attempts_of_a_pilot_outlive_it(runs: Runs, ending: str) -> None:
    outer, inner = nest(runs, subreaper=False)
    if ending == "stop":
        assert stop(outer.attempt).state.state == "cancelled"
    elif ending == "own end":
        Path(f"{runs.fifo}.go").write_text("")
        await_end(outer.supervisor)
        assert state(outer.attempt).state == "succeeded"
    else:
        kill(outer.supervisor)
        stop(outer.attempt)
    assert state(inner).state == "running"
    assert stop(inner).ok


def test_an_attempt_inside_another_dies_with_it_and_records_its_own_end(runs: Runs) -> None:
    outer, inner = nest(runs, subreaper=True)
    assert stop(outer.attempt).ok
    ended = state(inner)
    assert (ended.state, ended.code, ended.stopped) == ("cancelled", 5, True)


def test_the_job_of_an_attempt_inside_another_is_asked_once_and_by_its_own_supervisor(runs: Runs) -> None:
    outer, inner = nest(runs, subreaper=True, trap="echo asked", inner_grace_s=0.5)
    assert stop(outer.attempt).ok
    assert (inner / "log").read_text() == "asked\n"
    assert (state(inner).state, state(inner).signal) == ("cancelled", signal.SIGKILL)


def test_an_attempt_inside_a_killed_one_records_its_end_too(runs: Runs) -> None:
    outer, inner = nest(runs, subreaper=True, grace_s=0.0)
    assert stop(outer.attempt).ok
    assert state(inner).state == "cancelled"


def test_an_attempt_inside_one_whose_supervisor_died_is_found_and_stopped(runs: Runs) -> None:
    outer, inner = nest(runs, subreaper=True)
    kill(outer.supervisor)
    assert stop(outer.attempt).ok
    assert state(inner).state == "cancelled"
    assert identity.tagged(state(inner).run_id) == ()


def test_a_caller_that_is_killed_in_mid_start_does_not_harm_the_run(runs: Runs) -> None:
    attempt = runs.spec("a", ["sh", "-c", f"echo up > {runs.fifo}; exit 4"])
    code = "import sys; from pathlib import Path; from backend.runs.supervisor import start; start(Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", code, str(attempt.path)]) as caller:
        while not attempt.intent.exists():
            os.sched_yield()
        caller.kill()
    runs.lines(1)
    await_end(state(attempt.path).supervisor)
    assert (state(attempt.path).state, state(attempt.path).code) == ("failed", 4)


@pytest.fixture
def mounts() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def mount(argv: Sequence[str], folder: Path, stack: ExitStack) -> None:
    folder.mkdir()
    done = subprocess.run(["mount", *argv, str(folder)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    stack.callback(subprocess.run, ["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system without inodes needs a mount, which needs root")
def test_a_job_whose_start_cannot_be_recorded_is_stopped_again(mounts: ExitStack, runs: Runs) -> None:
    # root, spec.json, .lock.guard, lock, .exit.json.reserved, log, intent.json: proc.json finds no inode left
    mount(["-t", "tmpfs", "-o", "nr_inodes=7", "none"], runs.folder / "small", mounts)
    started = runs.start("small", ["sleep", "1000"])
    await_end(started.supervisor)
    ended = state(started.attempt)
    assert (ended.state, ended.signal, ended.stopped) == ("failed", signal.SIGTERM, False)
    assert "proc.json cannot be written: No space left on device" in ended.reason
    assert identity.tagged(started.run_id) == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="a frozen file system needs a mount, which needs root")
def test_what_even_sigkill_does_not_end_is_reported_and_not_waited_for(
    runs: Runs, mounts: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, frozen = runs.folder / "image", runs.folder / "frozen"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount(["-o", "loop", str(image)], frozen, mounts)
    if subprocess.run(["fsfreeze", "-f", str(frozen)], check=False).returncode:
        pytest.skip("file systems cannot be frozen here")
    with ExitStack() as thaw:
        thaw.callback(subprocess.run, ["fsfreeze", "-u", str(frozen)], check=True)
        started = runs.sh("a", f"echo up > $FIFO; echo x > {frozen}/file")
        runs.lines(1)
        assert started.job is not None
        while (seen := identity.see(started.job.pid)) and seen.state != "D":
            os.sched_yield()
        kill(started.supervisor)
        monkeypatch.setattr(tree, "NESTED_MARGIN_S", 0.1)
        monkeypatch.setattr(tree, "UNKILLABLE_S", 0.1)
        report = stop(started.attempt, 0)
        assert (report.ok, report.reason, report.how) == (False, "unkillable", "tagged")
        assert [(left.pid, left.state) for left in report.left] == [(started.job.pid, "D")]
    await_end(started.job)
    assert stop(started.attempt).ok
