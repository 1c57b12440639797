"""Consent: each severity has its own answer, and no answer stands for more than was asked."""

from __future__ import annotations

from typing import Any

import pytest

from backend.errors import Exit, Refused, UsageError
from console import consent
from console.consent import Consent


def plan(*stages: tuple[str, int, list[str]], optional: bool = False) -> dict[str, Any]:
    return {
        "stages": [
            {
                "name": name,
                "action": "run",
                "effects": [f"effect of {name}"],
                "consent": {"severity": severity, "flags": flags, "optional": optional} if severity else None,
            }
            for name, severity, flags in stages
        ]
    }


PATCH = ("patch", 1, ["--yes"])
STOP = ("stop", 2, ["--allow stop"])
PURGE = ("purge", 3, ["--allow purge=ab12", "--allow purge=cd34"])


@pytest.mark.parametrize(
    ("stage", "given", "enough"),
    [
        (PATCH, Consent(False, ()), False),
        (PATCH, Consent(True, ()), True),
        (PATCH, Consent(False, ("patch",)), True),
        (STOP, Consent(True, ()), False),
        (STOP, Consent(True, ("stop",)), True),
        (STOP, Consent(True, ("stop=1",)), False),
        (PURGE, Consent(True, ("purge",)), False),
        (PURGE, Consent(True, ("purge=ab12",)), False),
        (PURGE, Consent(True, ("purge=ab12", "purge=cd35")), False),
        (PURGE, Consent(False, ("purge=ab12", "purge=cd34")), True),
    ],
)
def test_what_agrees_to_what(stage: tuple[str, int, list[str]], given: Consent, enough: bool) -> None:
    assert (consent.missing(plan(stage), given) == []) is enough


def test_a_stage_that_is_skipped_or_without_effects_needs_nothing() -> None:
    skipped = plan(STOP)
    skipped["stages"][0]["action"] = "skip"
    assert consent.missing(skipped, Consent(False, ())) == []
    assert consent.missing(plan(("stop", 0, [])), Consent(False, ())) == []


def test_an_optional_step_does_not_hold_up_the_pipeline() -> None:
    assert consent.missing(plan(PURGE, optional=True), Consent(False, ())) == []


def test_the_refusal_names_every_flag_once() -> None:
    lacking = consent.missing(plan(PATCH, STOP, ("merge", 1, ["--yes"]), PURGE), Consent(False, ()))
    error = consent.refusal(lacking)
    assert error.code == Exit.CONFIRMATION_NEEDED
    assert error.fix == "add --yes --allow stop --allow purge=ab12 --allow purge=cd34"


def ask(answers: list[str], *stages: tuple[str, int, list[str]]) -> Consent:
    lacking = consent.missing(plan(*stages), Consent(False, ()))
    return consent.ask(lacking, Consent(False, ()), lambda question: answers.pop(0) + "\n", lambda line: None)


def test_answers_on_a_terminal_become_the_flags_they_stand_for() -> None:
    assert ask(["y", "stop"], PATCH, STOP) == Consent(True, ("stop",))


def test_one_yes_answers_all_reversible_steps() -> None:
    assert ask(["yes"], PATCH, ("merge", 1, ["--yes"])).yes


@pytest.mark.parametrize("answers", [["n"], [""], ["y", "y"], ["y", "stop please"], ["y", "STOP"], ["y", ""]])
def test_anything_but_the_exact_answer_is_a_no(answers: list[str]) -> None:
    with pytest.raises(Refused):
        ask(answers, PATCH, STOP)


def test_data_loss_cannot_be_agreed_to_with_a_key_and_is_not_even_asked() -> None:
    with pytest.raises(Refused) as caught:
        ask([], PATCH, PURGE)
    assert "purge=ab12" in caught.value.fix


def test_a_mistyped_allow_is_refused() -> None:
    consent.check_names(plan(STOP), ["stop", "stop=1"])
    with pytest.raises(UsageError, match="stpo"):
        consent.check_names(plan(STOP), ["stpo"])
