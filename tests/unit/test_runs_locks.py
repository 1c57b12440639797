"""Locks die with their holder, name it, and looking at one never makes a taker fail."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.runs.locks import FileLock, Held, current_record, is_held

HOLDER = """
import sys
from pathlib import Path
from backend.runs.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire({"attempt": "/a/1", "run_id": "R1"})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_taker_is_refused_with_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    first, second = FileLock(path), FileLock(path)
    first.acquire({"attempt": "/a/1"})
    with pytest.raises(Held, match="/a/1") as error:
        second.acquire({"attempt": "/a/2"})
    assert error.value.holder == {"attempt": "/a/1"}
    assert is_held(path)
    first.release()
    assert not is_held(path)
    second.acquire({"attempt": "/a/2"})
    assert second.previous == {}
    second.release()


def test_a_killed_holder_frees_the_lock_and_leaves_its_name(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert is_held(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert not is_held(path)
    lock = FileLock(path)
    lock.acquire({})
    assert lock.previous == {"attempt": "/a/1", "run_id": "R1"}
    lock.release()
    assert current_record(path) == {}


def waited_for(path: Path) -> bool:
    """True while somebody waits for a flock on the file (the kernel's list marks waiters by an arrow)."""
    inode = f":{path.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_looking_never_makes_a_taker_fail(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    lock = FileLock(path)
    with path.open() as look, ThreadPoolExecutor(1) as pool:
        fcntl.flock(look, fcntl.LOCK_SH)  # what a look does, held for longer
        taking = pool.submit(lock.acquire, {"run_id": "R1"})
        while not waited_for(path) and not taking.done():
            os.sched_yield()
        assert not taking.done(), "refused because of somebody who only looked"
        assert not is_held(path), "a look is not in the way of another look"
        fcntl.flock(look, fcntl.LOCK_UN)
        taking.result()
    assert is_held(path)
    lock.release()


def test_a_lock_that_does_not_exist_is_free_and_stays_absent(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "lock")
    assert current_record(tmp_path / "lock") == {}
    assert list(tmp_path.iterdir()) == []
