"""What runs, what is skipped, and what an operator must agree to first: told alike by plan, pilot and explain."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.errors import Refused, UsageError
from backend.pilot.consent import Consent
from backend.pilot.decide import Selection, decide
from backend.pilot.explain import explain
from backend.pilot.history import History
from backend.pilot.plan import make_plan
from backend.report import Silent
from backend.resolve import load
from backend.runs.layout import Home
from backend.stages.base import StageContext, StagePlan
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
    assert plan["totals"]["gpu_hours"] == pytest.approx(10.6, abs=0.1)
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
