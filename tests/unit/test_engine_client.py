"""The client against a real HTTP server on loopback that answers what SGLang answers, or what a liar does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from backend.engine.client import HEALTH_TIMEOUT_S, AsyncSGLangClient, SGLangClient, parse_reply, request_body
from backend.errors import OperatorError

# As SGLang 0.5.14 answers; the second one is of a server with a draft.
PLAIN: dict[str, Any] = {
    "text": " Paris",
    "output_ids": [464, 322],
    "meta_info": {
        "id": "r1",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "weight_version": "e3-1",
        "input_token_logprobs": [[None, 5, None], [-1.5, 6, None], [-0.25, 7, None]],
    },
}
DRAFTED: dict[str, Any] = {
    **PLAIN,
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "weight_version": "e3-1",
        "spec_verify_ct": 1,
        "spec_accept_length": 2.0,
    },
}


class Server:
    """A loopback server whose next answer is set by the test."""

    def __init__(self) -> None:
        self.code = 200
        self.body: bytes = b""
        self.asked: list[tuple[str, Any]] = []
        self.go_on = Event()
        self.go_on.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, body: Any) -> None:
                outer.asked.append((self.path, body))
                outer.go_on.wait()
                self.send_response(outer.code)
                self.send_header("content-length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.go_on.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def client(server: Server) -> Iterator[SGLangClient]:
    with SGLangClient(server.url) as opened:
        yield opened


def test_a_plain_reply_is_read_with_its_logprobs() -> None:
    reply = parse_reply(PLAIN)
    assert (reply.output_ids, reply.text, reply.finish_reason) == ((464, 322), " Paris", "length")
    assert (reply.prompt_tokens, reply.completion_tokens, reply.weight_version) == (3, 2, "e3-1")
    assert reply.input_token_logprobs == (None, -1.5, -0.25)
    assert (reply.spec_verify_ct, reply.spec_accept_length) == (None, None)


def test_a_drafting_server_reports_its_verify_steps() -> None:
    reply = parse_reply(DRAFTED)
    assert (reply.spec_verify_ct, reply.spec_accept_length, reply.finish_reason) == (1, 2.0, "stop")
    assert reply.input_token_logprobs is None


COUNTS = {"prompt_tokens": 1, "completion_tokens": 1}


@pytest.mark.parametrize(
    "broken",
    [
        *({}, [], "ok", None, {"output_ids": [1]}, {"output_ids": None, "meta_info": {}}),
        {"output_ids": [1], "meta_info": {**COUNTS, "prompt_tokens": "many"}},
        {"output_ids": [1], "meta_info": {**COUNTS, "input_token_logprobs": [[]]}},
    ],
)
def test_an_answer_that_is_not_sglangs_is_named_so(broken: Any) -> None:
    with pytest.raises(OperatorError, match="not SGLang's") as caught:
        parse_reply(broken)
    assert caught.value.reason == "bad_reply"


def test_greedy_is_the_default_and_logprobs_cover_the_whole_prompt() -> None:
    body = request_body([1, 2], rid="r", max_new_tokens=4, temperature=0.0, return_logprob=True)
    assert body == {
        "input_ids": [1, 2],
        "rid": "r",
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    assert "rid" not in request_body([1], rid=None, max_new_tokens=1, temperature=0.0, return_logprob=False)


def test_both_clients_send_the_same_request_and_read_the_same_reply(server: Server, client: SGLangClient) -> None:
    server.body = json.dumps(DRAFTED).encode()

    async def ask() -> object:
        async with AsyncSGLangClient(server.url) as other:
            return await other.generate([5, 6, 7], rid="r1", max_new_tokens=2)

    assert asyncio.run(ask()) == client.generate([5, 6, 7], rid="r1", max_new_tokens=2)
    assert server.asked[0] == server.asked[1]
    assert server.asked[0][0] == "/generate"


@pytest.mark.parametrize("code", [200, 503])
def test_health_is_a_code_not_an_exception(server: Server, client: SGLangClient, code: int) -> None:
    server.code = code
    probe = client.health()
    assert (probe.code, probe.error) == (code, "")
    assert probe.latency_s > 0


def test_a_closed_port_is_health_without_a_code() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: a connection is refused, and nobody else gets the port
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with SGLangClient(url) as client:
            probe = client.health()
            assert probe.code is None
            assert "refused" in probe.error
            with pytest.raises(OperatorError, match="does not answer") as caught:
                client.generate([1], max_new_tokens=1)
            assert caught.value.reason == "server_unreachable"


def test_a_server_that_hangs_is_a_health_probe_that_timed_out(server: Server, client: SGLangClient) -> None:
    server.go_on.clear()
    probe = client.health(timeout_s=0.05)
    assert probe.code is None
    assert "Timeout" in probe.error
    assert HEALTH_TIMEOUT_S > 20, "SGLang itself answers 503 after 20 s; a shorter probe never sees it"


def test_a_refusal_carries_the_servers_own_words(server: Server, client: SGLangClient) -> None:
    server.code, server.body = 400, b'{"error": {"message": "The input (9000 tokens) is longer than the context"}}'
    with pytest.raises(OperatorError, match=r"answered 400: .*9000 tokens") as caught:
        client.generate([1], max_new_tokens=1)
    assert caught.value.reason == "server_refused"


@pytest.mark.parametrize("body", [b"<html>It works!</html>", b"[]", b"", b'{"cut'])
def test_another_program_on_the_port_is_not_taken_for_sglang(server: Server, client: SGLangClient, body: bytes) -> None:
    server.body = body
    for call in (client.server_info, client.model_info):
        with pytest.raises(OperatorError) as caught:
            call()
        assert caught.value.reason == "bad_reply"


def test_a_proxy_in_the_environment_is_not_asked_for_loopback(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.body = b"{}"
    with SGLangClient(server.url) as client:
        assert client.server_info() == {}
