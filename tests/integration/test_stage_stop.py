"""SIGTERM to an extraction: it ends as "stopped", and its store is whole and unlocked.

A real process; the server is a loopback socket that takes every request and never answers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backend.errors import Exit
from backend.report import Silent
from backend.runs.locks import is_held
from backend.store.format import LOCK
from backend.store.verify import verify
from tests.unit.store_support import content, identity, open_writer, sample

pytestmark = pytest.mark.slow
REPO = Path(__file__).resolve().parents[2]

EXTRACTING = """
import asyncio, json, socket, sys, threading
from pathlib import Path
from backend.data.merged import MergedRecord
from backend.engine.client import AsyncSGLangClient
from backend.engine.extractor import Extractor
from backend.errors import OperatorError
from backend.report import Silent
from backend.stages.extract import until_stopped
from tests.unit.store_support import identity, open_writer, sample

root, never = Path(sys.argv[1]), socket.create_server(("127.0.0.1", 0))

def take() -> None:
    held = [never.accept()[0] for _ in range(2)]
    for one in held:
        one.recv(1)
    print("asked", flush=True)
    held[0].recv(1 << 20)
    threading.Event().wait()

async def fill():
    records = [MergedRecord(s.id, s.source, tuple(s.input_ids_T.tolist()), s.spans) for s in map(sample, range(5))]
    with open_writer(root, identity()) as writer:
        sample(0).append_to(writer)
        writer.flush()
        sample(4).append_to(writer)
        async with AsyncSGLangClient(f"http://127.0.0.1:{never.getsockname()[1]}") as client:
            return await Extractor(client, writer, root, "e3-1", Silent(), lambda: None).run(records[:4], 2)

threading.Thread(target=take, daemon=True).start()
try:
    until_stopped(fill())
except OperatorError as error:
    print(json.dumps(error.as_json()), flush=True)
    sys.exit(int(error.code))
"""


def stopped(script: str, argument: Path, ready: str) -> tuple[int, str]:
    """Run the script until it says that it is `ready`, send SIGTERM, and return its code and what else it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(argument)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert said == ready, err
    return process.returncode, out + err


def test_a_stopped_extraction_closes_its_store_and_says_that_it_was_stopped(tmp_path: Path) -> None:
    root = tmp_path / "store"
    code, said = stopped(EXTRACTING, root, "asked")
    assert code == Exit.TERMINATED, said
    assert json.loads(said)["reason"] == "stopped"
    assert not is_held(root / LOCK)
    report = verify(root, full=True, reporter=Silent())
    assert report.ok and report.records == 2, "also the record that was not flushed yet when the signal came"
    with open_writer(root, identity()) as writer:
        assert (writer.adopted, writer.quarantined) == (0, 0), "nothing half-written was left behind"
        for one in map(sample, (1, 2, 3)):
            one.append_to(writer)
    assert content(root)
