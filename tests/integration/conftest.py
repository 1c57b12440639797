"""Real SGLang servers on the CPU for the integration tests: one at a time, kept while the same one is asked for."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from backend.engine.launch import ServerMode, ServerSpec, expected_flags
from tests import sglang_models
from tests.servers import RunningServer, free_port, serving

MODELS: dict[str, Callable[[Path], Path]] = {
    "tiny-llama": sglang_models.tiny_llama,
    "tiny-deepseek-v3": sglang_models.tiny_deepseek_v3,
}
CHUNK = 128
"""Prefill chunk of the test servers: longer prompts come in pieces."""
GREEDY_TOKENS = 24
GREEDY_PROMPTS = tuple(tuple(sglang_models.prompt(length, seed=length)) for length in (5, 17, 64, 150))


def placed(spec: ServerSpec, folder: Path) -> ServerSpec:
    """The spec with a free port, a launch id of its own and, where it captures, a dump folder."""
    dump = str(folder / "dump") if spec.mode == "extract" else None
    return replace(spec, port=free_port(), launch_id=f"test-{secrets.token_hex(4)}", dump_dir=dump)


def assert_flags_as_asked(server: RunningServer) -> None:
    """Every expected flag is in `/server_info` of this SGLang, with the value that was asked for."""
    info = server.client.server_info()
    for name, wanted in expected_flags(server.spec, info["version"]).items():
        found = info
        for part in name.split("."):
            found = found[part]
        assert found == wanted, name


class Servers:
    """Lends servers of tiny models. Asking for another one ends the one before: the machine is small."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._lent: RunningServer | None = None
        self._wanted: ServerSpec | None = None
        self._count = 0
        self._greedy: dict[str, list[tuple[int, ...]]] = {}

    def model(self, name: str) -> Path:
        """Folder of a tiny target."""
        return MODELS[name](self._folder / "models" / name)

    def spec(
        self,
        model: str,
        mode: ServerMode,
        *,
        draft: Path | None = None,
        topk: int = 1,
        draft_tokens: int = 4,
        env: Mapping[str, str] | None = None,
    ) -> ServerSpec:
        """A launch of this model in this mode, float32; port, launch id and dump folder are still open."""
        return ServerSpec(
            mode=mode,
            model_path=str(self.model(model)),
            host="127.0.0.1",
            port=0,
            launch_id="",
            device="cpu",
            dtype="float32",
            mem_fraction=0.1,
            max_total_tokens=8192,
            max_running_requests=8,
            chunked_prefill=CHUNK,
            draft_path=str(draft) if draft else None,
            spec_topk=topk,
            spec_draft_tokens=draft_tokens,
            env=env or {},
        )

    def lend(self, wanted: ServerSpec) -> RunningServer:
        """A healthy server of this spec: the one that runs if it is the same, else a new one in its place."""
        if self._lent is None or self._wanted != wanted:
            self.close()
            self._count += 1
            folder = self._folder / f"server-{self._count}"
            self._lent = self._stack.enter_context(serving(placed(wanted, folder), folder))
            self._wanted = wanted
        return self._lent

    def greedy(self, model: str) -> list[tuple[int, ...]]:
        """Answers of a plain server, without capture and draft, to `GREEDY_PROMPTS`."""
        if model not in self._greedy:
            client = self.lend(self.spec(model, "serve")).client
            replies = [client.generate(ids, max_new_tokens=GREEDY_TOKENS) for ids in GREEDY_PROMPTS]
            self._greedy[model] = [reply.output_ids for reply in replies]
        return self._greedy[model]

    def close(self) -> None:
        """End the server that is lent."""
        self._lent = None
        self._stack.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The lender of this test session."""
    lender = Servers(tmp_path_factory.mktemp("sglang"))
    yield lender
    lender.close()


@pytest.fixture(scope="session", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> str:
    """Each tiny target in turn; tests of one module run model by model, so that servers are not restarted."""
    return str(request.param)
