"""A process is signalled only when it is provably the one that was started: PID reuse is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backend.errors import Refused
from backend.runs import identity
from backend.runs.identity import TAG, ProcessIdentity, open_verified


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, TAG: "R1"}) as child:
        yield child
        child.kill()


def test_the_right_process_is_opened_and_can_be_signalled(process: subprocess.Popen[bytes]) -> None:
    me = ProcessIdentity.of(process.pid, f"{TAG}=R1")
    assert me.alive() and ProcessIdentity.from_json(me.as_json()) == me
    fd = open_verified(me)
    signal.pidfd_send_signal(fd, signal.SIGTERM)
    os.close(fd)
    assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start_ticks": 1}, "was given to another process"),
        ({"boot_id": "another"}, "rebooted"),
        ({"pid1_ticks": 10**9}, "container was restarted"),
        ({"pid_ns": "pid:[1]"}, "another pid namespace"),
        ({"tag": f"{TAG}=R2"}, "does not carry EAGLE3_RUN_ID=R2"),
    ],
)
def test_any_difference_is_refused_and_nothing_signalled(
    process: subprocess.Popen[bytes], change: dict[str, object], words: str
) -> None:
    wrong = replace(ProcessIdentity.of(process.pid, f"{TAG}=R1"), **change)  # type: ignore[arg-type]
    with pytest.raises(Refused, match=words) as error:
        open_verified(wrong)
    assert error.value.reason == "pid_reused"
    assert process.poll() is None


def test_a_process_of_another_user_is_refused(process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(Refused) as error:
        open_verified(replace(ProcessIdentity.of(process.pid), uid=os.geteuid() + 1))
    assert error.value.reason == "not_ours"


def test_a_zombie_is_dead_although_it_keeps_number_and_start_time(process: subprocess.Popen[bytes]) -> None:
    me = ProcessIdentity.of(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seen = identity.see(process.pid)
    assert seen is not None and seen.start_ticks == me.start_ticks and seen.dead
    with pytest.raises(Refused) as error:
        open_verified(me)
    assert error.value.reason == "gone"


def test_a_process_whose_first_thread_ended_is_alive() -> None:
    code = """
import ctypes, os, sys, threading
def go_on():
    main.join_native()
    print("up", flush=True)
    sys.stdin.read()
class main:
    @staticmethod
    def join_native():
        while open(f"/proc/self/task/{os.getpid()}/stat").read().rsplit(")", 1)[1].split()[0] != "Z":
            os.sched_yield()
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            if child.stdout.readline() != b"up\n":
                pytest.skip("this Python does not survive pthread_exit of its main thread")
            seen = identity.see(child.pid)
            assert seen is not None and seen.state == "Z" and not seen.dead
        finally:
            child.kill()


def test_tagged_processes_are_found_at_any_depth_and_others_are_not(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = 'setsid sh -c "echo \\$\\$ > $0; exec sleep 1000" & exec sleep 1000'
    env = {**os.environ, TAG: "R-deep"}
    with subprocess.Popen(["sh", "-c", script, str(fifo)], env=env) as parent:
        child = int(fifo.read_text())
        try:
            assert {seen.pid for seen in identity.tagged("R-deep")} == {parent.pid, child}
            assert identity.tagged("R") == () == identity.tagged("R-deep2")
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


def test_a_process_in_the_middle_of_exec_does_not_look_untagged() -> None:
    again = 'exec sh -c "$0" "$0"'
    with subprocess.Popen(["sh", "-c", again, again], env={**os.environ, TAG: "R1"}) as process:
        seen = {identity.environment(process.pid).get(TAG) for _ in range(3000)}
        assert process.poll() is None
        process.kill()
    assert seen == {"R1"}


def test_an_empty_environment_is_told_from_one_that_is_not_there_yet() -> None:
    with subprocess.Popen(["/bin/sleep", "1000"], env={}) as process:
        assert identity.environment(process.pid) == {}
        process.kill()


REUSE = """
import os, subprocess
from backend.errors import Refused
from backend.runs.identity import ProcessIdentity, open_verified
first = subprocess.Popen(["sleep", "1000"])
old = ProcessIdentity.of(first.pid)
first.kill()
first.wait()
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(old.pid - 1))
while float(open("/proc/uptime").read().split()[0]) * os.sysconf("SC_CLK_TCK") < old.start_ticks + 1:
    os.sched_yield()  # start times are told apart by clock ticks
second = subprocess.Popen(["sleep", "1000"])
try:
    os.close(open_verified(old))
    print("signalled a stranger")
except Refused as refusal:
    print(second.pid == old.pid, refusal.reason)
second.kill()
second.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_a_number_that_the_kernel_gave_out_again_is_refused() -> None:
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", REUSE]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no pid namespaces here: {done.stderr.strip()}")
    assert done.stdout == "True pid_reused\n", done.stderr
