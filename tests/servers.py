"""A real SGLang server on a CPU for tests: started from a `ServerSpec`, ended by pid, its log at hand."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.engine.capture import plugin_dir
from backend.engine.client import SGLangClient
from backend.engine.launch import ServerMode, ServerSpec, argv, environment

START_LIMIT_S = 300.0


@dataclass(frozen=True)
class RunningServer:
    """One running server."""

    spec: ServerSpec
    process: subprocess.Popen[bytes]
    log: Path
    client: SGLangClient

    @property
    def dump_dir(self) -> Path:
        """Where its captures appear."""
        return Path(self.spec.dump_dir or "/nonexistent")


def spec_for(model: Path, mode: ServerMode, folder: Path, **more: Any) -> ServerSpec:
    """A small spec: float32, one free port, everything in `folder`."""
    spec = ServerSpec(
        mode=mode,
        model_path=str(model),
        host="127.0.0.1",
        port=free_port(),
        launch_id=f"test-{secrets.token_hex(4)}",
        device="cpu",
        dtype="float32",
        mem_fraction=0.1,
        max_total_tokens=8192,
        max_running_requests=8,
        chunked_prefill=128,
        dump_dir=str(folder / "dump") if mode == "extract" else None,
        layers=(2, 4, 5) if mode == "extract" else (),
    )
    return replace(spec, **more)


def free_port() -> int:
    """A port that was free a moment ago, outside the range from which the kernel gives ports to clients.

    SGLang also wants port + 10000, so it must stay well below 65535.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start(spec: ServerSpec, folder: Path, plugin: Path | None = None, without: Collection[str] = ()) -> RunningServer:
    """Start without waiting. `plugin` replaces the plugin's folder (for tests that break it); `without` drops flags."""
    folder.mkdir(parents=True, exist_ok=True)
    if spec.dump_dir:
        Path(spec.dump_dir).mkdir(parents=True, exist_ok=True)
    unpack = folder / "unpacked"
    env = {**os.environ, "SPT_NOENV": "1", **environment(spec, plugin or plugin_dir(unpack), unpack)}
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [word for word in argv(sys.executable, spec) if word not in without],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return RunningServer(spec, process, log, SGLangClient(f"http://{spec.host}:{spec.port}"))


def wait_healthy(server: RunningServer) -> None:
    """Block until /health answers 200; fail with the log's end if the server dies or is too slow.

    Each probe is one request that the server holds until it can generate; refused connections are retried when the
    process has had 0.2 s to end, which is awaited.
    """
    for _ in range(int(START_LIMIT_S / 0.2)):
        if server.client.health().code == 200:
            return
        try:
            server.process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"the server is not healthy:\n{server.log.read_text(errors='replace')[-4000:]}")


def stop(server: RunningServer) -> None:
    """End the whole session that `start` made."""
    server.client.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(30)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)  # children that outlived their parent are in its session


@contextlib.contextmanager
def serving(
    spec: ServerSpec, folder: Path, plugin: Path | None = None, without: Collection[str] = ()
) -> Iterator[RunningServer]:
    """A healthy server for the length of a block."""
    server = start(spec, folder, plugin, without)
    try:
        wait_healthy(server)
        yield server
    finally:
        stop(server)
