"""Disk, purge and references: what fits only after a purge is said, nothing is counted twice, and no store that
somebody will need again is offered for deletion."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.agent import host
from backend.agent.host import DiskSpace
from backend.config import Config
from backend.report import Check, Silent
from backend.resolve import load
from backend.runs import allow
from backend.runs.allow import add_root
from backend.runs.audit import AuditLog
from backend.runs.deletion import DeletePlan, apply_delete
from backend.runs.layout import Home, Pipeline
from backend.runs.marker import MARKER
from backend.stages import preflight
from backend.stages.base import Product, StageContext
from backend.stages.disk import own_bytes, volumes
from backend.stages.extract import engine_identity, identity_of, numerics, store_path
from backend.stages.figures import GB
from backend.stages.merge import Merge
from backend.stages.purge import Purge, stores
from backend.stages.references import stores_in_use
from tests.sglang_models import tiny_llama
from tests.unit.store_support import build, identity

Disk = Callable[[int], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def ctx(tmp_path: Path, model: Path) -> StageContext:
    """A plan whose merge is known (1,000 tokens), with an allowed, empty store root."""
    config = load(profile="kimi-k2.5", environ={"HOME": str(tmp_path)}, cwd=tmp_path).config.model_dump()
    config["host"] |= {"work": str(tmp_path), "device": "cpu"}
    config["target"] |= {"name": "tiny", "model": str(model)}
    config["data"] |= {"out": "data", "expected_tokens": 1_000_000}
    config["store"] |= {"root": "store", "reserve_gb": 0.0}
    config["train"] |= {"out": "train"}
    merged = Product("merge", "f", {"records": 3, "tokens": 1_000_000, "digest": "d" * 32}, {}, tmp_path)
    (tmp_path / "store").mkdir()
    home = Home(tmp_path / "state").create()
    add_root(home.allow, tmp_path / "store")
    return StageContext(Config.model_validate(config), "python", home, {"merge": merged}, Silent())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Every file system says that so many bytes are free: a disk that is really full would fail other tests."""

    def free(size: int) -> None:
        monkeypatch.setattr(host, "disk_space", lambda path: DiskSpace(str(path), 10**15, size, -1, "ext4"))

    return free


def old_store(ctx: StageContext, name: str = "old") -> Path:
    root = ctx.path("store") / name
    build(root, 40, identity(revision=name))
    return root


def test_a_disk_full_of_older_stores_is_left_to_the_purge_stage_with_the_flag_it_needs(
    ctx: StageContext, disk: Disk
) -> None:
    old = old_store(ctx)
    disk(volumes(ctx)[0].needed - 4096)
    check = preflight.check_disk(ctx)[0]
    plan = Purge().plan(ctx)
    (item,) = plan.destructive
    assert item["path"] == str(old) and not plan.optional, "the run cannot go on without it: it must ask"
    assert check.ok is None and f"--allow purge={item['sha']}" in check.evidence
    unmerged = replace(ctx, products={})
    disk(volumes(unmerged)[0].needed - 4096)
    check = preflight.check_disk(unmerged)[0]
    assert check.ok is None and "after merge" in check.evidence and "--allow" not in check.evidence


def test_a_disk_that_no_purge_makes_large_enough_fails_with_what_stands_in_the_way(
    ctx: StageContext, disk: Disk
) -> None:
    old = old_store(ctx)
    copied = ctx.path("store") / "copied"
    shutil.copytree(old, copied)
    disk(0)
    check = preflight.check_disk(ctx)[0]
    assert check.ok is False and f"cannot be deleted: {copied}" in check.fix


def test_where_both_fit_the_purge_is_optional_and_nothing_is_looked_at(ctx: StageContext, disk: Disk) -> None:
    old_store(ctx)
    disk(10**14)
    assert preflight.check_disk(ctx)[0].ok is True and Purge().plan(ctx).optional


def test_what_stands_in_the_own_store_and_what_is_finished_is_not_budgeted_again(ctx: StageContext) -> None:
    before = volumes(ctx)[0].parts
    assert before["data"] == 0, "merge has run"
    build(store_path(ctx, identity_of(ctx)), 40, identity())
    assert own_bytes(ctx) > 40 * 4096
    assert volumes(ctx)[0].parts["store"] == before["store"] - own_bytes(ctx)
    made = {name: Product(name, "f", {}, {}, ctx.home.path) for name in ("extract", "train")}
    assert volumes(replace(ctx, products={**ctx.products, **made}))[0].needed == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_each_file_system_is_checked_once_with_what_goes_there(ctx: StageContext) -> None:
    config = ctx.config.model_dump()
    config["train"]["out"] = f"/dev/shm/eagle3-no-such-folder-{os.getpid()}"
    ctx = replace(ctx, config=Config.model_validate(config))
    first, second = volumes(ctx)
    assert (list(first.parts), list(second.parts)) == (["store", "data"], ["checkpoints"])
    names = [check.name for check in preflight.check_disk(ctx)]
    assert names.count("disk") == names.count("disk for checkpoints") == 1


def test_trash_is_no_store_and_counts_as_space_to_come(ctx: StageContext, disk: Disk) -> None:
    other = old_store(ctx, "other")
    plan = Purge().plan(ctx)
    trashed = apply_delete(
        DeletePlan.from_json(plan.destructive[0]),
        str(plan.destructive[0]["sha"]),
        allow.load(ctx.home.allow),
        references=(),
        audit=AuditLog(ctx.home.audit),
        who="t",
    )
    assert (trashed.path / MARKER).exists() and not other.exists()
    kept_on = old_store(ctx, "kept-on")
    assert stores(ctx) == [kept_on], "the marker in trash must not make every later purge a refusal"
    assert [item["path"] for item in Purge().plan(ctx).destructive] == [str(kept_on)]
    disk(volumes(ctx)[0].needed - 4096)
    check = preflight.check_disk(ctx)[0]
    assert check.ok is None and "once the trash is freed" in check.evidence and Purge().plan(ctx).optional


def test_one_store_that_cannot_be_deleted_does_not_hide_the_others(ctx: StageContext) -> None:
    old = old_store(ctx)
    copied = ctx.path("store") / "copied"
    shutil.copytree(old, copied)
    plan = Purge().plan(ctx)
    assert [item["path"] for item in plan.destructive] == [str(old)]
    assert any(line.startswith(f"cannot be deleted: {copied}") for line in plan.lines)


def ended(attempt: Path, code: int = 0) -> None:
    """An attempt that came to its end with this code."""
    attempt.mkdir(parents=True, exist_ok=True)
    record = {"code": code, "signal": None, "stopped": False, "t0": 1.0, "t1": 2.0, "log_bytes": 0, "escaped": []}
    (attempt / "exit.json").write_text(json.dumps(record))


def extracted(home: Home, name: str, store: Path) -> Pipeline:
    """A pipeline whose extract succeeded."""
    pipeline = home.pipeline(name).create()
    attempt = pipeline.new_attempt("extract", 8).path
    (attempt / "store.json").write_text(json.dumps({"store": str(store)}))
    ended(attempt)
    return pipeline


@pytest.mark.parametrize(
    ("pilots", "needed"), [([], False), ([0], False), ([1], True), ([0, 4], True), ([4, 0], False)]
)
def test_the_store_of_a_pipeline_that_has_not_come_to_its_end_is_kept(
    ctx: StageContext, pilots: list[int], needed: bool
) -> None:
    old = old_store(ctx)
    pipeline = extracted(ctx.home, "P1", old)
    for number, code in enumerate(pilots, 1):
        ended(pipeline.path / "pilot" / "attempts" / str(number), code)
    assert (str(old) in stores_in_use(ctx.home)) is needed
    plan = Purge().plan(ctx)
    assert bool(plan.destructive) is not needed
    assert any(line.startswith(f"kept {old}") for line in plan.lines) is needed
    assert str(old) not in stores_in_use(ctx.home, beside=pipeline.path)


def test_a_store_that_an_unfinished_pipeline_only_reads_is_kept_before_train_has_begun(ctx: StageContext) -> None:
    pipeline = ctx.home.pipeline("P2").create()
    first: dict[str, Any] = {"products": {"extract": {"outputs": {"store": "/s/1"}}}}
    (pipeline.new_attempt("preflight", 1).path / "input.json").write_text(json.dumps(first))
    assert stores_in_use(ctx.home) == {}, "a pipeline without a pilot: only its extract and train speak"
    ended(pipeline.path / "pilot" / "attempts" / "1", 4)
    assert list(stores_in_use(ctx.home)) == ["/s/1"]


def test_server_settings_that_change_numbers_change_the_stores_identity(ctx: StageContext) -> None:
    def engine(**server: Any) -> str:
        config = ctx.config.model_dump()
        config["server"] |= {"extra_args": [], "env": {}, "dtype": None, **server}
        return engine_identity("sglang 0.5.14", numerics(replace(ctx, config=Config.model_validate(config))))

    assert engine() == "sglang 0.5.14 cpu auto"
    assert engine(dtype="bfloat16") == "sglang 0.5.14 cpu bfloat16"
    assert engine(env={"NCCL_ALGO": "Ring"}) == engine()
    changed = {
        engine(extra_args=["--quantization", "fp8"]),
        engine(env={"SGLANG_X": "1"}),
        engine(env={"SGLANG_X": "2"}),
    }
    assert len(changed) == 3 and all(name.startswith("sglang 0.5.14 cpu auto+") for name in changed)


def test_a_merge_that_holds_out_too_little_fails_there_and_not_hours_later_in_bench(ctx: StageContext) -> None:
    source = ctx.path("own.jsonl")
    talks = [[{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"a {i}"}] for i in range(20)]
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    config = ctx.config.model_dump()
    config["target"]["trust_remote_code"] = False
    config["data"] |= {"sources": [{"name": "own", "paths": [str(source)], "on_policy": True}], "heldout_share": 0.5}
    attempt = ctx.home.pipeline("P1").create().new_attempt("merge", 2).path
    (attempt / "input.json").write_text(json.dumps({"fingerprint": "f" * 12}))
    ctx = replace(ctx, config=Config.model_validate(config), products={}, attempt=attempt)
    outputs = Merge().run(ctx)
    there = outputs["splits"]["heldout"]
    assert 0 < there < 20

    def verdict(prompts: int) -> Check:
        wanted = config | {"bench": config["bench"] | {"prompts": prompts}}
        return Merge().verify(replace(ctx, config=Config.model_validate(wanted)), outputs)[-1]

    assert verdict(there).ok is True and verdict(there + 1).ok is False
    assert all(word in verdict(there + 1).fix for word in ("heldout_share", "on_policy", "[bench] prompts"))


def test_the_reserve_counts_on_every_file_system(ctx: StageContext, disk: Disk) -> None:
    config = ctx.config.model_dump()
    config["store"]["reserve_gb"] = 5.0
    disk(volumes(ctx)[0].needed + 4 * GB)
    assert not volumes(replace(ctx, config=Config.model_validate(config)))[0].fits()
