"""The command line, the environment and the expected flags of every server mode, as tables."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backend.engine.launch import ServerMode, ServerSpec, argv, engine_defaults, environment, expected_flags
from backend.engine.launch import version_key as key
from backend.errors import OperatorError, UsageError

SPEC = ServerSpec(
    mode="extract",
    model_path="/models/target",
    host="127.0.0.1",
    port=8000,
    launch_id="e3-0123",
    device="cuda",
    tp=8,
    dump_dir="/dev/shm/hs/e3-0123",
    layers=(2, 30, 58),
)
DRAFTING = replace(SPEC, mode="serve+draft", draft_path="/drafts/new", dump_dir=None, layers=(), spec_draft_tokens=6)


def flags(spec: ServerSpec) -> dict[str, str | None]:
    """Flag → value (None for a switch); a flag given twice is an error of the launch."""
    words = argv("python", spec)[3:]
    found: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in found, f"{word} is given twice"
            found[word] = None if after.startswith("--") else after
    return found


def test_extraction_runs_python_in_every_forward_pass_and_computes_every_token() -> None:
    found = flags(SPEC)
    assert "--disable-cuda-graph" in found
    assert "--disable-radix-cache" in found
    assert found["--tp-size"] == "8"


@pytest.mark.parametrize("mode", ["serve", "regenerate"])
def test_serving_keeps_the_engines_graphs_and_cache(mode: ServerMode) -> None:
    found = flags(replace(SPEC, mode=mode))
    assert not {"--disable-cuda-graph", "--disable-radix-cache", "--speculative-algorithm"} & set(found)


@pytest.mark.parametrize("mode", ["extract", "serve", "serve+draft", "regenerate"])
def test_every_launch_carries_its_id_and_no_flag_twice(mode: ServerMode) -> None:
    for device in ("cpu", "cuda"):
        assert flags(replace(DRAFTING, mode=mode, device=device))["--weight-version"] == "e3-0123"


def test_a_draft_comes_with_all_of_its_numbers() -> None:
    """SGLang asserts that the others are unset where the steps are."""
    found = flags(DRAFTING)
    assert found["--speculative-algorithm"] == "EAGLE3"
    assert found["--speculative-draft-model-path"] == "/drafts/new"
    assert (found["--speculative-num-steps"], found["--speculative-eagle-topk"]) == ("3", "1")
    assert found["--speculative-num-draft-tokens"] == "6"


def test_what_is_not_set_is_left_to_the_engine_and_said_so() -> None:
    spec = replace(SPEC, dtype="bfloat16", chunked_prefill=8192)
    assert flags(spec)["--chunked-prefill-size"] == "8192"
    assert set(engine_defaults(spec)) == {
        "--attention-backend",
        "--mem-fraction-static",
        "--max-total-tokens",
        "--max-running-requests",
        "--context-length",
    }
    assert not set(engine_defaults(spec)) & set(flags(spec))


def test_the_operators_own_arguments_come_last() -> None:
    assert argv("python", replace(SPEC, extra_args=("--ep-size", "8")))[-2:] == ["--ep-size", "8"]


def test_the_command_is_a_list_for_the_given_interpreter() -> None:
    assert argv("/venv/bin/python", SPEC)[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]


def test_a_port_that_sglang_would_die_of_is_refused_before_the_launch() -> None:
    assert flags(replace(SPEC, port=55535))["--port"] == "55535"
    with pytest.raises(UsageError, match="55536"):
        argv("python", replace(SPEC, port=55536))
    assert argv("python", replace(SPEC, port=60000, env={"SGLANG_GRPC_PORT": "7000"}))


def test_capture_variables_are_set_for_extraction_alone(tmp_path: Path) -> None:
    env = environment(SPEC, Path("/plugin"), tmp_path)
    assert env == {
        "SGLANG_HS_DUMP_DIR": "/dev/shm/hs/e3-0123",
        "SGLANG_HS_DUMP_LAYERS": "2,30,58",
        "SGLANG_PLUGINS": "eagle3_capture",
        "EAGLE3_LAUNCH_ID": "e3-0123",
        "PYTHONPATH": "/plugin",
    }
    assert environment(DRAFTING, Path("/plugin"), tmp_path) == {}


def test_the_operators_paths_and_plugins_stay(tmp_path: Path) -> None:
    own = {"PYTHONPATH": "/own", "SGLANG_PLUGINS": "theirs", "NCCL_ALGO": "Ring"}
    env = environment(replace(SPEC, env=own), Path("/plugin"), tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep) == ["/plugin", "/own"]
    assert env["SGLANG_PLUGINS"] == "theirs,eagle3_capture"
    assert env["NCCL_ALGO"] == "Ring"


@pytest.mark.parametrize(
    "mode, backend, resolved, interpreted",
    [
        ("extract", None, "torch_native", False),
        ("serve", None, "torch_native", False),
        ("serve+draft", None, "triton", True),
        ("serve", "triton", "triton", True),
    ],
)
def test_the_cpu_mode_interprets_triton_exactly_where_it_is_used(
    tmp_path: Path, mode: ServerMode, backend: str | None, resolved: str, interpreted: bool
) -> None:
    spec = replace(DRAFTING, mode=mode, device="cpu", attention_backend=backend)
    env = environment(spec, Path("/plugin"), tmp_path)
    assert flags(spec)["--attention-backend"] == resolved
    assert expected_flags(spec)["attention_backend"] == resolved
    assert ("TRITON_INTERPRET" in env) is interpreted
    assert Path(env["PYTHONPATH"].split(os.pathsep)[-1], "sitecustomize.py").is_file()
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    "version, graphs",
    [
        ("0.5.9", {"disable_cuda_graph": True}),
        ("0.5.12.post1", {"disable_cuda_graph": True}),
        ("0.5.14", {"cuda_graph_config.decode.backend": "disabled", "cuda_graph_config.prefill.backend": "disabled"}),
        ("0.5.23", {"cuda_graph_config.decode.backend": "disabled", "cuda_graph_config.prefill.backend": "disabled"}),
    ],
)
def test_graphs_off_is_read_where_this_version_shows_it(version: str, graphs: dict[str, object]) -> None:
    expected = expected_flags(SPEC, version)
    assert {name: expected[name] for name in expected if "graph" in name} == graphs
    assert expected["disable_radix_cache"] is True


def test_an_unknown_old_version_is_refused_by_name() -> None:
    with pytest.raises(OperatorError, match=r"0\.4\.6") as caught:
        expected_flags(SPEC, "0.4.6")
    assert caught.value.reason == "bad_version"
    with pytest.raises(OperatorError, match="main"):
        expected_flags(SPEC, "main")


@pytest.mark.parametrize("older, newer", [("0.5.9", "0.5.10.post1"), ("0.5.14", "0.5.23"), ("0.5.23", "0.6.0rc1")])
def test_versions_compare_by_number_not_by_text(older: str, newer: str) -> None:
    assert key(older) < key(newer)


def test_a_draft_is_expected_exactly_where_it_was_asked_for() -> None:
    drafting = expected_flags(DRAFTING)
    assert drafting["speculative_algorithm"] == "EAGLE3"
    assert drafting["speculative_draft_model_path"] == "/drafts/new"
    assert drafting["speculative_num_draft_tokens"] == 6
    for mode in ("extract", "serve", "regenerate"):
        assert expected_flags(replace(DRAFTING, mode=mode))["speculative_algorithm"] is None


def test_the_cpu_mode_refuses_an_sglang_whose_insides_it_does_not_know(tmp_path: Path) -> None:
    """Functions of another version could silently do nothing; and Python goes on after errors in sitecustomize."""
    for version, code in (("0.5.14", 0), ("0.5.99", 1)):
        info = tmp_path / version / f"sglang-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        env = environment(replace(SPEC, mode="serve", device="cpu"), Path("/plugin"), tmp_path)
        path = os.pathsep.join([str(info.parent), env["PYTHONPATH"]])
        ran = subprocess.run(
            [sys.executable, "-c", "import sgl_kernel; print(sgl_kernel.anything)"],
            env={**os.environ, **env, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stderr
        assert ("not with 0.5.99" in ran.stderr) is (code == 1)
