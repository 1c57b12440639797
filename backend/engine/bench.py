"""One benchmark measurement: prompts through a server at a fixed concurrency, counted per request.

Accept length = completion tokens / verify steps, summed over requests from each reply's `meta_info` (SGLang
`tokenizer_manager.py`; 1.0 = nothing accepted): the server-wide average of `/server_info` spans its whole life.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from backend.engine.client import Reply, SGLangClient
from backend.errors import OperatorError
from backend.report import Reporter


@dataclass(frozen=True)
class Measurement:
    """Sums over all requests. `accept_length` is None where the server does not speculate; times in seconds."""

    concurrency: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    verify_steps: int
    seconds: float
    output_digest: str

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step, bonus token included."""
        return self.completion_tokens / self.verify_steps if self.verify_steps else None

    @property
    def tokens_s(self) -> float:
        """Output tokens per second of wall time."""
        return self.completion_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Plain JSON with the derived figures."""
        return {**asdict(self), "accept_length": self.accept_length, "tokens_s": self.tokens_s}


def measure(
    client: SGLangClient,
    launch_id: str,
    prompts: list[list[int]],
    max_new_tokens: int,
    concurrency: int,
    reporter: Reporter,
) -> Measurement:
    """Answer every prompt greedily, `concurrency` at a time.

    Raises:
        OperatorError: `server_changed` if the server is another one before or after (a benchmark of the wrong server
            is worse than none), or the error of a request.
    """
    _same_server(client, launch_id)
    began = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(client.generate, prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
        for done, _ in enumerate(as_completed(futures), 1):
            reporter.progress(done, len(prompts), "requests")
        replies: list[Reply] = [future.result() for future in futures]
    seconds = time.monotonic() - began
    _same_server(client, launch_id)
    outputs = hashlib.sha256(repr([list(reply.output_ids) for reply in replies]).encode())
    return Measurement(
        concurrency=concurrency,
        requests=len(replies),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        completion_tokens=sum(reply.completion_tokens for reply in replies),
        verify_steps=sum(reply.spec_verify_ct or 0 for reply in replies),
        seconds=seconds,
        output_digest=outputs.hexdigest()[:16],
    )


def _same_server(client: SGLangClient, launch_id: str) -> None:
    found = client.model_info().get("weight_version")
    if found != launch_id:
        raise OperatorError(
            f"the server under measurement is launch {found}, not {launch_id}",
            fix="something else took the port: the result is void, run bench again",
            reason="server_changed",
        )
