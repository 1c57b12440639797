"""Event lines can be followed while they grow, survive a killed writer, and are never longer than a page."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.errors import OperatorError
from backend.report import Check, Reporter
from backend.runs.atomic import read_json
from backend.runs.events import LINE_LIMIT, AttemptReporter, EventLog, Pace, cut, read_events
from backend.runs.layout import Attempt, Home


def test_seq_goes_on_after_a_restart_of_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for start in (0, 3):
        with EventLog(path, pipe="P", stage="extract", att=2) as log:
            assert [log.emit("note", {"n": n}).seq for n in range(3)] == [start, start + 1, start + 2]
    events, offset = read_events(path)
    assert [event.seq for event in events] == list(range(6))
    assert {(event.v, event.pipe, event.stage, event.att, event.ev) for event in events} == {
        (1, "P", "extract", 2, "note")
    }
    assert offset == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_without_its_end_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("started")
    whole = path.stat().st_size
    with EventLog(path) as log:
        log.emit("note", {"text": "second"})
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    events, offset = read_events(path)
    assert ([event.ev for event in events], offset) == (["started"], whole)
    path.write_bytes(data)
    events, offset = read_events(path, offset)
    assert ([event.d for event in events], offset) == ([{"text": "second"}], len(data))


def test_a_writer_that_was_killed_in_mid_line_leaves_no_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("started")
    with path.open("ab") as file:
        file.write(b'{"v":1,"seq":1,"t":')
    with EventLog(path) as log:
        assert log.emit("note").seq == 1
    events, _ = read_events(path)
    assert [(event.seq, event.ev) for event in events] == [(0, "started"), (1, "note")]


def test_a_damaged_line_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("started")
        with path.open("ab") as file:
            file.write(b"\xff garbage\n")
        log.emit("exited")
    assert [event.ev for event in read_events(path)[0]] == ["started", "unreadable", "exited"]


def test_a_log_that_shrank_is_not_read_as_if_it_had_grown(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"")
    with pytest.raises(OperatorError) as error:
        read_events(path, 100)
    assert error.value.reason == "log_replaced"
    assert read_events(tmp_path / "none.jsonl") == ([], 0)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=40),
        st.one_of(st.text(max_size=9000), st.integers(), st.floats(), st.lists(st.text(max_size=2000), max_size=5)),
        max_size=8,
    )
)
def test_every_line_is_valid_and_short_whatever_is_put_in(tmp_path_factory: pytest.TempPathFactory, d: dict) -> None:  # type: ignore[type-arg]
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path, pipe="P" * 26, stage="s" * 64) as log:
        log.emit("note", d)
    (line,) = path.read_bytes().splitlines(keepends=True) if b"\r" not in path.read_bytes() else [path.read_bytes()]
    assert len(line) <= LINE_LIMIT and line.endswith(b"\n")
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read_events(path)[0][0].ev == "note"


def test_a_long_event_says_what_was_cut() -> None:
    d = {"text": "x" * 10_000, "code": 7, "list": list(range(5000))}
    short = cut(d, 1000)
    assert short["code"] == 7 and short["text"].endswith("x…") and short["cut"] == ["text", "list"]
    assert len(json.dumps(short, ensure_ascii=False, separators=(",", ":")).encode()) <= 1000


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("started")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            with pytest.raises(OSError, match="no space left for a whole line"):
                log.emit("note", {"text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.emit("exited")
    assert [(event.seq, event.ev) for event in read_events(path)[0]] == [(0, "started"), (1, "exited")]


def attempt_of(tmp_path: Path) -> Attempt:
    return Home(tmp_path / "home").create().pipeline("P1").create().new_attempt("extract", order=6)


def test_the_reporter_throttles_events_and_names_where_it_stands(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    with AttemptReporter(attempt.path) as reporter:
        reporter_protocol: Reporter = reporter
        for done in range(20_001):
            reporter_protocol.progress(done, 20_000, "sample", bytes=done * 10)
        reporter_protocol.metric(step=1, loss=float("nan"))
        reporter_protocol.check(Check("rows", True, "20000 = 20000"))
        reporter_protocol.warning("slow")
    events, _ = read_events(attempt.events)
    progress = [event for event in events if event.ev == "progress"]
    assert len(progress) == 101
    assert progress[-1].d["done"] == 20_000
    assert {(event.pipe, event.stage, event.att) for event in events} == {("P1", "extract", 1)}
    assert next(event.d for event in events if event.ev == "metric") == {"step": 1, "loss": "nan"}
    assert [event.ev for event in events if event.ev not in ("progress", "metric")] == ["check", "warning"]
    record = read_json(attempt.progress)
    assert record is not None
    assert (record["done"], record["total"], record["unit"], record["bytes"]) == (20_000, 20_000, "sample", 200_000)


def test_progress_that_was_held_back_is_written_at_the_end(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    with AttemptReporter(attempt.path) as reporter:
        for done in range(5):
            reporter.progress(done, 1000, "sample")
    assert (read_json(attempt.progress) or {})["done"] == 4


def test_a_reporter_on_a_dead_disk_counts_and_does_not_raise(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    reporter = AttemptReporter(attempt.path)
    real = os.dup(reporter._log._fd)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, reporter._log._fd)
    reporter.note("lost")
    reporter.note("lost too")
    os.dup2(real, reporter._log._fd)
    reporter.note("seen")
    reporter.close()
    os.close(full)
    os.close(real)
    assert [event.d.get("lost", event.d.get("text")) for event in read_events(attempt.events)[0]] == [2, "seen"]


def test_the_remaining_time_is_a_range_between_recent_and_overall_speed() -> None:
    pace = Pace()
    for second in range(101):
        pace.add(float(second), 1000 + second * 10)  # a resume at 1000 is no speed
    for second in range(101, 201):
        pace.add(float(second), 2000 + (second - 100) * 5)
    eta = pace.eta(3000)
    assert eta.rate is not None and eta.eta_s is not None and eta.eta_hi_s is not None
    assert eta.rate == pytest.approx(5.0)
    assert eta.eta_s == pytest.approx(500 / 7.5) and eta.eta_hi_s == pytest.approx(500 / 5)


def test_without_movement_there_is_no_estimate() -> None:
    pace = Pace()
    for second in range(5):
        pace.add(float(second), 7)
    assert pace.eta(100).eta_s is None
