"""How the end of a pilot becomes an exit code and a sentence, and what a follower says when it leaves."""

from __future__ import annotations

import io
from typing import Any

import pytest

from backend.errors import Exit
from console.auto import detached, exit_code, pilot_failure
from console.views import Plain


@pytest.mark.parametrize(
    ("pilot", "code"),
    [
        ({"state": "succeeded", "code": 0}, Exit.OK),
        ({"state": "failed", "code": 7}, Exit.NEVER_READY),
        ({"state": "failed", "code": 77}, Exit.STAGE_FAILED),
        ({"state": "cancelled", "code": 143}, Exit.STAGE_FAILED),
        ({"state": "failed", "code": None, "signal": 9, "reason": "signal 9"}, Exit.NEEDS_HUMAN),
        ({"state": "failed", "code": 143, "reason": "code 143"}, Exit.NEEDS_HUMAN),
        ({"state": "stale", "code": None, "reason": "supervisor_died"}, Exit.NEEDS_HUMAN),
        ({"state": "stale", "code": None, "reason": "reboot"}, Exit.NEEDS_HUMAN),
    ],
)
def test_only_an_end_of_its_own_gives_the_code_of_a_pilot(pilot: dict[str, Any], code: Exit) -> None:
    """130 and 143 say that the work goes on: without a pilot it does not go beyond the stage that runs."""
    assert exit_code(pilot) == code


@pytest.mark.parametrize(
    ("pilot", "what", "fix"),
    [
        (
            {"state": "failed", "signal": 9, "reason": "signal 9"},
            "the pilot was killed (signal 9); the running stage goes on",
            "start again to take it over",
        ),
        (
            {"state": "stale", "reason": "supervisor_died", "job_alive": False},
            "the pilot was killed (supervisor_died); the running stage goes on",
            "start again to take it over",
        ),
        (
            {"state": "stale", "reason": "supervisor_died", "job_alive": True, "pid": 7},
            "the pilot is stale: supervisor_died; its process lives on (pid 7)",
            "`eagle3-console stop`, then start again",
        ),
        (
            {"state": "stale", "reason": "reboot", "job_alive": False},
            "the pilot is stale: reboot",
            "`eagle3-console logs pilot` shows its own words",
        ),
    ],
)
def test_a_pilot_that_did_not_end_by_itself_is_explained(pilot: dict[str, Any], what: str, fix: str) -> None:
    """After a reboot no stage goes on, and one whose process lives must be stopped before it can be taken over."""
    failure = pilot_failure(pilot)
    assert (failure.what, failure.fix) == (what, fix)


@pytest.mark.parametrize(("pipeline", "words"), [(None, "attach\n"), ("P1", "attach P1\n")])
def test_a_follower_that_leaves_names_a_pipeline_only_if_the_host_did(pipeline: str | None, words: str) -> None:
    """A start may resume an older pipeline: the id that the console proposed is then nobody's."""
    err = io.StringIO()
    detached(Plain(io.StringIO(), err), pipeline, Exit.INTERRUPTED)
    assert f"eagle3-console {words}" in err.getvalue()
    assert ("--pipeline" in err.getvalue()) == (pipeline is not None)
