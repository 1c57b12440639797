"""Facts from /proc: who listens, when a process began, what a tree read. Real processes, this machine's own /proc."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backend.engine import procfs
from backend.runs.identity import start_ticks

WAIT_FOR_STDIN = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def child(code: str = WAIT_FOR_STDIN, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env}
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.communicate()


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
)
def test_the_owner_of_a_listening_port_is_found(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen()
        (found,) = procfs.listeners(server.getsockname()[1])
        assert found.pids == (os.getpid(),)
        assert found.address == host and found.uid == os.getuid()


def test_a_port_that_is_only_bound_or_connected_is_not_listening() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert procfs.listeners(server.getsockname()[1]) == []


def test_a_listener_on_another_address_does_not_answer_for_this_host() -> None:
    def at(address: str) -> procfs.Listener:
        return procfs.Listener(address, 8000, 1, 0, ())

    assert procfs.answers_for(at("0.0.0.0"), "127.0.0.1")
    assert procfs.answers_for(at("127.0.0.1"), "localhost")
    assert not procfs.answers_for(at("10.0.0.7"), "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("00000000000000000000000001000000", "::1"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the samples are from a little-endian machine")
def test_addresses_are_decoded_from_the_kernels_words(text: str, address: str) -> None:
    assert procfs.decode_address(text) == address


def test_the_start_of_a_process_is_a_wall_clock_time_between_before_and_after() -> None:
    before = time.time()
    with child() as process:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        slack = 2 / os.sysconf("SC_CLK_TCK")
        assert before - slack <= procfs.started_at(ticks) <= time.time() + slack


def test_a_tree_holds_grandchildren_and_not_strangers() -> None:
    grand = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {WAIT_FOR_STDIN!r}]); p.wait()"
    with child(grand) as process, child() as stranger:
        found = procfs.tree(process.pid)
        assert found[0] == process.pid and len(found) == 2
        assert stranger.pid not in found
        assert {process.pid, stranger.pid} < set(procfs.tree(os.getpid()))


def test_command_line_environment_and_binary_are_as_started() -> None:
    with child(EAGLE3_PROOF="a=b") as process:
        assert (procfs.argv(process.pid) or [])[1:] == ["-c", WAIT_FOR_STDIN]
        assert procfs.environ(process.pid)["EAGLE3_PROOF"] == "a=b"
        assert procfs.exe(process.pid) == os.path.realpath(sys.executable)
    assert procfs.argv(process.pid) is None and procfs.exe(process.pid) is None
    assert procfs.environ(process.pid) == {}


def test_memory_and_disk_reads_of_a_tree_include_its_children() -> None:
    alone = procfs.usage(os.getpid())
    with child() as process:
        both = procfs.usage(os.getpid())
        part = procfs.usage(process.pid)
    assert part.rss_bytes > 0 and both.rss_bytes > part.rss_bytes
    assert alone.read_bytes is not None and both.read_bytes is not None and part.read_bytes is not None
    assert both.read_bytes >= part.read_bytes
