"""The verdict: what makes a start suspect, how it explains itself, and that nothing is lost on its way through JSON."""

from __future__ import annotations

import json

import pytest

from backend.engine.readiness import IMPORT_FLOOR_S, ListenerFacts, Verdict, least_seconds, suspicions, why
from backend.report import Check

KIMI_BYTES = 594_000_000_000
LAUNCHED = 1_800_000_000.0


def listener(started_at: float = LAUNCHED + 0.2) -> ListenerFacts:
    return ListenerFacts(pid=4112, started_at=started_at, age_s=30.0, command="python -m sglang.launch_server")


def test_a_model_of_a_terabyte_that_is_ready_after_ten_seconds_is_suspect() -> None:
    """The reference run's "Server ready after 10 seconds": not even eight ranks with a warm page cache can do it."""
    (reason,) = suspicions(
        ready_after_s=10.0, listener=listener(), launched_at=LAUNCHED, weight_bytes=KIMI_BYTES, ranks=8
    )
    assert "10.0 s" in reason and "594.0 GB" in reason and "old server" in reason


def test_the_same_model_after_a_minute_is_believed() -> None:
    assert not suspicions(
        ready_after_s=60.0, listener=listener(), launched_at=LAUNCHED, weight_bytes=KIMI_BYTES, ranks=8
    )


def test_even_an_empty_model_cannot_be_ready_before_the_imports_are_done() -> None:
    assert least_seconds(0, 1) == IMPORT_FLOOR_S
    assert suspicions(ready_after_s=1.0, listener=listener(), launched_at=LAUNCHED, weight_bytes=0, ranks=1)
    assert not suspicions(ready_after_s=17.0, listener=listener(), launched_at=LAUNCHED, weight_bytes=0, ranks=1)


def test_a_listener_older_than_the_launch_is_named_with_its_age() -> None:
    (reason,) = suspicions(
        ready_after_s=300.0, listener=listener(LAUNCHED - 3600), launched_at=LAUNCHED, weight_bytes=0, ranks=1
    )
    assert "pid 4112" in reason and "3600 s before our launch" in reason


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (KIMI_BYTES, "page cache was cold"),
        (KIMI_BYTES // 2, "page cache held the rest"),
        (0, "page cache was warm"),
        (None, "cannot be told"),
    ],
)
def test_the_reason_compares_bytes_from_disk_with_weight_bytes(read: int | None, words: str) -> None:
    assert words in why(ready_after_s=120.0, ours=True, weight_bytes=KIMI_BYTES, read_bytes=read, polls=12)


def test_a_server_that_was_healthy_at_the_first_look_has_only_an_upper_bound() -> None:
    assert "upper bound" in why(ready_after_s=120.0, ours=True, weight_bytes=1, read_bytes=1, polls=1)
    assert "upper bound" not in why(ready_after_s=120.0, ours=True, weight_bytes=1, read_bytes=1, polls=2)


def test_nothing_is_explained_about_a_server_that_is_not_ours() -> None:
    told = why(ready_after_s=1.0, ours=False, weight_bytes=KIMI_BYTES, read_bytes=0, polls=1)
    assert "not proven to be this launch" in told and "page cache" not in told


def verdict(*checks: Check, suspicions: tuple[str, ...] = ()) -> Verdict:
    return Verdict(
        ok=all(check.ok is not False for check in checks),
        launch_id="launch-1",
        ready_after_s=31.5,
        listener=listener(),
        checks=checks,
        suspicions=suspicions,
        weight_bytes=270,
        read_bytes=27,
        polls=4,
        load_lines=("Load weight end.",),
        why="because",
        canary_digest="ab",
    )


GOOD = Check("health", True, "200 after 4 polls", {"polls": 4})
BAD = Check("listener", False, "pid 7 answers", fix="stop pid 7")


@pytest.mark.parametrize("before", [verdict(GOOD), verdict(GOOD, BAD), verdict(GOOD, suspicions=("too fast",))])
def test_a_verdict_survives_json(before: Verdict) -> None:
    assert Verdict.from_json(json.loads(json.dumps(before.as_json()))) == before


def test_a_check_that_could_not_be_made_does_not_fail_the_gate_and_one_that_failed_does() -> None:
    assert verdict(GOOD, Check("ranks", None, "one rank")).word == "READY"
    assert verdict(GOOD, suspicions=("too fast",)).word == "SUSPECT"
    failed = verdict(GOOD, BAD)
    assert failed.word == "FAILED" and failed.failed == BAD
    assert failed.text().startswith("FAILED: listener (/health was 200 after 31.5 s), launch launch-1")
    assert "fix: stop pid 7" in failed.text() and "pid 4112" in failed.text()
