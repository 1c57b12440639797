"""What followers print: plain lines without escapes and without floods, JSON lines that fit the published schema."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import jsonl
from console.events import Event
from console.live import Terminal
from console.marks import MARKS, duration, mark, size
from console.phrases import amount, eta, progress
from console.render_plan import print_plan
from console.state import PipelineState, Progress, apply
from console.summary import print_summary, screen
from console.views import Json, Plain
from tests.unit.test_console_state import RUN, START, any_event, recorded

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/events-v1.json").read_text())
ESCAPES = re.compile("[\x1b\x9b]")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def feed(view: Any, events: list[Event]) -> PipelineState:
    state = PipelineState()
    for event in events:
        state = apply(state, event)
        view.event(event, state)
    return state


def plain(*events: tuple[str, str, dict[str, Any]]) -> list[str]:
    err = io.StringIO()
    feed(Plain(io.StringIO(), err), recorded(*events))
    return err.getvalue().splitlines()


def test_plain_lines_tell_the_run_without_escapes() -> None:
    text = "\n".join(plain(*RUN))
    for phrase in ("[1/4] merge", "» skipped done before", "✓ health: 200", "- hf: no reference", "loss 1.5", "25 %"):
        assert phrase in text
    assert "✗ failed disk_full: full" in text
    assert not ESCAPES.search(text)


def test_plain_lines_clean_what_a_host_says() -> None:
    lines = plain(START, ("note", "train", {"text": "\x1b[2J\x1b]0;title\x07hello\u202e"}))
    assert lines[-1].endswith("hello") and not ESCAPES.search(lines[-1])


@settings(max_examples=40)
@given(st.lists(any_event, max_size=8))
def test_no_content_of_an_event_can_break_a_view_or_reach_the_terminal_raw(
    events: list[tuple[str, str, dict[str, Any]]],
) -> None:
    out, err = io.StringIO(), io.StringIO()
    for view in (Plain(out, err), Json("local", out=out), Terminal(out, err)):
        view.ended(feed(view, recorded(START, *events)), 1)
        view.close()
    for line in (out.getvalue() + err.getvalue()).split("\n"):
        assert not CONTROLS.search(line)


def steps(number: int, total: int, seconds: float) -> list[Event]:
    work = [("progress", "train", {"done": n, "total": total, "unit": "steps"}) for n in range(number)]
    made = recorded(START, *work)
    return [Event(**{**vars(event), "t": 1000.0 + seconds * place}) for place, event in enumerate(made)]


@pytest.mark.parametrize(
    ("number", "total", "seconds", "most"),
    [
        (1001, 1000, 0.01, 3),  # ten seconds of work: first, perhaps one more, last
        (1001, 1000, 1.0, 101),  # many seconds per per cent: one a per cent at most
        (500, 100_000, 60.0, 2),  # slow work: no line without a per cent of news
    ],
)
def test_progress_is_not_a_flood(number: int, total: int, seconds: float, most: int) -> None:
    err = io.StringIO()
    feed(Plain(io.StringIO(), err), steps(number, total, seconds))
    lines = [line for line in err.getvalue().splitlines() if "steps" in line]
    assert 1 <= len(lines) <= most
    if number > total:
        assert "100 %" in lines[-1], "the end is always told"


def test_every_json_line_fits_the_schema() -> None:
    out = io.StringIO()
    view = Json("local", out=out)
    view.own("plan", {"v": 1})
    view.own("accepted", {"id": "P1", "how": "started"})
    state = feed(view, recorded(*RUN))
    view.alive(state)
    view.own("detached", {"id": "P1", "why": "timeout", "code": 124})
    view.ended(state, 1)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    for record in records:
        validator.validate(record)
    assert {record["pipeline"] for record in records[1:]} == {"P1"}
    assert records[2]["ts"] == "1970-01-01T00:16:40.000Z"


@pytest.mark.parametrize(
    "broken",
    [
        {"seq": -1},
        {"ts": "2026-01-01"},
        {"event": "progress", "seq": 1, "stage": "train", "data": {"done": 1}},
        {"event": "stage_ended", "seq": 1, "stage": "train", "data": {"state": "fine"}},
        {"event": "detached", "data": {"id": None, "why": "interrupted", "code": 0}},
    ],
)
def test_the_schema_refuses_what_readers_could_not_use(broken: dict[str, Any]) -> None:
    good = json.loads(jsonl.own("note", {"text": "x"}))
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(good)
    assert not validator.is_valid({**good, **broken})


def test_json_lines_are_ascii_and_hold_no_token() -> None:
    line = jsonl.own("note", {"text": "é\x1b[31m\u202e hf_abcdefghijABCDEFGHIJ0123"})
    assert line.isascii() and "\x1b" not in line
    assert "hf_abc" not in line


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_view_gives_the_cursor_back_and_draws_no_foreign_escape() -> None:
    out, err = Tty(), Tty()
    view = Terminal(out, err)
    state = feed(view, recorded(*RUN[:-3], ("note", "train", {"text": "\x1b]0;owned\x07note"})))
    view.ended(state, 1)
    view.close()
    drawn = err.getvalue()
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1
    assert "owned" not in drawn and "\x1b]" not in drawn and "note" in drawn


def test_summary_tables_show_every_cell_and_read_no_markup() -> None:
    out = io.StringIO()
    section = {"title": "bench", "columns": ["server", "tokens"], "rows": [["[red]draft\x1b[0m", 22000], ["none"]]}
    print_summary(PipelineState(summary={"sections": [section], "lines": ["accept length 1.41"]}), out)
    text = out.getvalue()
    assert "[red]draft" in text and "22,000" in text and "accept length 1.41" in text
    assert not ESCAPES.search(text)


PLAN = {
    "name": "demo",
    "host": "local",
    "home": "/h",
    "stages": [
        {"name": "merge", "action": "skip", "why": "done before", "consent": None},
        {
            "name": "launch",
            "action": "run",
            "why": "extract must run",
            "lines": ["loads 270 MB"],
            "effects": ["starts a server on port 8000"],
            "numbers": {"hours": 0.5, "gpu_hours": 4.0, "store_bytes": 924_118_402_560},
            "launch": {"argv": ["python", "--x", "a b"], "env": {"NCCL_ALGO": "Ring"}, "defaults": ["--dtype"]},
            "consent": {"severity": 1, "flags": ["--yes"], "optional": False},
        },
        {
            "name": "purge",
            "action": "run",
            "why": "old store",
            "effects": ["deletes"],
            "consent": {"severity": 3, "flags": ["--allow purge=ab12"], "optional": True},
        },
        {"name": "bench", "action": "outside", "why": "outside --from/--to/--only", "consent": None},
    ],
    "switches": [{"before": "launch", "from": "none", "to": "extract", "cost": "300 s to load"}],
    "destructive": [{"path": "/data/old", "bytes": 924_118_402_560, "files": 2_520_114, "sha": "ab12"}],
    "totals": {"hours": 0.5, "gpu_hours": 4.0, "disk_gb": 1.5, "disk": "store 1.5 GB + data"},
    "nothing_to_do": False,
}


def test_a_plan_shows_numbers_commands_switches_deletions_and_flags() -> None:
    out = io.StringIO()
    print_plan(PLAN, screen(out))
    text = out.getvalue()
    for phrase in (
        "skip",
        "left out",
        "30 min 00 s",
        "924.1 GB",
        "command: python --x 'a b'",
        "env:     NCCL_ALGO=Ring",
        "engine default: --dtype",
        "Totals: hours 30 min 00 s · gpu hours 4 · disk gb 1.5 GB",
        "disk: store 1.5 GB + data",
        "Server switch before launch: none → extract, cost 300 s to load",
        "Deletes /data/old: 924.1 GB in 2,520,114 files",
        "--allow purge=ab12",
        "launch (severity 1): --yes",
        "without it this step is left out",
    ):
        assert phrase in text, phrase
    assert not ESCAPES.search(text)


def test_an_eta_is_a_range_and_one_figure_only_where_both_ends_read_the_same() -> None:
    step = Progress(5, 20, "steps", 0.0, rate=2.0, eta_s=20400, eta_hi_s=25200)
    assert eta(step) == "5 h 40 min … 7 h 00 min"
    assert eta(Progress(5, 20, "steps", 0.0, eta_s=61, eta_hi_s=61.2)) == "1 min 01 s"
    assert progress(step) == "5/20 steps 25 % · 2/s · ETA 5 h 40 min … 7 h 00 min"
    assert progress(Progress(5e9, 2e10, "bytes", 0.0, rate=2e7)) == "5.0 GB of 20.0 GB 25 % · 20.0 MB/s"


def test_a_state_is_never_told_by_colour_alone_nor_an_unknown_one_as_good() -> None:
    assert len({look.word for look in MARKS.values()}) == len(MARKS)
    assert mark("from_the_future").word == "unknown"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("bytes", 1_000_000, "1.0 MB"), ("seconds", 59.6, "1 min 00 s"), ("x", True, "True"), ("x", 0.83219, "0.8322")],
)
def test_numbers_are_shown_in_the_unit_of_their_name(name: str, value: Any, text: str) -> None:
    assert amount(name, value) == text
    assert size(999) == "999 B" and duration(0.2) == "0 s"
