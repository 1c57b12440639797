"""Capture by the plugin in real servers: what is on disk equals Hugging Face's states, and nothing is ever half there.

Failures prevented: layers off by one, chunks lost or doubled, rows of one request in another's file, a radix-cache hit
stored as a short row, a server whose answers change because it is watched.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from backend.engine.capture import BOUNDARIES_RID, Capture, live_markers, plugin_sha, read_capture
from backend.engine.client import AsyncSGLangClient
from backend.engine.layers import default_layers
from backend.errors import OperatorError
from tests.integration.conftest import (
    CHUNK,
    GREEDY_PROMPTS,
    GREEDY_TOKENS,
    Servers,
    assert_flags_as_asked,
    placed,
)
from tests.servers import RunningServer, serving
from tests.sglang_models import HIDDEN, LAYERS, hugging_face_states, prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOLERANCE = 1e-4
DEFAULT = default_layers(LAYERS)


@pytest.fixture
def extracting(servers: Servers, model: str) -> RunningServer:
    """A capturing server of this model. The plain answers are made first: one server runs at a time."""
    servers.greedy(model)
    return servers.lend(servers.spec(model, "extract"))


def capture_of(server: RunningServer, rid: str) -> Capture:
    return read_capture(server.dump_dir / f"{rid}.safetensors")


def assert_equals_hugging_face(server: RunningServer, capture: Capture, ids: list[int]) -> None:
    assert capture.input_ids_T.tolist() == ids
    aux_TC, last_TH = hugging_face_states(Path(server.spec.model_path), ids, capture.layers)
    torch.testing.assert_close(capture.aux_TC, aux_TC, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(capture.last_TH, last_TH, atol=TOLERANCE, rtol=0)


def test_a_running_capture_proves_itself(extracting: RunningServer) -> None:
    [marker] = live_markers(extracting.dump_dir)
    assert (marker.route, marker.launch_id, marker.layers) == ("plugin", extracting.spec.launch_id, DEFAULT)
    assert marker.sha256 == plugin_sha()
    assert marker.sink_hooked, "the health check has gone through the sink by now"
    assert os.getpgid(marker.pid) == extracting.process.pid


def test_the_server_resolved_every_flag_as_asked(extracting: RunningServer) -> None:
    assert_flags_as_asked(extracting)
    assert extracting.client.model_info()["weight_version"] == extracting.spec.launch_id


@pytest.mark.parametrize("length, chunks", [(14, 1), (300, 3)])
def test_captured_states_equal_hugging_face(extracting: RunningServer, length: int, chunks: int) -> None:
    ids, rid = prompt(length, seed=length), f"single-{length}"
    extracting.client.generate(ids, rid=rid, max_new_tokens=1)
    capture = capture_of(extracting, rid)
    assert (capture.chunks, capture.layers, capture.post_norm) == (chunks, DEFAULT, True)
    assert_equals_hugging_face(extracting, capture, ids)


def test_concurrent_prompts_keep_their_own_rows(extracting: RunningServer) -> None:
    prompts = {f"together-{n}": prompt(n, seed=1000 + n) for n in (1, 5, 17, 33, 64, 100, 140, 260)}

    async def ask() -> None:
        async with AsyncSGLangClient(f"http://127.0.0.1:{extracting.spec.port}") as client:
            await asyncio.gather(*(client.generate(ids, rid=rid, max_new_tokens=1) for rid, ids in prompts.items()))

    asyncio.run(ask())
    for rid, ids in prompts.items():
        assert_equals_hugging_face(extracting, capture_of(extracting, rid), ids)


def test_watching_a_server_does_not_change_its_answers(servers: Servers, model: str, extracting: RunningServer) -> None:
    watched = [extracting.client.generate(ids, max_new_tokens=GREEDY_TOKENS) for ids in GREEDY_PROMPTS]
    assert [reply.output_ids for reply in watched] == servers.greedy(model)
    assert all(reply.spec_verify_ct is None for reply in watched)


@pytest.mark.parametrize("length", [40, 2 * CHUNK + 10])
def test_a_boundaries_request_alone_is_captured_at_every_layer(extracting: RunningServer, length: int) -> None:
    ids, rid = prompt(length, seed=2000 + length), f"{BOUNDARIES_RID}{length}"
    extracting.client.generate(ids, rid=rid, max_new_tokens=1)
    capture = capture_of(extracting, rid)
    assert capture.layers == tuple(range(LAYERS))
    weights = load_file(Path(extracting.spec.model_path) / "model.safetensors")
    assert torch.equal(capture.aux_TC[:, :HIDDEN], weights["model.embed_tokens.weight"][torch.tensor(ids)])
    assert_equals_hugging_face(extracting, capture, ids)

    extracting.client.generate(ids, rid=f"after-{rid}", max_new_tokens=1)
    assert capture_of(extracting, f"after-{rid}").layers == DEFAULT, "the next request is captured as configured again"


def test_boundaries_requests_in_one_batch_are_refused_not_mislabelled(extracting: RunningServer) -> None:
    rids = [f"{BOUNDARIES_RID}shared-{i}" for i in range(8)]
    body = {
        "input_ids": [prompt(10, seed=i) for i in range(8)],
        "rid": rids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }
    url = f"http://127.0.0.1:{extracting.spec.port}/generate"
    httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()
    refused = 0
    for rid in rids:
        try:
            assert capture_of(extracting, rid).layers == tuple(range(LAYERS))
        except OperatorError as error:
            assert error.reason == "capture_failed"
            assert "not_alone" in error.what
            refused += 1
    assert refused >= 2


def test_health_checks_leave_no_file(extracting: RunningServer) -> None:
    assert extracting.client.health().code == 200
    assert not list(extracting.dump_dir.glob("HEALTH_CHECK*"))


def test_an_id_that_cannot_name_a_file_is_answered_but_not_captured(extracting: RunningServer) -> None:
    before = set(extracting.dump_dir.iterdir())
    reply = extracting.client.generate(prompt(6, seed=6), rid="../outside/it", max_new_tokens=1)
    assert reply.completion_tokens == 1
    assert set(extracting.dump_dir.iterdir()) == before
    assert not (extracting.dump_dir.parent / "outside").exists()


def test_a_dump_folder_that_is_gone_costs_the_capture_not_the_server(extracting: RunningServer) -> None:
    away = extracting.dump_dir.rename(extracting.dump_dir.with_name("away"))
    try:
        assert extracting.client.generate(prompt(9, seed=9), rid="nowhere", max_new_tokens=1).completion_tokens == 1
    finally:
        away.rename(extracting.dump_dir)
    assert "nowhere: write_failed" in extracting.log.read_text(errors="replace")
    with pytest.raises(OperatorError, match="left no nowhere") as caught:
        capture_of(extracting, "nowhere")
    assert caught.value.reason == "capture_missing"

    extracting.client.generate(prompt(9, seed=9), rid="back", max_new_tokens=1)
    assert_equals_hugging_face(extracting, capture_of(extracting, "back"), prompt(9, seed=9))


def test_a_radix_cache_hit_is_an_error_not_a_short_row(servers: Servers, tmp_path: Path) -> None:
    """A server whose cache was left on (an operator's own flags): the second time, the prefix is not computed."""
    servers.close()
    spec = placed(servers.spec("tiny-llama", "extract"), tmp_path)
    with serving(spec, tmp_path, without=("--disable-radix-cache",)) as server:
        ids = prompt(60, seed=60)
        server.client.generate(ids, rid="first", max_new_tokens=1)
        server.client.generate(ids, rid="second", max_new_tokens=1)
        assert capture_of(server, "first").input_ids_T.tolist() == ids
        with pytest.raises(OperatorError, match="prefix_mismatch") as caught:
            capture_of(server, "second")
    assert caught.value.reason == "capture_failed"
