"""Supervised attempts with real processes: nothing outlives a stop, and the end is recorded as it was.

Each test names a way in which runs were lost or leaked: children in sessions of their own, daemons, ignored SIGTERM,
a killed supervisor, two starts at once, exit codes that became 0. Nothing sleeps: jobs say "up" through a FIFO, ends
are awaited by pidfd.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import backend
from backend.errors import OperatorError, Refused, UsageError
from backend.runs import identity, tree
from backend.runs.atomic import read_json, write_json
from backend.runs.identity import ProcessIdentity
from backend.runs.layout import Attempt
from backend.runs.locks import is_held
from backend.runs.state import AttemptState, state
from backend.runs.stop import stop
from backend.runs.supervisor import Started, start, write_spec

pytestmark = pytest.mark.slow
SLEEP = "exec sleep 1000"


def await_end(process: ProcessIdentity | None) -> None:
    """Block until the process is gone; fails after a minute, because then it never will be."""
    assert process is not None
    try:
        fd = identity.open_verified(process)
    except Refused:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = poll.poll(60_000)
    os.close(fd)
    assert ended, f"pid {process.pid} is still alive after a minute"


class Runs:
    """Attempts of one test below one folder; whatever a failed test leaves behind is ended by identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.started: list[Started] = []

    def spec(self, name: str, argv: Sequence[str], **options: Any) -> Attempt:
        attempt = Attempt(self.folder / name).create()
        write_spec(attempt.path, argv=argv, **{"grace_s": 0.5, **options})
        return attempt

    def start(self, name: str, argv: Sequence[str], **options: Any) -> Started:
        started = start(self.spec(name, argv, **options).path)
        self.started.append(started)
        return started

    def sh(self, name: str, script: str, more: dict[str, str] | None = None, **options: Any) -> Started:
        return self.start(name, ["sh", "-c", script], env={"FIFO": str(self.fifo), **(more or {})}, **options)

    def lines(self, count: int) -> list[str]:
        """The next `count` lines that jobs write into the FIFO."""
        found: list[str] = []
        while len(found) < count:
            found.extend(self.fifo.read_text().split("\n")[:-1])
        return found

    def end(self, name: str, argv: Sequence[str], **options: Any) -> AttemptState:
        started = self.start(name, argv, **options)
        await_end(started.supervisor)
        return state(started.attempt)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    for started in made.started:
        stop(started.attempt, 0)


def alive(pids: Sequence[int]) -> set[int]:
    return {pid for pid in pids if identity.start_ticks(pid) is not None}


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


TREE = """
sh -c 'echo $$ > $FIFO; exec sleep 1000' &
setsid sh -c 'echo $$ > $FIFO; exec sleep 1000' &
sh -c 'setsid sh -c "echo \\$\\$ > $FIFO; exec sleep 1000" & exit 0'
setsid sh -c 'trap "" TERM HUP INT; echo $$ > $FIFO; while :; do sleep 1000; done' &
"""


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


def kill(process: ProcessIdentity | None) -> None:
    assert process is not None
    fd = identity.open_verified(process)
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    os.close(fd)
    await_end(process)


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


NEST = """
import sys
from pathlib import Path
from backend.runs.supervisor import start, write_spec
inner = Path(sys.argv[1])
inner.mkdir()
script = f"trap '{sys.argv[4]}' TERM; echo up > {sys.argv[2]}; while :; do sleep 1000 & wait; done"
write_spec(inner, argv=["sh", "-c", script], grace_s=float(sys.argv[5]))
start(inner)
sys.stdin = open(sys.argv[3])
sys.stdin.read()
"""


def nest(
    runs: Runs, subreaper: bool, *, grace_s: float = 60.0, trap: str = "exit 5", inner_grace_s: float = 30.0
) -> tuple[Started, Path]:
    """An attempt whose job starts another one, and the folder of that inner attempt; returns when the inner runs."""
    inner, go = runs.folder / "inner", Path(f"{runs.fifo}.go")
    os.mkfifo(go)
    argv = [sys.executable, "-c", NEST, str(inner), str(runs.fifo), str(go), trap, str(inner_grace_s)]
    root = str(Path(backend.__file__).parent.parent)
    outer = runs.start("outer", argv, subreaper=subreaper, env={"PYTHONPATH": root}, grace_s=grace_s)
    runs.lines(1)
    return outer, inner


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
