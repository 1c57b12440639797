"""EAGLE-3 decoding in the CPU mode: its output is plain greedy output, token for token, and it really drafts.

Failures prevented: an operation of the CPU mode that silently does nothing, wrong positions or cache slots after an
accepted or a rejected token, drafts of one request verified against another, a server that runs without its draft.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from backend.engine.capture import plugin_dir
from backend.engine.client import AsyncSGLangClient, Reply
from tests.integration.conftest import GREEDY_PROMPTS, GREEDY_TOKENS, Servers, assert_flags_as_asked, placed
from tests.servers import RunningServer, serving
from tests.sglang_models import fitted_draft, tiny_draft

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LOGGED = {"EAGLE3_CPU_LOG_TRITON": "1"}


def lend(servers: Servers, model: str, draft: str, topk: int, draft_tokens: int) -> RunningServer:
    folder = servers.model(model).with_name(f"{model}-{draft}")
    if draft == "fitted":
        fitted_draft(folder, servers.model(model), GREEDY_PROMPTS, GREEDY_TOKENS)
    else:
        tiny_draft(folder)
    spec = servers.spec(model, "serve+draft", draft=folder, topk=topk, draft_tokens=draft_tokens, env=LOGGED)
    return servers.lend(spec)


def together(server: RunningServer) -> list[Reply]:
    """All prompts in flight at once."""

    async def ask() -> list[Reply]:
        async with AsyncSGLangClient(f"http://127.0.0.1:{server.spec.port}") as client:
            return await asyncio.gather(*(client.generate(ids, max_new_tokens=GREEDY_TOKENS) for ids in GREEDY_PROMPTS))

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "model, draft, topk, draft_tokens, least, most",
    [
        ("tiny-llama", "untrained", 1, 4, 1.0, 1.2),
        ("tiny-llama", "fitted", 1, 4, 1.3, 4.0),
        ("tiny-deepseek-v3", "fitted", 4, 8, 1.3, 4.0),
    ],
)
def test_speculative_output_is_plain_greedy_output(
    servers: Servers, model: str, draft: str, topk: int, draft_tokens: int, least: float, most: float
) -> None:
    greedy = servers.greedy(model)
    server = lend(servers, model, draft, topk, draft_tokens)
    assert_flags_as_asked(server)

    single = [server.client.generate(ids, max_new_tokens=GREEDY_TOKENS) for ids in GREEDY_PROMPTS]
    assert [reply.output_ids for reply in single] == greedy
    assert [reply.output_ids for reply in together(server)] == greedy

    assert all(reply.spec_verify_ct for reply in single)
    tokens, steps = sum(r.completion_tokens for r in single), sum(r.spec_verify_ct or 0 for r in single)
    assert least <= tokens / steps <= most
    for reply in single:
        assert reply.spec_accept_length == pytest.approx(reply.completion_tokens / (reply.spec_verify_ct or 0))
    interpreted = [
        line for line in server.log.read_text(errors="replace").splitlines() if "interpreted Triton kernel" in line
    ]
    assert interpreted == [], "a kernel without a replacement makes a step many times slower"


def test_a_server_that_speculates_refuses_to_capture(servers: Servers, tmp_path: Path) -> None:
    """The states that the sink takes are the draft's input: with both, the draft would draft from nothing."""
    servers.close()
    draft = tiny_draft(servers.model("tiny-llama").with_name("tiny-llama-untrained"))
    spec = placed(servers.spec("tiny-llama", "serve+draft", draft=draft), tmp_path)
    env = {"SGLANG_HS_DUMP_DIR": str(tmp_path), "PYTHONPATH": str(plugin_dir(tmp_path))}
    with (
        pytest.raises(AssertionError, match=r"the server is not healthy(.|\n)*it cannot do both"),
        serving(replace(spec, env=env), tmp_path),
    ):
        pass
    assert not list(tmp_path.glob("_live.*"))
