"""The main job, end to end, through the command line: real SGLang, a real store, a trained draft, a real benchmark."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.site import Site

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

STAGES = ["preflight", "merge", "purge", "patch", "stop", "launch", "gate", "extract", "train", "deploy", "bench"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, subprocess.CompletedProcess[str]]]:
    """A site after one whole run."""
    site = Site(tmp_path_factory.mktemp("pipeline"))
    try:
        yield site, site.auto()
    finally:
        site.close()


def test_one_command_takes_data_to_a_benchmarked_draft(finished: tuple[Site, subprocess.CompletedProcess[str]]) -> None:
    site, done = finished
    assert done.returncode == 0, done.stderr[-4000:]
    ended = {event.stage: event.d["state"] for event in site.events() if event.ev == "stage_ended"}
    skipped = {event.stage for event in site.events() if event.ev == "stage_skipped"}
    assert [name for name in STAGES if name in ended or name in skipped] == STAGES
    assert set(ended.values()) == {"succeeded"}
    assert skipped == {"purge", "stop"}, "with nothing to purge or stop, both say so instead of running"
    for words in ("accept length", "hidden states", "gate:", "training: loss", "wall time"):
        assert words in done.stdout


def test_every_merged_record_is_in_the_store_and_every_variant_was_measured(
    finished: tuple[Site, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = finished
    assert site.outputs("extract")["records"] == site.outputs("merge")["records"] == 80
    results = site.outputs("bench")["results"]
    assert set(results) == {"trained", "none", "untrained"}
    assert results["none"][0]["accept_length"] is None
    assert results["trained"][0]["verify_steps"] > 0
    digests = {measured[0]["output_digest"] for measured in results.values()}
    assert len(digests) == 1, "speculative greedy output must equal plain greedy output, token for token"


def test_the_exported_draft_loads_into_sglang_with_nothing_missing_or_unknown(
    finished: tuple[Site, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = finished
    assert site.outputs("deploy")["speculation"]["ok"] is True
    log = (site.pipeline.attempts("deploy")[-1].path / "log").read_text(errors="replace")
    assert "not found in params_dict" not in log and "Some weights" not in log


def test_no_server_is_left_and_shared_memory_is_clean(
    finished: tuple[Site, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = finished
    assert not (site.folder / "dump").exists(), "the dump folder of each launch goes with its server"
    status = site.run("status")
    assert status.returncode == 0 and "pilot ✓ done" in status.stdout


def test_a_second_run_of_a_finished_pipeline_starts_nothing(
    finished: tuple[Site, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = finished
    before = [pipeline.id for pipeline in site.home.pipelines()]
    again = site.auto()
    assert again.returncode == 0, again.stderr
    assert "Nothing to do" in again.stderr
    assert [pipeline.id for pipeline in site.home.pipelines()] == before


def test_a_changed_setting_redoes_what_depends_on_it_and_explain_names_it(
    finished: tuple[Site, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = finished
    text = site.config.read_text()
    site.change("lr = 1e-3", "lr = 2e-3")
    try:
        plan = json.loads(site.run("plan", "--output", "json").stdout)
        actions = {stage["name"]: stage["action"] for stage in plan["stages"]}
        assert [name for name in STAGES if actions[name] == "run"] == ["preflight", "stop", "train", "deploy", "bench"]
        explained = site.run("explain", "train")
        assert "own.lr changed: 0.001 → 0.002" in explained.stdout
        assert "done before" in site.run("explain", "extract").stdout
    finally:
        site.config.write_text(text)


def test_a_result_that_was_damaged_meanwhile_is_made_again(
    finished: tuple[Site, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = finished
    draft = Path(site.outputs("train")["draft"]) / "model.safetensors"
    whole = draft.read_bytes()
    draft.write_bytes(whole[:-1])
    try:
        explained = site.run("explain", "train")
        assert "an earlier result no longer verifies" in explained.stdout
    finally:
        draft.write_bytes(whole)
    shard = next(Path(site.outputs("extract")["store"]).glob("shard-*"))
    hidden = shard.with_name(shard.name + ".away")
    shard.rename(hidden)
    try:
        plan = json.loads(site.run("plan", "--output", "json").stdout)
        actions = {stage["name"]: stage for stage in plan["stages"]}
        assert actions["extract"]["action"] == "run" and "no longer verifies" in actions["extract"]["why"]
    finally:
        hidden.rename(shard)


def test_changed_data_makes_the_old_store_a_candidate_for_purge_and_consent_binds_to_its_content(
    finished: tuple[Site, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = finished
    old = Path(site.outputs("extract")["store"])
    site.write_sources(45)
    merged = site.auto("--to", "merge")
    assert merged.returncode == 0, merged.stderr
    plan = json.loads(site.run("plan", "--to", "extract", "--output", "json").stdout)
    (item,) = plan["destructive"]
    assert item["path"] == str(old) and item["bytes"] > 0
    wrong = site.auto("--from", "purge", "--to", "purge", "--allow", "purge=0123456789abcdef")
    assert wrong.returncode == 0, "the disk holds both: without consent the old store stays"
    assert "not consented" in wrong.stderr and old.is_dir()


def test_a_purge_goes_to_trash_and_can_be_undone(finished: tuple[Site, subprocess.CompletedProcess[str]]) -> None:
    site, _ = finished
    store = site.folder / "store"
    old = next(path for path in store.iterdir() if not path.name.startswith("."))
    plan = json.loads(site.run("plan", "--to", "extract", "--output", "json").stdout)
    sha = plan["destructive"][0]["sha"]
    done = site.auto("--from", "purge", "--to", "purge", "--allow", f"purge={sha}")
    assert done.returncode == 0, done.stderr
    assert not old.exists() and (store / f".eagle3-trash-{sha}").is_dir()
    undone = site.run("undo", sha)
    assert undone.returncode == 0, undone.stderr
    assert old.is_dir()
