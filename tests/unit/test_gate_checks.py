"""The gate's single checks on values as a server reports them: right ones pass, and each wrong one is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.engine import gate_checks
from backend.engine.capture import LiveMarker
from backend.engine.client import Reply
from backend.engine.launch import ServerSpec, expected_flags
from backend.engine.procfs import Listener
from backend.engine.readiness import ListenerFacts, ServerProcess

SHA = "ab" * 32
FACTS = ListenerFacts(pid=4112, started_at=1_800_000_000.0, age_s=7200.0, command="python -m sglang.launch_server")
OURS = Listener("127.0.0.1", 8000, 77, 0, (4112,))
MARKER = LiveMarker(
    pid=41,
    ppid=40,
    start_ticks=900,
    time=1.0,
    route="plugin",
    launch_id="launch-1",
    layers=(2, 15, 27),
    file="/plugins/eagle3_capture.py",
    sha256=SHA,
    sglang="0.5.14",
    tp_rank=0,
    sink_hooked=True,
)
SPEC = ServerSpec(
    mode="extract",
    model_path="/models/m",
    host="127.0.0.1",
    port=8000,
    launch_id="launch-1",
    device="cuda",
    tp=8,
    dtype="bfloat16",
    mem_fraction=0.85,
    dump_dir="/dev/shm/hs",
    layers=(2, 15, 27),
)


def test_a_port_that_answered_before_the_launch_fails_and_names_who_answers_now() -> None:
    process = ServerProcess(1, 2, Path("log"), 0.0, Path("exit.json"), port_was_closed=False)
    check = gate_checks.port_was_closed(process, 8000, FACTS)
    assert check.ok is False and "pid 4112" in check.evidence and "7200 s ago" in check.evidence
    assert gate_checks.port_was_closed(replace(process, port_was_closed=True), 8000, None).ok is True


def test_a_listener_outside_our_tree_fails_with_its_pid_and_age() -> None:
    check = gate_checks.listener_is_ours([OURS], tree=[10, 11], facts=FACTS)
    assert check.ok is False and "pid 4112" in check.evidence and "7200 s ago" in check.evidence
    assert gate_checks.listener_is_ours([OURS], tree=[10, 4112], facts=FACTS).ok is True


def test_one_foreign_socket_beside_ours_fails() -> None:
    """SO_REUSEPORT lets two servers share a port: half of the requests would go to the other."""
    both = [OURS, Listener("0.0.0.0", 8000, 78, 0, (5,))]
    assert gate_checks.listener_is_ours(both, tree=[4112], facts=FACTS).ok is False


def test_a_listener_of_another_user_or_of_nobody_here_fails() -> None:
    hidden = gate_checks.listener_is_ours([Listener("::", 8000, 79, 1001, ())], tree=[4112], facts=None)
    assert hidden.ok is False and "uid 1001" in hidden.evidence
    assert gate_checks.listener_is_ours([], tree=[4112], facts=None).ok is False


@pytest.mark.parametrize("info", [{"weight_version": "launch-0"}, {"weight_version": "default"}, {}])
def test_another_launch_id_fails(info: dict[str, str]) -> None:
    assert gate_checks.launch_id_matches(info, "launch-1").ok is False
    assert gate_checks.launch_id_matches({"weight_version": "launch-1"}, "launch-1").ok is True


def as_reported(expected: dict[str, Any]) -> dict[str, Any]:
    """Dotted names unfolded, as `/server_info` nests them."""
    info: dict[str, Any] = {"something_else": 1}
    for name, value in expected.items():
        *parents, last = name.split(".")
        place = info
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return info


def test_flags_as_asked_pass() -> None:
    expected = expected_flags(SPEC)
    check = gate_checks.flags_match(as_reported(expected), expected)
    assert check.ok is True and f"all {len(expected)}" in check.evidence


@pytest.mark.parametrize("name", sorted(expected_flags(SPEC)))
def test_every_single_flag_is_looked_at(name: str) -> None:
    expected = expected_flags(SPEC)
    wrong = as_reported({**expected, name: "something else"})
    check = gate_checks.flags_match(wrong, expected)
    assert check.ok is False and f"{name} is 'something else'" in check.evidence


@pytest.mark.parametrize("name", sorted(expected_flags(SPEC)))
def test_a_flag_that_the_server_does_not_report_fails(name: str) -> None:
    """A renamed key of a newer version must not pass as "not switched on"."""
    expected = expected_flags(SPEC)
    check = gate_checks.flags_match(as_reported({k: v for k, v in expected.items() if k != name}), expected)
    assert check.ok is False and "not reported" in check.evidence


def test_what_capture_needs_is_among_the_flags_of_an_extraction_server() -> None:
    needed = {
        "cuda_graph_config.decode.backend": "disabled",
        "cuda_graph_config.prefill.backend": "disabled",
        "disable_radix_cache": True,
        "enable_two_batch_overlap": False,
        "pp_size": 1,
    }
    assert needed.items() <= expected_flags(SPEC).items()


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [(0.1, 0.10, True), (1, True, False), (0, False, False), (None, None, True), ("null", None, False), (8, 8, True)],
)
def test_values_are_compared_as_json_has_them(found: object, wanted: object, same: bool) -> None:
    assert gate_checks.same_value(found, wanted) is same


def live(*markers: LiveMarker, lost: tuple[str, ...] = ()) -> tuple[bool | None, str]:
    check = gate_checks.capture_is_live(
        markers, lost, tree={40: 800, 41: 900}, launch_id="launch-1", layers=(2, 15, 27), sha256=SHA
    )
    return check.ok, check.evidence


def test_a_live_capture_in_our_tree_passes() -> None:
    assert live(MARKER)[0] is True
    assert live(MARKER, replace(MARKER, launch_id="launch-0", pid=7))[0] is True


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (replace(MARKER, pid=7), "pid 7 is not of our server"),
        (replace(MARKER, start_ticks=901), "pid 41 is not of our server"),
        (replace(MARKER, route="diff"), "route is diff"),
        (replace(MARKER, layers=(3, 16, 28)), "layers are [3, 16, 28]"),
        (replace(MARKER, sha256="cd" * 32), "sha256 cdcdcdcdcdcd"),
        (replace(MARKER, sink_hooked=False), "no forward pass"),
        (replace(MARKER, launch_id="launch-0"), "no live marker of launch launch-1"),
    ],
)
def test_each_way_a_marker_can_be_wrong_is_named(wrong: LiveMarker, words: str) -> None:
    ok, evidence = live(wrong)
    assert ok is False and words in evidence


def test_no_marker_fails_and_a_hook_that_sglang_only_logged_fails_beside_a_good_marker() -> None:
    assert live()[0] is False
    ok, evidence = live(MARKER, lost=("Failed to apply hooks to a.b.c",))
    assert ok is False and "Failed to apply hooks" in evidence


def reply(tokens: int = 16, verify: int | None = None, launch: str = "launch-1") -> Reply:
    return Reply(
        output_ids=tuple(range(tokens)),
        text="",
        prompt_tokens=4,
        completion_tokens=tokens,
        finish_reason="length",
        weight_version=launch,
        spec_verify_ct=verify,
        spec_accept_length=None,
        input_token_logprobs=None,
    )


def test_an_empty_answer_or_one_of_another_launch_is_no_generation() -> None:
    assert gate_checks.generates(reply(), "launch-1").ok is True
    assert gate_checks.generates(reply(tokens=0), "launch-1").ok is False
    assert gate_checks.generates(reply(launch="launch-0"), "launch-1").ok is False


def test_speculation_is_proven_by_verify_steps_of_every_answer() -> None:
    good = gate_checks.speculation([reply(16, 8), reply(16, 12)])
    assert good.ok is True and good.detail["accept_length"] == pytest.approx(1.6)
    assert gate_checks.speculation([reply(16, 8), reply(16, None)]).ok is False
    assert gate_checks.speculation([reply(16, 0)]).ok is False
    assert gate_checks.speculation([]).ok is False


def test_an_answer_of_a_few_tokens_proves_no_speculation() -> None:
    assert gate_checks.speculation([reply(1, 1)]).ok is False
