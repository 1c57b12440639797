"""From a server spec to SGLang's command line and environment, and to what `/server_info` must then show.

Pure functions over `ServerSpec`. Owns the modes, the flags, and the flags' renamings between SGLang versions. Starts
nothing and knows nothing of attempts; the CPU mode's own needs are in `cpu.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.engine import cpu
from backend.errors import OperatorError, UsageError

ServerMode = Literal["extract", "serve", "serve+draft", "regenerate"]
PLUGIN = "eagle3_capture"
DRAFT_ALGORITHM = "EAGLE3"


@dataclass(frozen=True)
class ServerSpec:
    """One launch. None = left to the engine. Paths are strings on the host; `layers` are canonical ids."""

    mode: ServerMode
    model_path: str
    host: str
    port: int
    launch_id: str
    device: Literal["cpu", "cuda"]
    tp: int = 1
    dtype: str | None = None
    attention_backend: str | None = None
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill: int | None = None
    context_length: int | None = None
    trust_remote_code: bool = False
    dump_dir: str | None = None
    layers: tuple[int, ...] = ()
    draft_path: str | None = None
    spec_steps: int = 3
    spec_topk: int = 1
    spec_draft_tokens: int = 4
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        """True if this server shall decode with a draft."""
        return self.mode == "serve+draft"


# Spec field → flag; the flags left out of a command are what `plan` shows as engine defaults.
_OPTIONS: tuple[tuple[str, str], ...] = (
    ("dtype", "--dtype"),
    ("attention_backend", "--attention-backend"),
    ("mem_fraction", "--mem-fraction-static"),
    ("max_total_tokens", "--max-total-tokens"),
    ("max_running_requests", "--max-running-requests"),
    ("chunked_prefill", "--chunked-prefill-size"),
    ("context_length", "--context-length"),
)


TESTED_VERSION = "0.5.14"
GRPC_OFFSET = 10_000
"""sglang/srt/server_args.py:2763 of 0.5.14: the gRPC port is port + 10000 unless SGLANG_GRPC_PORT says otherwise."""
HIGHEST_PORT = 65_535 - GRPC_OFFSET

# How /server_info shows that graphs are off, by the first SGLang version that shows it so (of the eight versions from
# 0.5.5.post3 to 0.5.23 that were read). `--disable-cuda-graph` itself is accepted by all eight, deprecated from 0.5.14.
_GRAPHS_OFF: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = (
    ((0, 5, 5), {"disable_cuda_graph": True}),
    ((0, 5, 14), {"cuda_graph_config.decode.backend": "disabled", "cuda_graph_config.prefill.backend": "disabled"}),
)


def version_key(version: str) -> tuple[int, ...]:
    """A version for comparison: "0.5.10.post1" is (0, 5, 10); suffixes do not count."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        raise OperatorError(f"{version!r} is not a version of SGLang", reason="bad_version")
    return tuple(int(part) for part in numbers[0].split("."))


def argv(python: str, spec: ServerSpec) -> list[str]:
    """The command. `--weight-version` carries the launch id: `/model_info` and every reply give it back.

    Raises:
        UsageError: `bad_port`, a port with which SGLang would die after its imports.
    """
    if spec.port > HIGHEST_PORT and "SGLANG_GRPC_PORT" not in spec.env:
        raise UsageError(
            f"SGLang cannot serve on port {spec.port}: it also takes the port + {GRPC_OFFSET} for itself",
            fix=f"set [server] port to {HIGHEST_PORT} or less",
            reason="bad_port",
        )
    command = [python, "-m", "sglang.launch_server", "--model-path", spec.model_path]
    command += ["--host", spec.host, "--port", str(spec.port), "--tp-size", str(spec.tp)]
    command += ["--weight-version", spec.launch_id]
    if spec.trust_remote_code:
        command.append("--trust-remote-code")
    for name, flag in _OPTIONS:
        value = _value(spec, name)
        if value is not None:
            command += [flag, str(value)]
    command += _mode_flags(spec)
    command += cpu.FLAGS if spec.device == "cpu" else []
    return [*command, *spec.extra_args]


def environment(spec: ServerSpec, plugin_dir: Path, unpack_under: Path) -> dict[str, str]:
    """Variables of the server process, beyond what it inherits. The CPU mode is unpacked below `unpack_under`."""
    env = dict(spec.env)
    path = []
    if spec.mode == "extract":
        env |= {
            "SGLANG_HS_DUMP_DIR": spec.dump_dir or "",
            "SGLANG_HS_DUMP_LAYERS": ",".join(map(str, spec.layers)),
            "SGLANG_PLUGINS": _joined(",", spec.env.get("SGLANG_PLUGINS"), PLUGIN),
            "EAGLE3_LAUNCH_ID": spec.launch_id,
        }
        path.append(str(plugin_dir))
    if spec.device == "cpu":
        env |= cpu.environment(str(_value(spec, "attention_backend")))
        path.append(str(cpu.folder(unpack_under)))
    if path:
        env["PYTHONPATH"] = _joined(os.pathsep, *path, spec.env.get("PYTHONPATH"))
    return env


def expected_flags(spec: ServerSpec, version: str = TESTED_VERSION) -> dict[str, Any]:
    """What `/server_info` of this SGLang version must show; dotted keys reach into nested objects."""
    wanted: dict[str, Any] = {
        "model_path": spec.model_path,
        "weight_version": spec.launch_id,
        "tp_size": spec.tp,
        "pp_size": 1,
        "enable_two_batch_overlap": False,
    }
    names = {"mem_fraction": "mem_fraction_static", "chunked_prefill": "chunked_prefill_size"}
    for name, _ in _OPTIONS:
        value = _value(spec, name)
        if value is not None:
            wanted[names.get(name, name)] = value
    if spec.mode == "extract":
        wanted |= {
            "disable_radix_cache": True,
            "enable_mixed_chunk": False,  # decode rows inside a prefill batch would look like chunks
            "speculative_algorithm": None,
            **_graphs_off(version),
        }
    elif spec.speculates:
        wanted |= {
            "speculative_algorithm": DRAFT_ALGORITHM,
            "speculative_draft_model_path": spec.draft_path,
            "speculative_num_steps": spec.spec_steps,
            "speculative_eagle_topk": spec.spec_topk,
            "speculative_num_draft_tokens": spec.spec_draft_tokens,
        }
    else:
        wanted["speculative_algorithm"] = None
    return wanted


def _graphs_off(version: str) -> Mapping[str, Any]:
    shown = [flags for since, flags in _GRAPHS_OFF if since <= version_key(version)]
    if not shown:
        raise OperatorError(
            f"SGLang {version} is older than any version that this console knows",
            fix=f"use SGLang {TESTED_VERSION} or newer",
            reason="bad_version",
        )
    return shown[-1]


def engine_defaults(spec: ServerSpec) -> tuple[str, ...]:
    """Flags that this launch leaves to the engine."""
    return tuple(flag for name, flag in _OPTIONS if _value(spec, name) is None)


def _joined(separator: str, *parts: str | None) -> str:
    """A list variable: ours beside what the operator set."""
    return separator.join(part for part in parts if part)


def _value(spec: ServerSpec, name: str) -> Any:
    """A spec's field; the CPU mode chooses the attention backend where the config does not."""
    value = getattr(spec, name)
    if value is None and name == "attention_backend" and spec.device == "cpu":
        return cpu.attention_backend(speculative=spec.speculates)
    return value


def _mode_flags(spec: ServerSpec) -> list[str]:
    flags = []
    if spec.mode == "extract" or spec.device == "cpu":
        # Python does not run inside a graph's replay, and a cached prefix is not prefilled: both would lose rows. On a
        # CPU there are no graphs, and no prefix cache with the attention backends that work there.
        flags += ["--disable-cuda-graph", "--disable-radix-cache"]
    if spec.speculates:
        flags += [
            *("--speculative-algorithm", DRAFT_ALGORITHM),
            *("--speculative-draft-model-path", spec.draft_path or ""),
            *("--speculative-num-steps", str(spec.spec_steps)),
            *("--speculative-eagle-topk", str(spec.spec_topk)),
            *("--speculative-num-draft-tokens", str(spec.spec_draft_tokens)),
        ]
    return flags
