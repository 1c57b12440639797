"""The extractor against a real HTTP server that leaves dumps as the plugin does, some of them with states that no store
takes. One bad record must not end an extraction, and must not be lost from sight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backend.data.merged import MergedRecord
from backend.engine.client import AsyncSGLangClient
from backend.engine.extractor import Extraction, Extractor
from backend.errors import OperatorError
from backend.store.reader import Store
from tests.unit.eagle3_support import Heard
from tests.unit.store_support import Sample, identity, open_writer, sample

SAMPLES = {one.id: one for one in map(sample, range(4))}
BAD = sample(2).id
REPLY = {"output_ids": [1], "meta_info": {"prompt_tokens": 1, "completion_tokens": 1}}


class Dumper(ThreadingHTTPServer):
    """Answers `/generate` after it has left the dump of that record; `spoil` may change the states of a try."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder

    def spoil(self, rid: str, one: Sample) -> Sample:
        return one


class Answer(BaseHTTPRequestHandler):
    server: Dumper

    def do_POST(self) -> None:
        rid = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rid"]
        one = self.server.spoil(rid, SAMPLES[rid.rpartition("-")[0]])
        tensors = {"input_ids": one.input_ids_T, "aux_hidden_state": one.aux_TC, "hidden_state": one.last_TH}
        facts = {"rid": rid, "layers": "2,3,5", "launch_id": "e3-1", "chunks": "1", "post_norm": "true"}
        save_file(tensors, self.server.folder / f"{rid}.safetensors", metadata=facts)
        body = json.dumps(REPLY).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing to the test's output."""


@pytest.fixture
def dumper(tmp_path: Path) -> Iterator[Dumper]:
    (tmp_path / "dump").mkdir()
    with Dumper(tmp_path / "dump") as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def not_finite(one: Sample) -> Sample:
    spoiled = one.aux_TC.clone()
    spoiled[0, 0] = float("nan")
    return replace(one, aux_TC=spoiled)


def extract(dumper: Dumper, heard: Heard, root: Path) -> Extraction:
    records = [MergedRecord(s.id, s.source, tuple(s.input_ids_T.tolist()), s.spans) for s in SAMPLES.values()]

    async def run() -> Extraction:
        async with AsyncSGLangClient(f"http://127.0.0.1:{dumper.server_port}") as client:
            extractor = Extractor(client, writer, dumper.folder, "e3-1", heard, lambda: None)
            return await extractor.run(records, concurrency=2)

    with open_writer(root, identity()) as writer:
        return asyncio.run(run())


def test_a_record_whose_states_are_not_finite_fails_twice_and_the_others_are_stored(
    dumper: Dumper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumper, "spoil", lambda rid, one: not_finite(one) if one.id == BAD else one)
    heard = Heard()
    extraction = extract(dumper, heard, tmp_path / "store")
    assert extraction.done == 3 and list(extraction.failed) == [BAD]
    assert "not finite" in extraction.failed[BAD] and len(heard.warnings) == 2
    assert list(dumper.folder.iterdir()) == [], "dumps of failed records would fill /dev/shm"
    with Store.open(tmp_path / "store") as store:
        assert all(one.same_as(store) for one in SAMPLES.values() if one.id != BAD) and BAD not in store


def test_a_record_that_is_finite_at_the_second_try_is_stored(
    dumper: Dumper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumper, "spoil", lambda rid, one: not_finite(one) if rid == f"{BAD}-1" else one)
    extraction = extract(dumper, Heard(), tmp_path / "store")
    assert (extraction.done, extraction.failed) == (4, {})


def test_a_dtype_that_no_record_can_be_stored_in_ends_the_extraction_at_once(
    dumper: Dumper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"aux_TC": torch.float32, "last_TH": torch.float32}
    monkeypatch.setattr(
        dumper, "spoil", lambda rid, one: replace(one, **{name: getattr(one, name).to(to) for name, to in wide.items()})
    )
    with pytest.raises(OperatorError) as error:
        extract(dumper, Heard(), tmp_path / "store")
    assert error.value.reason == "record_dtype" and "[store] scheme" in error.value.fix
