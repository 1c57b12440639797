"""The reducer: what a stream of events means, however often it was cut, repeated, resumed or extended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.events import Event, EventReader
from console.state import PipelineState, apply

STAGES = ["merge", "launch", "gate", "train"]


def recorded(*events: tuple[str, str, dict[str, Any]]) -> list[Event]:
    """(ev, stage, d) as the pilot writes them, one second apart."""
    numbers = count()
    return [
        Event(1, (n := next(numbers)), 1000.0 + n, 50.0 + n, "boot", "P1", stage, 1 if stage else 0, ev, d)
        for ev, stage, d in events
    ]


def play(events: list[Event]) -> PipelineState:
    return reduce(apply, events, PipelineState())


START = ("pipeline_started", "", {"name": "demo", "stages": STAGES})
RUN = [
    START,
    ("stage_skipped", "merge", {"why": "done before"}),
    ("stage_started", "launch", {"log": "/l", "action": "starts"}),
    ("service_ready", "launch", {"why": "ready after 18 s"}),
    ("stage_ended", "launch", {"state": "succeeded", "seconds": 18.0}),
    ("stage_started", "gate", {"log": "/g", "action": "starts"}),
    ("check", "gate", {"name": "health", "ok": True, "evidence": "200"}),
    ("check", "gate", {"name": "hf", "ok": None, "evidence": "no reference here"}),
    ("stage_ended", "gate", {"state": "succeeded"}),
    ("stage_started", "train", {"log": "/t", "action": "starts"}),
    ("progress", "train", {"done": 5, "total": 20, "unit": "steps", "rate": 2.0, "eta_s": 7.5, "eta_hi_s": 9}),
    ("metric", "train", {"step": 5, "loss": 1.5}),
    ("metric", "train", {"step": 6, "accept_length": 1.4}),
    ("warning", "train", {"text": "disk at 80 %"}),
    ("stage_ended", "train", {"state": "failed", "seconds": 9, "reason": "disk_full", "what": "full", "fix": "free"}),
    ("service_stopped", "launch", {"why": "no longer needed"}),
    ("pipeline_ended", "", {"code": 1, "seconds": 16.0, "summary": {"lines": ["x"]}}),
]


def test_a_recorded_run_ends_in_the_state_that_it_tells() -> None:
    state = play(recorded(*RUN))
    assert [(stage.name, stage.state) for stage in state.stages] == [
        ("merge", "skipped"),
        ("launch", "exited"),
        ("gate", "succeeded"),
        ("train", "failed"),
    ]
    train = state.stage("train")
    assert train.failure is not None and train.failure.fix == "free"
    assert train.metrics == {"step": 6, "loss": 1.5, "accept_length": 1.4}
    assert train.progress is not None and train.progress.share == 0.25
    assert state.stage("gate").checks == (("health", True, "200"), ("hf", None, "no reference here"))
    assert state.stage("gate").seconds == 3.0, "without a figure of the host, from its own times"
    assert (state.code, state.current, state.warnings) == (1, "", ("train: disk at 80 %",))
    assert state.summary == {"lines": ["x"]}


def test_a_ready_server_stays_ready_when_its_stage_ends_well() -> None:
    assert play(recorded(*RUN[:5])).stage("launch").state == "ready"


def test_the_current_stage_is_the_one_that_runs() -> None:
    assert play(recorded(*RUN[:6])).current == "gate"
    assert play(recorded(*RUN[:9])).current == ""


@given(st.lists(st.integers(0, len(RUN) - 1), max_size=40))
def test_an_event_that_comes_twice_changes_nothing(again: list[int]) -> None:
    """A reconnect may send what was seen already."""
    events = recorded(*RUN)
    state = play(events)
    for index in again:
        if events[index].ev != "pipeline_started":
            state = apply(state, events[index])
    assert state == play(events)


def test_a_second_pilot_starts_the_picture_anew() -> None:
    """After a resume, the failure of the first pilot is history; it must not colour the second one's end."""
    first = recorded(*RUN)
    second = [Event(**{**vars(event), "seq": event.seq + 100}) for event in recorded(*RUN[:2])]
    state = play(first + second)
    assert (state.code, state.warnings, state.stage("train").state) == (None, (), "pending")


def test_an_unknown_event_of_a_newer_host_is_passed_over() -> None:
    state = play(recorded(START, ("gpu_sample", "", {"x": 1}), ("gate_poll", "gate", {"n": 3})))
    assert (state.seq, state.stage("gate").state) == (2, "pending")


def test_a_stage_that_nobody_announced_is_shown_too() -> None:
    state = play(recorded(START, ("stage_started", "export", {})))
    assert state.stages[-1].name == "export"


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
KEYS = st.sampled_from(["done", "total", "unit", "ok", "name", "why", "state", "text", "rate", "eta_s", "code"])
KINDS = ["progress", "metric", "check", "warning", "stage_skipped", "stage_started", "stage_ended", "service_ready"]
any_event = st.tuples(
    st.sampled_from([*KINDS, "needs_confirmation", "pipeline_ended", "odd"]),
    st.sampled_from([*STAGES, "", "new\x1b[2J"]),
    st.dictionaries(KEYS, json_values, max_size=5),
)


@settings(max_examples=50)
@given(st.lists(any_event, max_size=12))
def test_no_content_of_an_event_can_break_the_follower(events: list[tuple[str, str, dict[str, Any]]]) -> None:
    play(recorded(START, *events))


def lines_of(events: list[Event]) -> bytes:
    return b"".join(json.dumps(vars(event)).encode() + b"\n" for event in events)


def pieces(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at, turn = 0, 0
    while at < len(data):
        yield data[at : at + sizes[turn % len(sizes)]]
        at, turn = at + sizes[turn % len(sizes)], turn + 1


@given(st.lists(st.integers(1, 500), min_size=1, max_size=10))
def test_events_cut_anywhere_are_read_whole_and_the_offset_is_a_line_start(sizes: list[int]) -> None:
    events = recorded(*RUN)
    data = lines_of(events)
    reader = EventReader()
    got = [event for piece in pieces(data, sizes) for event in reader.feed(piece)]
    assert got == events
    assert reader.offset == len(data)
    assert list(reader.feed(data[:10])) == []
    assert reader.offset == len(data), "a line that is still being written is read again after a reconnect"


@pytest.mark.parametrize("line", [b"garbage", b"[]", b'{"v":1}', b"\xff\xfe", b'{"v":1,"seq":"x"}'])
def test_a_damaged_line_is_counted_and_hides_no_other(line: bytes) -> None:
    reader, events = EventReader(), recorded(*RUN[:2])
    assert list(reader.feed(line + b"\n" + lines_of(events))) == events
    assert reader.damaged == 1
