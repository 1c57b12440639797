"""Supervised attempts with real processes: nothing outlives a stop, and the end is recorded as it was.

Each test names a way in which runs were lost or leaked: children in sessions of their own, daemons, ignored SIGTERM,
two starts at once, exit codes that became 0. Nothing sleeps: jobs say "up" through a FIFO, ends
are awaited by pidfd.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import backend
from backend.errors import OperatorError, Refused, UsageError
from backend.runs import identity
from backend.runs.atomic import read_json, write_json
from backend.runs.layout import Attempt
from backend.runs.locks import is_held
from backend.runs.state import state
from backend.runs.stop import stop
from backend.runs.supervisor import start, write_spec
from tests.integration.runs_support import SLEEP, TREE, Runs, alive, await_end, kill, managed

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    yield from managed(tmp_path)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", ("succeeded", 0, None)),
        ("exit 7", ("failed", 7, None)),
        ("kill -9 $$", ("failed", None, 9)),
        ("kill -11 $$", ("failed", None, 11)),
    ],
)
def test_code_and_signal_are_kept_as_they_were(runs: Runs, script: str, expected: tuple[object, ...]) -> None:
    ended = runs.end("a", ["sh", "-c", f"echo out; echo err >&2; {script}"])
    assert (ended.state, ended.code, ended.signal, ended.stopped, ended.escaped) == (*expected, False, ())
    log = (runs.folder / "a/log").read_bytes()
    assert (log, ended.log_bytes) == (b"out\nerr\n", len(log))
    assert not (runs.folder / "a/.exit.json.reserved").exists()


def test_a_command_that_cannot_be_executed_is_an_end_with_127_and_a_reason(runs: Runs) -> None:
    (runs.folder / "text").write_text("no program")
    for name, argv, cwd in (
        ("a", ["/no/such/program"], "/"),
        ("b", [str(runs.folder / "text")], "/"),
        ("c", ["true"], "/no/such/folder"),
    ):
        ended = runs.end(name, argv, cwd=cwd)
        assert (ended.state, ended.code, ended.job) == ("failed", 127, None)
        assert "cannot execute" in ended.reason and argv[0] in ended.reason
        assert ended.reason in (runs.folder / name / "log").read_text()


def test_the_job_is_detached_and_sees_only_what_it_should(runs: Runs) -> None:
    show = "import json,os;print(json.dumps([dict(os.environ),os.getcwd(),os.getsid(0)==os.getpid(),os.umask(0)]))"
    old = os.umask(0o027)
    try:
        attempt = runs.spec("a", [sys.executable, "-c", show], env={"A": "1"}, cwd=str(runs.folder))
        started = start(attempt.path, secrets={"HF_TOKEN": "hf_planted"})
    finally:
        os.umask(old)
    await_end(started.supervisor)
    env, cwd, own_session, umask = json.loads(attempt.log.read_text())
    spec = read_json(attempt.spec) or {}
    assert (env["EAGLE3_RUN_ID"], env["SPT_NOENV"], env["A"]) == (spec["run_id"], "1", "1")
    assert env.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert "EAGLE3_SUPERVISOR_OF" not in env
    assert (cwd, own_session, umask) == (str(runs.folder), True, 0o027)
    assert env["HF_TOKEN"] == "hf_planted"
    for path in attempt.path.iterdir():
        assert path == attempt.log or b"hf_planted" not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


def test_a_secret_in_the_spec_is_refused(runs: Runs) -> None:
    with pytest.raises(Refused) as error:
        runs.spec("a", ["true"], env={"HF_TOKEN": "x"})
    assert error.value.reason == "secret_in_spec"
    runs.spec("b", ["true"], env={"TOKENIZERS_PARALLELISM": "false"})


@pytest.mark.parametrize("bad", [{"argv": []}, {"cwd": "relative"}, {"grace_s": float("nan")}, {"env": {"A=B": "x"}}])
def test_a_spec_that_cannot_run_is_refused(runs: Runs, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        write_spec(runs.folder / "a", **{"argv": ["true"], **bad})
    assert not (runs.folder / "a/spec.json").exists()


def test_an_attempt_is_one_command(runs: Runs) -> None:
    runs.spec("a", ["true"])
    runs.spec("a", ["true"])
    with pytest.raises(Refused) as error:
        runs.spec("a", ["false"])
    assert error.value.reason == "spec_exists"
    with pytest.raises(OperatorError) as missing:
        start(runs.folder)
    assert missing.value.reason == "no_spec"


@pytest.mark.parametrize("subreaper", [True, False])
@pytest.mark.parametrize("ending", ["stop", "own end"])
def test_nothing_outlives_its_attempt(runs: Runs, subreaper: bool, ending: str) -> None:
    """Plain child, session of its own, double-forked daemon, and one that ignores SIGTERM."""
    last = SLEEP if ending == "stop" else "read go < $FIFO.go; exit 3"
    os.mkfifo(f"{runs.fifo}.go")
    started = runs.sh("a", TREE + last, subreaper=subreaper)
    children = [int(line) for line in runs.lines(4)]
    assert alive(children) == set(children)
    if ending == "stop":
        report = stop(started.attempt)
        assert (report.ok, report.how, report.state.state, report.left) == (True, "supervisor", "cancelled", ())
    else:
        Path(f"{runs.fifo}.go").write_text("go\n")
        await_end(started.supervisor)
        assert (state(started.attempt).state, state(started.attempt).code) == ("failed", 3)
    assert alive(children) == set()
    assert identity.tagged(started.run_id) == ()
    assert state(started.attempt).escaped == ()


def test_a_daemon_that_dropped_its_tag_does_not_outlive_its_attempt(runs: Runs) -> None:
    daemon = (
        """sh -c 'setsid env -i FIFO=$FIFO sh -c "echo \\$\\$ > \\$FIFO; while :; do sleep 1000; done" & exit 0'\n"""
    )
    started = runs.sh("a", daemon + SLEEP)
    (child,) = (int(line) for line in runs.lines(1))
    assert identity.environment(child).get(identity.TAG) is None
    assert stop(started.attempt).ok
    assert alive([child]) == set()


def test_a_process_that_drops_its_tag_when_it_is_asked_to_end_is_still_ended(runs: Runs) -> None:
    """As one does that is long in exiting: its environment is gone before its memory is."""
    hide = "trap 'exec env -i sleep 1000' TERM; echo $$ > $FIFO; while :; do sleep 1000 & wait; done"
    started = runs.sh("a", f'sh -c "$HIDE" & {SLEEP}', more={"HIDE": hide})
    (child,) = (int(line) for line in runs.lines(1))
    kill(started.supervisor)
    assert stop(started.attempt).ok
    assert alive([child]) == set()


def test_a_suspended_job_ends_by_sigterm_and_not_only_by_sigkill(runs: Runs) -> None:
    started = runs.sh("a", f"echo up > $FIFO; {SLEEP}", grace_s=50.0)
    runs.lines(1)
    assert started.job is not None
    fd = identity.open_verified(started.job)
    signal.pidfd_send_signal(fd, signal.SIGSTOP)
    os.close(fd)
    assert stop(started.attempt).state.signal == signal.SIGTERM


def test_a_stop_after_the_end_tells_how_it_had_ended(runs: Runs) -> None:
    ended = runs.end("a", ["true"])
    report = stop(runs.folder / "a")
    assert (report.how, report.state, report.signalled) == ("not_running", ended, {})
    assert stop(runs.spec("never", ["true"]).path).state.state == "pending"


def test_a_stopped_supervisor_is_still_stopped(runs: Runs) -> None:
    started = runs.sh("a", f"echo up > $FIFO; {SLEEP}")
    runs.lines(1)
    assert started.supervisor is not None
    fd = identity.open_verified(started.supervisor)
    signal.pidfd_send_signal(fd, signal.SIGSTOP)
    os.close(fd)
    assert stop(started.attempt).state.state == "cancelled"


def test_a_second_wish_shortens_the_grace(runs: Runs) -> None:
    started = runs.sh("a", "trap '' TERM; echo up > $FIFO; while :; do sleep 1000 & wait; done", grace_s=3600.0)
    runs.lines(1)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(stop, started.attempt)
        while not Attempt(started.attempt).stop.exists():
            os.sched_yield()
        assert stop(started.attempt, 0).ok
        assert patient.result().ok


def test_a_stop_names_who_still_listens(runs: Runs) -> None:
    started = runs.sh("a", f"echo up > $FIFO; {SLEEP}")
    runs.lines(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        report = stop(started.attempt, port=port)
        assert (report.ok, report.reason, report.port_holders) == (False, "port_open", (os.getpid(),))
    assert stop(started.attempt, port=port).ok


def test_sixteen_starts_at_once_are_one_start(runs: Runs) -> None:
    attempt = runs.spec("a", ["sh", "-c", f"echo $$ >> {runs.folder}/pids; {SLEEP}"])
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda _: start(attempt.path), range(16)))
    runs.started = results[:1]
    assert sum(result.new for result in results) == 1
    again = start(attempt.path)
    first = next(result for result in results if result.new)
    assert again == replace(first, new=False)
    stop(attempt.path)
    assert len((runs.folder / "pids").read_text().split()) == 1
    assert start(attempt.path).new is False


def test_looking_at_the_state_never_spoils_a_start(runs: Runs) -> None:
    attempts = [runs.spec(f"a{n}", ["true"]) for n in range(10)]
    looker = "import sys\nfrom pathlib import Path\nfrom backend.runs.state import state\nprint('up',flush=True)\n"
    looker += "while True:\n  [state(Path(p)) for p in sys.argv[1:]]"
    argv = [sys.executable, "-c", looker, *(str(attempt.path) for attempt in attempts)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        results = [start(attempt.path) for attempt in attempts]
        process.kill()
    assert [result.new for result in results] == [True] * 10
    for result in results:
        await_end(result.supervisor)


def test_the_second_user_of_the_gpus_is_told_who_has_them(runs: Runs) -> None:
    lock = runs.folder / "gpu.lock"
    first = runs.sh("a", f"echo up > $FIFO; {SLEEP}", gpu_lock=lock)
    runs.lines(1)
    second = runs.spec("b", ["true"], gpu_lock=lock)
    with pytest.raises(Refused, match=str(runs.folder / "a")) as error:
        start(second.path)
    assert error.value.reason == "gpu_lock_held"
    assert state(second.path).state == "pending"
    stop(first.attempt)
    assert not is_held(lock)
    third = start(second.path)
    await_end(third.supervisor)
    assert state(second.path).state == "succeeded"


def test_the_gpus_stay_taken_while_a_job_lives_whose_supervisor_died(runs: Runs) -> None:
    lock = runs.folder / "gpu.lock"
    first = runs.sh("a", f"echo up > $FIFO; {SLEEP}", gpu_lock=lock)
    runs.lines(1)
    kill(first.supervisor)
    second = runs.spec("b", ["true"], gpu_lock=lock)
    for _ in range(2):
        with pytest.raises(Refused, match="supervisor died") as error:
            start(second.path)
        assert error.value.reason == "gpu_lock_held"
    stop(first.attempt)
    assert start(second.path).new


def test_a_service_is_ready_only_by_a_verdict_on_this_launch(runs: Runs) -> None:
    started = runs.sh("a", f"echo up > $FIFO; {SLEEP}", service=True, launch_id="L2")
    runs.lines(1)
    verdict = Attempt(started.attempt).verdict
    for record, expected in (
        ({"ok": True, "launch_id": "L1"}, "running"),
        ({"ok": False, "launch_id": "L2"}, "running"),
        ({"ok": True, "launch_id": "L2"}, "ready"),
    ):
        write_json(verdict, record)
        assert state(started.attempt).state == expected
    assert stop(started.attempt).state.state == "exited"


def test_a_service_that_ends_by_itself_has_failed_whatever_its_code(runs: Runs) -> None:
    ended = runs.end("a", ["true"], service=True, launch_id="L")
    assert (ended.state, ended.code) == ("failed", 0)


def test_in_the_foreground_the_code_is_the_jobs(runs: Runs) -> None:
    for name, script, code in (("a", "exit 7", 7), ("b", "kill -9 $$", 137), ("c", "exit 0", 0)):
        attempt = runs.spec(name, ["sh", "-c", script])
        argv = [sys.executable, "-m", "backend.runs.supervisor", str(attempt.path)]
        assert subprocess.run(argv, check=False).returncode == code
        assert state(attempt.path).ended


def test_it_runs_from_a_zipapp_alone(runs: Runs, tmp_path: Path) -> None:
    source, bundle = Path(backend.__file__).parent, tmp_path / "agent.pyz"
    with zipfile.ZipFile(bundle, "w") as archive:
        for path in [
            source / "__init__.py",
            source / "errors.py",
            source / "report.py",
            *(source / "runs").glob("*.py"),
        ]:
            archive.write(path, f"backend/{path.relative_to(source)}")
        archive.writestr(
            "__main__.py",
            "import sys\nfrom pathlib import Path\nfrom backend.runs.supervisor import start\n"
            "print(start(Path(sys.argv[1])).new)\n",
        )
    attempt = runs.spec("a", [sys.executable, "-S", "-c", "import sys; print(sys.path)"])
    done = subprocess.run(
        [sys.executable, "-S", str(bundle), str(attempt.path)],
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
    )
    assert done.stdout == "True\n"
    await_end(state(attempt.path).supervisor)
    assert state(attempt.path).state == "succeeded"
    assert str(bundle) not in attempt.log.read_text()


def test_a_supervisor_that_cannot_start_says_why(runs: Runs) -> None:
    attempt = runs.spec("a", ["true"])
    attempt.log.mkdir()
    with pytest.raises(OperatorError, match="cannot be started") as error:
        start(attempt.path)
    assert error.value.reason == "start_failed"
    assert state(attempt.path).state == "pending"
