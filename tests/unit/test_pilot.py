"""What runs, what is skipped, and what an operator must agree to first: told alike by plan, pilot and explain."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backend.agent.pilots import to_resume
from backend.errors import OperatorError, Refused, UsageError
from backend.pilot.consent import Consent
from backend.pilot.decide import Selection, decide
from backend.pilot.drive import Pilot
from backend.pilot.explain import explain
from backend.pilot.history import History
from backend.pilot.plan import make_plan
from backend.report import Check, Silent
from backend.resolve import load
from backend.runs.atomic import write_json
from backend.runs.layout import Home
from backend.runs.spec import write_spec
from backend.runs.state import state
from backend.runs.supervisor import start
from backend.stages.base import Product, StageContext, StagePlan
from backend.stages.handover import read_product, record_outputs
from backend.stages.merge import Merge
from backend.stages.registry import stage_named, stage_names

SHA = "0123456789abcdef"
EFFECT = ("does something",)


@pytest.fixture
def ctx(tmp_path: Path) -> StageContext:
    config = load(profile="kimi-k2.5", environ={"HOME": str(tmp_path)}, cwd=tmp_path).config
    return StageContext(config, "python", Home(tmp_path / "state").create(), {}, Silent())


@pytest.mark.parametrize(
    ("wish", "held"),
    [
        ({}, "preflight merge purge patch stop launch gate extract train deploy bench"),
        ({"from": "gate", "to": "train"}, "gate extract train"),
        ({"to": "merge"}, "preflight merge"),
        ({"only": ["deploy"]}, "deploy"),
    ],
)
def test_a_selection_is_a_range_or_a_list(wish: dict[str, object], held: str) -> None:
    selection = Selection.from_json(wish)
    assert [stage for stage in stage_names() if selection.holds(stage)] == held.split()
    assert Selection.from_json(selection.as_json()) == selection


@pytest.mark.parametrize("wish", [{"from": "trian"}, {"from": "train", "to": "merge"}, {"only": ["nope"]}])
def test_a_selection_that_cannot_be_is_refused(wish: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Selection.from_json(wish)


@pytest.mark.parametrize(
    ("stage", "plan", "consent", "missing"),
    [
        ("merge", StagePlan(effects=EFFECT), Consent(), ["--yes"]),
        ("merge", StagePlan(effects=EFFECT), Consent(yes=True), []),
        ("merge", StagePlan(effects=EFFECT), Consent(allow=frozenset({"merge"})), []),
        ("deploy", StagePlan(effects=EFFECT), Consent(yes=True), ["--allow deploy"]),
        ("deploy", StagePlan(effects=EFFECT), Consent(allow=frozenset({"deploy"})), []),
        ("deploy", StagePlan(), Consent(), []),
        ("purge", StagePlan(effects=EFFECT, destructive=({"sha": SHA},)), Consent(True, frozenset({"purge"})),
         [f"--allow purge={SHA}"]),
        ("purge", StagePlan(effects=EFFECT, destructive=({"sha": SHA},)), Consent(allow=frozenset({f"purge={SHA}"})),
         []),
    ],
)  # fmt: skip
def test_consent_grows_with_severity_and_binds_to_content(
    stage: str, plan: StagePlan, consent: Consent, missing: list[str]
) -> None:
    assert consent.missing(stage_named(stage), plan) == missing


def test_a_refusal_names_the_effect_and_the_flag() -> None:
    with pytest.raises(Refused) as error:
        Consent().require(stage_named("deploy"), StagePlan(effects=("starts a server on port 8000",)))
    assert "starts a server on port 8000" in error.value.what
    assert "--allow deploy" in error.value.fix
    assert error.value.code == 4


def test_nothing_done_means_everything_runs_and_inputs_that_cannot_be_read_are_named(ctx: StageContext) -> None:
    decisions = decide(ctx, Selection(), History(ctx.home))
    assert {decision.action for decision in decisions} == {"run"}
    merge = next(decision for decision in decisions if decision.stage == "merge")
    assert "cannot be read yet" in merge.why and "A2_kimik25" in merge.why


def test_a_selection_that_leaves_out_what_it_needs_is_refused(ctx: StageContext) -> None:
    with pytest.raises(UsageError, match="train needs the result of merge"):
        decide(ctx, Selection(first="train"), History(ctx.home))


def test_the_plan_of_the_reference_run_can_be_made_without_its_host(ctx: StageContext) -> None:
    plan = make_plan(ctx, "kimi-k2.5", Selection())
    consents = {entry["name"]: entry["consent"] for entry in plan["stages"] if entry["consent"]}
    assert consents["merge"]["flags"] == ["--yes"] and consents["deploy"]["flags"] == ["--allow deploy"]
    assert "stop" not in consents, "no old server runs: there is nothing to agree to"
    assert [switch["to"] for switch in plan["switches"]] == ["extract", "none", "serve+draft", "serve", "serve+draft"]
    assert plan["totals"]["disk_gb"] == pytest.approx(5073, abs=10)
    assert plan["totals"]["gpu_hours"] == pytest.approx(26.6, abs=0.1)
    launch = next(entry for entry in plan["stages"] if entry["name"] == "launch")["launch"]
    assert "--mem-fraction-static" in launch["defaults"]


def test_the_same_wish_has_the_same_key_and_another_wish_another(ctx: StageContext) -> None:
    whole = make_plan(ctx, "x", Selection())["key"]
    assert make_plan(ctx, "x", Selection())["key"] == whole
    assert make_plan(ctx, "x", Selection(last="merge"))["key"] != whole


def test_explain_says_why_and_knows_every_stage(ctx: StageContext) -> None:
    assert explain(ctx, Selection(), "extract")["why"] == "merge must run first"
    with pytest.raises(UsageError, match="there is no stage 'extrakt'"):
        explain(ctx, Selection(), "extrakt")


def pilot(ctx: StageContext, destructive: tuple[dict[str, object], ...]) -> Pilot:
    pipeline = ctx.home.pipeline("01TEST").create()
    plan = {"name": "x", "selection": {}, "consent": {"yes": True, "allow": []}, "python": "python", "created": 1.0}
    config = ctx.config.model_dump(mode="json")
    write_json(pipeline.plan, {**plan, "config": config, "destructive": list(destructive)})
    return Pilot(pipeline)


def test_only_what_was_on_the_operators_screen_is_deleted(ctx: StageContext) -> None:
    shown = {"sha": SHA, "path": "/stores/old", "time": 7.0}
    found_now = {"sha": SHA, "path": "/stores/old", "time": 99.0}
    assert pilot(ctx, (shown,))._as_shown(StagePlan(destructive=(found_now,))) == (shown,)


def test_a_deletion_that_was_never_shown_is_refused(ctx: StageContext) -> None:
    with pytest.raises(Refused, match="was not part of the plan that was agreed to") as error:
        pilot(ctx, ())._as_shown(StagePlan(destructive=({"sha": SHA, "path": "/stores/old"},)))
    assert "plan purge" in error.value.fix


def test_an_unfinished_pipeline_of_the_same_wish_is_resumed_even_if_every_stage_is_done(ctx: StageContext) -> None:
    key = make_plan(ctx, "x", Selection())["key"]
    pipeline = ctx.home.pipeline("01TEST").create()
    write_json(pipeline.plan, {"key": key})
    assert to_resume(ctx.home, key) == pipeline
    assert to_resume(ctx.home, "another") is None


def test_a_result_that_cannot_even_be_checked_is_made_again(ctx: StageContext) -> None:
    class Broken(Merge):
        def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
            raise OperatorError("report.json is gone", reason="not_merged")

    attempt = ctx.home.pipeline("01TEST").create().new_attempt("merge", 2)
    write_spec(attempt.path, argv=["true"])
    start(attempt.path)
    while state(attempt.path).alive:
        os.sched_yield()
    record_outputs(attempt.path, Broken(), "f" * 64, {"digest": "d"}, [])
    product, doubt = History(ctx.home).verified(Broken(), ctx, "f" * 64)
    assert product is None
    assert doubt == "an earlier result no longer verifies: report.json is gone"


def test_a_product_made_again_equal_keeps_what_was_made_from_it(ctx: StageContext, tmp_path: Path) -> None:
    def merged(seconds: float) -> Product:
        outputs = {"digest": "d", "folder": "anywhere", "seconds": seconds}
        record_outputs(tmp_path, Merge(), "f", outputs, [])
        product = read_product(tmp_path, "merge")
        assert product is not None
        return product

    assert merged(1.0).identity == merged(99.0).identity == {"digest": "d"}
