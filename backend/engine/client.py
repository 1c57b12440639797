"""HTTP client of an SGLang server: the few endpoints that this project uses, typed, with errors for operators.

Owns the wire format of `/generate`, `/health`, `/server_info` and `/model_info` (SGLang 0.5.14; the newest versions
answer alike). One parser for the blocking and the asynchronous client. Knows nothing of why a request is made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from backend.errors import OperatorError

HEALTH_TIMEOUT_S = 25.0
"""Above the 20 s after which SGLang answers 503 by itself (`SGLANG_HEALTH_CHECK_TIMEOUT`)."""
GENERATE_TIMEOUT_S = 1800.0
"""A long prompt behind a full queue may take this long; a dead server is noticed by its closed connection."""


@dataclass(frozen=True)
class HealthReply:
    """One probe. `code` is None where no HTTP answer came; `error` then says why."""

    code: int | None
    latency_s: float
    error: str = ""


@dataclass(frozen=True)
class Reply:
    """One generated answer. The `spec_` fields are None where the server does not speculate."""

    output_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    weight_version: str
    spec_verify_ct: int | None
    spec_accept_length: float | None
    input_token_logprobs: tuple[float | None, ...] | None
    """Log-probability of each prompt token given those before it; None for the first one."""


def request_body(
    input_ids: Sequence[int],
    *,
    rid: str | None,
    max_new_tokens: int,
    temperature: float,
    return_logprob: bool,
) -> dict[str, Any]:
    """The JSON of one `/generate` request."""
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": temperature},
    }
    if rid is not None:
        body["rid"] = rid
    if return_logprob:
        body |= {"return_logprob": True, "logprob_start_len": 0}
    return body


def parse_reply(data: Mapping[str, Any]) -> Reply:
    """One `/generate` answer.

    Raises:
        OperatorError: `bad_reply`, a field is missing or is not what it should be.
    """
    try:
        meta = data["meta_info"]
        logprobs = meta.get("input_token_logprobs")
        return Reply(
            output_ids=tuple(data["output_ids"]),
            text=str(data.get("text", "")),
            prompt_tokens=int(meta["prompt_tokens"]),
            completion_tokens=int(meta["completion_tokens"]),
            finish_reason=str((meta.get("finish_reason") or {}).get("type", "")),
            weight_version=str(meta.get("weight_version", "")),
            spec_verify_ct=meta.get("spec_verify_ct"),
            spec_accept_length=meta.get("spec_accept_length"),
            input_token_logprobs=None if logprobs is None else tuple(entry[0] for entry in logprobs),
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise OperatorError(
            f"the server's answer is not SGLang's: {type(error).__name__}: {error}",
            fix="something else answers on this port: see the gate's listener",
            reason="bad_reply",
        ) from error


def _failure(url: str, error: httpx.HTTPError) -> OperatorError:
    if isinstance(error, httpx.HTTPStatusError):
        text = error.response.text[:300]
        return OperatorError(
            f"{url} answered {error.response.status_code}: {text}",
            fix="change what the answer names; the server's log says more",
            reason="server_refused",
        )
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return OperatorError(f"{url} does not answer: {what}", fix="look at the server's log", reason="server_unreachable")


def _json(response: httpx.Response) -> Any:
    response.raise_for_status()
    try:
        return response.json()
    except ValueError as error:
        raise OperatorError(
            f"{response.url} answered {len(response.content)} bytes that are not JSON",
            fix="something else answers on this port: see the gate's listener",
            reason="bad_reply",
        ) from error


class SGLangClient:
    """Blocking client; safe to share between threads. Use as a context manager."""

    def __init__(self, base_url: str, timeout_s: float = GENERATE_TIMEOUT_S) -> None:
        # Loopback must never be sent through a proxy that the environment names.
        self._http = httpx.Client(base_url=base_url, timeout=timeout_s, trust_env=False)

    def health(self, timeout_s: float = HEALTH_TIMEOUT_S) -> HealthReply:
        """Probe `/health` once. Note that SGLang generates one token for it. Raises nothing."""
        began = time.monotonic()
        try:
            code = self._http.get("/health", timeout=timeout_s).status_code
        except httpx.HTTPError as error:
            return HealthReply(None, time.monotonic() - began, f"{type(error).__name__}: {error}".rstrip(": "))
        return HealthReply(code, time.monotonic() - began)

    def server_info(self) -> dict[str, Any]:
        """Every server argument after resolution."""
        return self._get("/server_info")

    def model_info(self) -> dict[str, Any]:
        """Model path, weight version (our launch id) and type."""
        return self._get("/model_info")

    def generate(
        self,
        input_ids: Sequence[int],
        *,
        rid: str | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        return_logprob: bool = False,
    ) -> Reply:
        """Answer one prompt.

        Raises:
            OperatorError: `server_unreachable`, `server_refused`, `bad_reply`.
        """
        body = request_body(
            input_ids, rid=rid, max_new_tokens=max_new_tokens, temperature=temperature, return_logprob=return_logprob
        )
        try:
            return parse_reply(_json(self._http.post("/generate", json=body)))
        except httpx.HTTPError as error:
            raise _failure("/generate", error) from error

    def _get(self, path: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = _json(self._http.get(path, timeout=HEALTH_TIMEOUT_S))
        except httpx.HTTPError as error:
            raise _failure(path, error) from error
        if not isinstance(found, dict):
            raise OperatorError(f"{path} answered {type(found).__name__}, not an object", reason="bad_reply")
        return found

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncSGLangClient:
    """The extractor's client: many requests in flight over as many connections. Use as an async context manager."""

    def __init__(self, base_url: str, timeout_s: float = GENERATE_TIMEOUT_S) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits, trust_env=False)

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        rid: str | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        return_logprob: bool = False,
    ) -> Reply:
        """As `SGLangClient.generate`."""
        body = request_body(
            input_ids, rid=rid, max_new_tokens=max_new_tokens, temperature=temperature, return_logprob=return_logprob
        )
        try:
            return parse_reply(_json(await self._http.post("/generate", json=body)))
        except httpx.HTTPError as error:
            raise _failure("/generate", error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
