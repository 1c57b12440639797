"""A training run: resumable to the bit, stopped by bad numbers with the record named, honest about what it did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from backend.eagle3.records import SequenceSource, TrainingRecord
from backend.eagle3.schedule import FLOOR, lr_factor, share_done
from backend.eagle3.settings import TrainSettings
from backend.eagle3.target import TargetCheckpoint
from backend.eagle3.trainer import TrainResult, train
from backend.errors import OperatorError, Refused, UsageError
from tests.unit.eagle3_support import Heard, record, write_target

SETTINGS = TrainSettings(
    ttt_steps=2,
    batch_tokens=24,
    lr=3e-3,
    epochs=3,
    draft_vocab_size=20,
    init="layer",
    threads=1,
    eval_every_s=None,
    checkpoint_every_s=None,
)


class Bench:
    """A tiny target with its records, and runs of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target: TargetCheckpoint = write_target(folder / "target")
        self.records = [record(self.target, 7 + i, [(2, 7 + i)], i, source="ab"[i % 2]) for i in range(9)]
        self.validation = [record(self.target, 12, [(3, 12)], 100 + i) for i in range(3)]
        self.heard = Heard()

    def run(
        self, name: str, settings: TrainSettings = SETTINGS, stop: Callable[[], bool] = lambda: False
    ) -> TrainResult:
        return train(
            settings,
            SequenceSource(self.records),
            SequenceSource(self.validation),
            self.target,
            self.folder / name,
            self.heard,
            stop=stop,
        )

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "draft" / "model.safetensors")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def after(calls: int, then: Callable[[], bool] = lambda: True) -> Callable[[], bool]:
    """A `stop` that says no `calls` times and then does `then`."""
    left = iter(range(calls))
    return lambda: False if next(left, None) is not None else then()


def assert_same_run(bench: Bench, whole: TrainResult, resumed: TrainResult, names: tuple[str, str]) -> None:
    assert resumed.losses == whole.losses, "the same batches in the same order give the same losses to the bit"
    assert (resumed.steps, resumed.tokens, resumed.pairs) == (whole.steps, whole.tokens, whole.pairs)
    ours, theirs = bench.weights(names[0]), bench.weights(names[1])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_stopped_run_continues_bit_for_bit(bench: Bench, steps: int) -> None:
    whole = bench.run("whole")
    first = bench.run("parts", stop=after(steps))
    assert not first.finished and first.draft_dir is None and first.steps == steps < whole.steps
    assert_same_run(bench, whole, bench.run("parts"), ("parts", "whole"))


def test_a_crashed_run_continues_from_its_last_checkpoint(bench: Bench) -> None:
    def crash() -> bool:
        raise KeyboardInterrupt

    settings = replace(SETTINGS, checkpoint_every_steps=3)
    whole = bench.run("whole")
    with pytest.raises(KeyboardInterrupt):
        bench.run("crashed", settings, stop=after(5, crash))
    kept = sorted(p.name for p in (bench.folder / "crashed" / "checkpoints").iterdir())
    assert kept == ["step-00000003"]
    resumed = bench.run("crashed", settings)
    assert "continuing from the checkpoint of step 3" in bench.heard.notes
    assert_same_run(bench, whole, resumed, ("crashed", "whole"))


def test_a_finished_run_trains_no_further(bench: Bench) -> None:
    whole = bench.run("whole")
    again = bench.run("whole")
    assert again.finished and again.steps == whole.steps and again.losses == whole.losses


def test_only_the_newest_checkpoints_are_kept(bench: Bench) -> None:
    result = bench.run("x", replace(SETTINGS, checkpoint_every_steps=2, keep_checkpoints=3))
    kept = sorted(int(p.name.removeprefix("step-")) for p in (bench.folder / "x" / "checkpoints").iterdir())
    assert len(kept) == 3 and kept[-1] == result.steps


@pytest.mark.parametrize(("name", "value"), [("lr", 1e-2), ("ttt_steps", 3), ("seed", 1), ("epochs", 4)])
def test_a_checkpoint_of_other_settings_is_refused_by_name(bench: Bench, name: str, value: object) -> None:
    bench.run("x", stop=after(2))
    with pytest.raises(Refused, match=name) as caught:
        bench.run("x", replace(SETTINGS, **{name: value}))  # type: ignore[arg-type]
    assert caught.value.reason == "checkpoint_foreign"


def test_a_checkpoint_of_other_records_is_refused(bench: Bench) -> None:
    bench.run("x", stop=after(2))
    bench.records.append(record(bench.target, 9, [(2, 9)], 77))
    with pytest.raises(Refused) as caught:
        bench.run("x")
    assert caught.value.reason == "checkpoint_foreign"


@pytest.mark.parametrize("file", ["training.pt", "progress.json"])
def test_a_damaged_checkpoint_is_named(bench: Bench, file: str) -> None:
    bench.run("x", stop=after(2))
    path = bench.folder / "x" / "checkpoints" / "step-00000002" / file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OperatorError, match="step-00000002") as caught:
        bench.run("x")
    assert caught.value.reason == "checkpoint_broken"


def with_state(rec: TrainingRecord, field: str, value: float) -> TrainingRecord:
    state = getattr(rec, field).clone()
    state[-2] = value
    return replace(rec, **{field: state})


@pytest.mark.parametrize(("field", "value"), [("aux_TC", math.nan), ("last_TH", math.inf)])
def test_a_record_with_bad_numbers_stops_the_run_by_name(bench: Bench, field: str, value: float) -> None:
    bench.records[4] = with_state(bench.records[4], field, value)
    with pytest.raises(OperatorError, match=bench.records[4].id) as caught:
        bench.run("x")
    assert caught.value.reason == "non_finite"
    assert not (bench.folder / "x" / "draft").exists(), "no draft may look finished"


def test_bad_numbers_that_are_finite_themselves_stop_the_run_by_name(bench: Bench) -> None:
    """Values that only overflow inside the draft are found by the record's own loss."""
    bench.records[4] = with_state(bench.records[4], "last_TH", 3e38)
    with pytest.raises(OperatorError, match=bench.records[4].id) as caught:
        bench.run("x", replace(SETTINGS, draft_vocab_size=40))
    assert caught.value.reason == "non_finite"


def test_records_without_supervision_are_counted_and_left_out(bench: Bench) -> None:
    bench.records += [record(bench.target, 9, [], 50), record(bench.target, 4, [(3, 4)], 51)]
    result = bench.run("x")
    assert (result.records_used, result.records_without_supervision) == (9, 2)


def test_data_without_any_supervision_is_refused(bench: Bench) -> None:
    bench.records = [record(bench.target, 9, [], 50)]
    with pytest.raises(UsageError) as caught:
        bench.run("x")
    assert caught.value.reason == "no_supervision"


def test_every_supervised_pair_has_a_loss_or_is_counted_as_off_vocabulary(bench: Bench) -> None:
    result = bench.run("x")
    expected = sum(len(r.input_ids_T) - 3 + len(r.input_ids_T) - 4 for r in bench.records)
    assert result.pairs + result.off_vocab_pairs == expected * result.epochs_done == expected * 3
    assert result.off_vocab_pairs > 0


def test_a_run_exports_both_drafts_and_reports_what_it_did(bench: Bench) -> None:
    result = bench.run("x", replace(SETTINGS, eval_every_steps=4))
    assert result.draft_dir == bench.folder / "x" / "draft"
    untrained = load_file(result.untrained_dir / "model.safetensors")
    assert not torch.equal(untrained["fc.weight"], bench.weights("x")["fc.weight"])
    assert torch.equal(untrained["d2t"], bench.weights("x")["d2t"])
    assert [point.step for point in result.evaluations] == [*range(0, result.steps, 4), result.steps]
    assert all(check.ok for check in bench.heard.checks) and len(bench.heard.checks) == 7
    assert bench.heard.progressed[-1] == (result.steps, result.steps, "steps")
    walks = [m for m in bench.heard.metrics if "serving_walk" in m]
    assert [m["step"] for m in walks] == [point.step for point in result.evaluations]
    trained = [m for m in bench.heard.metrics if "loss" in m]
    assert {"step", "loss", "lr", "tokens_s", "accuracy_0"} <= trained[0].keys()

    events = EventAccumulator(str(bench.folder / "x" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("validation/serving_walk")] == [point.step for point in result.evaluations]
    assert events.Scalars("train/loss")[0].value == pytest.approx(result.losses[0])


def test_a_time_limit_ends_the_run_and_is_kept_over_a_resume(bench: Bench) -> None:
    settings = replace(SETTINGS, schedule="cosine_wall", max_seconds=1e9, epochs=2)
    bench.run("x", settings, stop=after(3))
    progress = json.loads((bench.folder / "x" / "checkpoints" / "step-00000003" / "progress.json").read_text())
    spent = progress["progress"]["seconds"]
    assert spent > 0
    ended = bench.run("x", replace(settings, max_seconds=spent))
    assert ended.finished and ended.steps == 3 and ended.seconds == spent, "the elapsed time came with the checkpoint"
    longer = bench.run("x", settings)
    assert longer.epochs_done == 2 and longer.seconds > spent


def test_the_schedule_warms_up_and_decays_to_its_floor() -> None:
    factors = [lr_factor(share_done("cosine_steps", step, 200, 0.0, None), 0.1) for step in range(200)]
    assert factors[0] == pytest.approx(0.05, abs=0.01)
    assert max(factors) == factors[19]
    assert factors[-1] == pytest.approx(FLOOR)
    assert factors[19:] == sorted(factors[19:], reverse=True)


def test_the_wall_schedule_follows_whichever_ends_first() -> None:
    assert share_done("cosine_wall", 9, 1000, 50.0, 100.0) == 0.5
    assert share_done("cosine_wall", 899, 1000, 50.0, 100.0) == 0.9
    assert share_done("cosine_wall", 9, 1000, 500.0, 100.0) == 1.0
    assert share_done("cosine_steps", 9, 1000, 50.0, 100.0) == 0.01


@pytest.mark.parametrize(
    "values",
    [
        {"ttt_steps": 0},
        {"lr": 0.0},
        {"warmup_share": 1.0},
        {"schedule": "cosine_wall"},
        {"init": "zero"},
        {"arch": "mamba"},
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(values: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        TrainSettings(**values)  # type: ignore[arg-type]
