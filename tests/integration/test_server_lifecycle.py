"""Servers as attempts: whose they are, how they end, and that nothing of them stays. A short script stands in for the
interpreter that would run SGLang; supervisor, records, ports and shared memory are real."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backend.config import Config
from backend.errors import Exit, OperatorError, Refused
from backend.report import Silent
from backend.resolve import load
from backend.runs import shm
from backend.runs.layout import Home
from backend.runs.locks import FileLock
from backend.runs.state import state
from backend.runs.stop import stop
from backend.stages.__main__ import execute
from backend.stages.base import StageContext
from backend.stages.gate import judge
from backend.stages.launch import LaunchServer
from backend.stages.server import (
    ServerRecord,
    clear_leftovers,
    live_servers,
    owner_of,
    recorded_segments,
    start_server,
    stop_server,
    stopped_after,
)
from backend.stages.stop import StopOldServer
from tests.integration.runs_support import await_end, kill
from tests.servers import free_port

pytestmark = pytest.mark.slow


class Words(Silent):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class Servers:
    """A home, and stand-in servers in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = load(profile="kimi-k2.5", environ={"HOME": str(folder)}, cwd=folder).config.model_dump()
        config["capture"] |= {"dump_dir": str(folder / "dump")}
        config["server"] |= {"port": free_port()}
        self.script("exec sleep 1000")
        home, python = Home(folder / "state").create(), str(folder / "python")
        self.ctx = StageContext(Config.model_validate(config), python, home, {}, Words())
        self.attempts: list[Path] = []

    def script(self, text: str) -> None:
        """What the next server does."""
        (self.folder / "python").write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / "python").chmod(0o755)

    def start(self, place: str = "pipelines/P1/stages/06-launch/attempts/1") -> Path:
        """A server at `place` in the home."""
        attempt = self.ctx.home.path / place
        attempt.mkdir(parents=True)
        self.attempts.append(attempt)
        start_server(self.ctx, attempt, "extract")
        return attempt

    def close(self) -> None:
        """End whatever a failed test left."""
        for attempt in self.attempts:
            if (attempt / "spec.json").exists():
                stop(attempt, 0)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    made.close()


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file in `/dev/shm` as a launch leaves it."""
    path = shm.SHM / f"eagle3-test-{secrets.token_hex(8)}"
    path.write_bytes(b"x" * 4096)
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


def record(attempt: Path, segment: Path) -> None:
    """Note this segment alone: others on this machine make theirs while the test runs."""
    found = [each.as_json() for each in shm.snapshot() if each.name == segment.name]
    (attempt / "segments.json").write_text(json.dumps({"new": found}))


def dump_of(attempt: Path) -> Path:
    return Path(ServerRecord.read(attempt).dump_dir)


def die(attempt: Path) -> None:
    """The server's process is killed, as the kernel does it when memory runs out."""
    now = state(attempt)
    assert now.job is not None
    os.kill(now.job.pid, signal.SIGKILL)
    await_end(now.supervisor)


@pytest.mark.parametrize(
    "place",
    [
        "pipelines/P1/stages/06-launch/attempts/1",
        "pipelines/P1/stages/11-bench/attempts/1/servers/none",
        "regenerate/attempts/x",
    ],
)
def test_a_server_whose_supervisor_was_killed_is_ours_and_the_stop_stage_ends_it(
    servers: Servers, segment: Path, place: str
) -> None:
    attempt = servers.start(place)
    record(attempt, segment)
    job = state(attempt).job
    assert job is not None
    kill(state(attempt).supervisor)
    assert list(live_servers(servers.ctx.home)) == [attempt]
    assert owner_of(servers.ctx.home, job.pid) == attempt
    stage = StopOldServer()
    assert len(stage.plan(servers.ctx).effects) == 1
    outputs, checks = execute(stage, servers.ctx)
    assert outputs["stopped"][0]["pids"] == [job.pid]
    assert {check.name: check.ok for check in checks if check.name != "gpu memory"} == {
        "servers gone": True,
        "port closed": True,
        "dump folders gone": True,
        "shared memory": True,
    }
    assert not job.alive() and not segment.exists()


def test_verification_of_a_stop_sees_what_is_left(servers: Servers, segment: Path) -> None:
    attempt = servers.start()
    record(attempt, segment)
    outputs = {"stopped": [{**StopOldServer().run(servers.ctx)["stopped"][0], "dump_dir": str(servers.folder)}]}
    segment.touch(mode=0o600)
    outputs["stopped"][0]["segments"] = [each.as_json() for each in shm.snapshot() if each.name == segment.name]
    found = {check.name: check for check in StopOldServer().verify(servers.ctx, outputs)}
    assert found["dump folders gone"].ok is False
    assert found["shared memory"].ok is False and segment.name in found["shared memory"].evidence
    with segment.open("rb"):
        assert StopOldServer().verify(servers.ctx, outputs)[3].ok is None, "what others use may stay"


def test_the_next_start_clears_what_a_server_that_died_left_and_nothing_of_one_that_lives(
    servers: Servers, segment: Path
) -> None:
    attempt = servers.start()
    record(attempt, segment)
    (dump_of(attempt) / "r1.safetensors").write_bytes(b"captured")
    clear_leftovers(attempt)
    assert dump_of(attempt).is_dir() and segment.exists(), "it lives"
    die(attempt)
    assert dump_of(attempt).is_dir() and segment.exists()
    second = servers.start("pipelines/P2/stages/06-launch/attempts/1")
    assert not dump_of(attempt).exists() and not segment.exists()
    assert dump_of(second).is_dir()
    clear_leftovers(attempt)


def test_a_start_that_finds_the_gpus_taken_leaves_no_dump_folder(servers: Servers) -> None:
    lock = FileLock(servers.ctx.home.gpu_lock)
    lock.acquire({"what": "test"})
    with pytest.raises(Refused) as error:
        servers.start()
    assert error.value.reason == "gpu_lock_held"
    assert not dump_of(servers.attempts[0]).exists()
    lock.release()


def test_a_stop_that_leaves_the_port_open_says_who_holds_it_and_clears_nothing(servers: Servers) -> None:
    attempt = servers.start()
    port = servers.ctx.config.server.port
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(OperatorError) as error:
            stop_server(attempt)
        assert (error.value.reason, error.value.code) == ("port_open", Exit.NEEDS_HUMAN)
        assert f"port {port} is open still: held by pid {os.getpid()}" in error.value.what
        assert dump_of(attempt).is_dir()
        with pytest.raises(ZeroDivisionError), stopped_after(attempt, servers.ctx.reporter):
            raise ZeroDivisionError
        assert isinstance(servers.ctx.reporter, Words) and "is open still" in servers.ctx.reporter.warnings[0]
    stop_server(attempt)
    assert not dump_of(attempt).exists()


def test_a_server_that_dies_at_once_was_never_ready_and_its_last_words_are_told(servers: Servers) -> None:
    servers.script("echo 'RuntimeError: CUDA error: no kernel image'; exit 3")
    attempt = servers.start()
    await_end(state(attempt).supervisor)
    with pytest.raises(OperatorError) as error:
        execute(LaunchServer(), replace(servers.ctx, server=attempt))
    assert (error.value.code, error.value.reason) == (Exit.NEVER_READY, "server_ended")
    assert "code 3" in error.value.what and "no kernel image" in error.value.what


def test_segments_are_recorded_also_when_the_gate_refuses(servers: Servers, tmp_path: Path) -> None:
    attempt = servers.start()
    die(attempt)
    name = f"eagle3-test-{secrets.token_hex(8)}"
    (shm.SHM / name).write_bytes(b"x")
    try:
        with pytest.raises(OperatorError) as error:
            judge(replace(servers.ctx, server=attempt), canary=False)
        assert error.value.code == Exit.NEVER_READY
        assert name in {each.name for each in recorded_segments(attempt)}
    finally:
        (shm.SHM / name).unlink()
