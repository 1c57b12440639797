"""What the plan promises: the reference run's numbers and command; and checks that name thing, value and fix."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from backend.config import Config
from backend.engine.launch import argv, environment, expected_flags
from backend.errors import OperatorError
from backend.report import Silent
from backend.resolve import load
from backend.runs.layout import Home
from backend.stages import preflight
from backend.stages.base import Product, StageContext
from backend.stages.extract import Extract
from backend.stages.figures import disk_budget, scheme_bytes, target_figures, token_figures
from backend.stages.preflight import Preflight
from backend.stages.registry import STAGES, stage_names
from backend.stages.server import spec_of


def context(tmp_path: Path, profile: str = "kimi-k2.5", **sections: dict[str, object]) -> StageContext:
    config = load(profile=profile, environ={"HOME": str(tmp_path)}, cwd=tmp_path).config.model_dump()
    for name, values in sections.items():
        config[name] |= values
    return StageContext(Config.model_validate(config), "python", Home(tmp_path / "state").create(), {}, Silent())


def test_the_stages_are_those_of_the_reference_run_in_order() -> None:
    wanted = "preflight merge purge patch stop launch gate extract train deploy bench"
    assert stage_names() == wanted.split()


def test_every_need_comes_before_the_stage_that_reads_it() -> None:
    names = stage_names()
    for stage in STAGES:
        assert all(names.index(need) < names.index(stage.name) for need in stage.needs)
        assert all(names.index(served) != names.index(stage.name) for served in stage.serves)


def test_the_kimi_plan_has_the_reference_runs_bytes(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    figures = target_figures(ctx)
    assert token_figures(ctx).tokens == 87_800_000
    assert scheme_bytes(figures, "bf16") == 57_344
    assert scheme_bytes(figures, "aux8") == 35_852
    assert disk_budget(ctx).store == 87_800_000 * 57_344
    told = " ".join(Extract().plan(ctx).lines)
    assert (
        "bf16 5,034.80 GB (chosen)" in told
        and "aux8 3,147.81 GB" in told
        and "fp8 (not offered yet) 2,518.81 GB" in told
    )


def test_the_kimi_launch_is_the_reference_runs_command_and_environment(tmp_path: Path) -> None:
    spec = spec_of(context(tmp_path), "extract", "e3-1")
    command = " ".join(argv("python", spec))
    for flags in ("--port 8000", "--tp-size 8", "--disable-cuda-graph", "--disable-radix-cache", "--trust-remote-code"):
        assert flags in command
    env = environment(spec, tmp_path / "plugin", tmp_path)
    assert env["SGLANG_HS_DUMP_DIR"] == "/dev/shm/sglang_hs/e3-1"
    assert env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    assert (env["NCCL_PROTO"], env["NCCL_ALGO"], env["NCCL_P2P_LEVEL"]) == ("LL", "Ring", "SYS")
    assert env["SGLANG_HS_DUMP_LAYERS"] == "2,30,58"
    assert "SGLANG_USE_CPU_ENGINE" not in env, "the CPU mode must never reach a GPU host"


def test_each_mode_expects_what_it_asked_for(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    extract = expected_flags(spec_of(ctx, "extract", "e3-1"))
    assert extract["disable_radix_cache"] is True and extract["speculative_algorithm"] is None
    assert extract["cuda_graph_config.decode.backend"] == "disabled"
    draft = expected_flags(spec_of(ctx, "serve+draft", "e3-2", Path("/drafts/1")))
    assert draft["speculative_draft_model_path"] == "/drafts/1" and draft["speculative_num_steps"] == 3
    assert "disable_radix_cache" not in draft, "serving keeps the engine's prefix cache"


def test_preflight_makes_every_check_before_it_fails(tmp_path: Path) -> None:
    with pytest.raises(OperatorError) as error:
        Preflight().run(context(tmp_path))
    assert error.value.code == 6
    for words in ("has no config.json", "A2_kimik25", "8 wanted, 0 seen"):
        assert words in error.value.what
    assert 'set [host] device = "cpu"' in error.value.fix


def test_a_taken_port_is_named_with_pid_and_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ctx = context(tmp_path, server={"port": server.getsockname()[1]})
        (check,) = preflight.check_port(ctx)
    assert check.ok is False
    assert f"pid {os.getpid()}" in check.evidence and "running since" in check.evidence
    assert "set [server] port" in check.fix


def test_a_disk_that_cannot_hold_the_store_is_refused_with_the_sum(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    disk = preflight.check_disk(ctx)[0]
    assert disk.ok is False
    assert "store 5,034.80" in disk.evidence and "kept in reserve" in disk.evidence and "aux8" in disk.fix


def test_merged_tokens_replace_the_configs_expectation(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    merged = Product("merge", "f", {"records": 3, "tokens": 1000}, {}, tmp_path)
    counted = token_figures(replace(ctx, products={"merge": merged}))
    assert (counted.records, counted.tokens, counted.source) == (3, 1000, "counted by merge")
