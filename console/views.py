"""What a follower shows: the `View` interface and its three forms without a terminal: plain lines, JSON lines, nothing.

A view receives every event together with the state after it. Data goes to stdout, narration to stderr. Knows neither
the connection nor exit codes; the live form for terminals is in `console.live`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from console import jsonl, phrases
from console.events import Event
from console.marks import duration
from console.sanitise import clean
from console.state import PipelineState
from console.summary import failures, print_summary

QUIET_S = 30.0  # after this long without news a follower says that it still listens
PROGRESS_S, PROGRESS_SHARE = 10.0, 0.01  # a progress line only after both have passed


class View(Protocol):
    """Receiver of a followed pipeline."""

    def event(self, event: Event, state: PipelineState) -> None:
        """`event` happened; `state` is the state after it."""

    def own(self, kind: str, data: dict[str, Any], text: str = "") -> None:
        """The console itself has something to say: `text` for people, `kind` and `data` for programs."""

    def alive(self, state: PipelineState) -> None:
        """Nothing came for `QUIET_S`, and the connection stands."""

    def ended(self, state: PipelineState, code: int) -> None:
        """The pilot has ended; `code` is what the follower returns."""

    def close(self) -> None:
        """Leave the terminal as it was. Called once, also after an interrupt."""


class Quiet:
    """Errors only; the exit code says the rest."""

    def __init__(self, err: TextIO | None = None) -> None:
        self._err = err or sys.stderr

    def event(self, event: Event, state: PipelineState) -> None:
        """Silent."""

    def own(self, kind: str, data: dict[str, Any], text: str = "") -> None:
        """Silent."""

    def alive(self, state: PipelineState) -> None:
        """Silent."""

    def ended(self, state: PipelineState, code: int) -> None:
        """What failed, if anything did."""
        for line in failures(state):
            print(line, file=self._err)

    def close(self) -> None:
        """Nothing to restore."""


class Json:
    """JSON lines on stdout, nothing on stderr."""

    def __init__(self, host: str, pipeline: str | None = None, out: TextIO | None = None) -> None:
        self._host, self._pipeline, self._out = host, pipeline, out or sys.stdout

    def event(self, event: Event, state: PipelineState) -> None:
        """Every event, unthrottled: the host writes progress at most once a second."""
        self._print(jsonl.from_event(event, self._host))

    def own(self, kind: str, data: dict[str, Any], text: str = "") -> None:
        """The console's own line; the pipeline's id is learned from `accepted`."""
        if kind == "accepted":
            self._pipeline = str(data["id"])
        self._print(jsonl.own(kind, data, host=self._host, pipeline=self._pipeline))

    def alive(self, state: PipelineState) -> None:
        """A heartbeat, so that a CI system does not take silence for a hang."""
        self.own("alive", {"stage": state.current or None})

    def ended(self, state: PipelineState, code: int) -> None:
        """The last line: the exit code and where it came from."""
        self.own("ended", {"code": code, "pilot_code": state.code})

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class Plain:
    """One line of narration for what matters; no colours, no cursor movements."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._shown: dict[str, tuple[float, float]] = {}

    def event(self, event: Event, state: PipelineState) -> None:
        """Print it, unless it is progress too soon after the last."""
        text = self._progress(event, state) if event.ev in ("progress", "metric") else narrate(event, state)
        if text:
            where = f"{phrases.position(state, event.stage)} {clean(event.stage):<9} " if event.stage else ""
            self._say(event.t, where + text)

    def own(self, kind: str, data: dict[str, Any], text: str = "") -> None:
        """Only what is for people."""
        if text:
            print(text, file=self._err, flush=True)

    def alive(self, state: PipelineState) -> None:
        """What is going on, once more."""
        stage = state.stage(state.current)
        doing = clean(f"{stage.name}: {phrases.progress(stage.progress)}" if stage.progress else stage.name)
        self._say(time.time(), f"still {doing or 'waiting'}")

    def ended(self, state: PipelineState, code: int) -> None:
        """Failures to stderr, the summary to stdout."""
        for line in failures(state):
            print(line, file=self._err, flush=True)
        print_summary(state, self._out)

    def close(self) -> None:
        """Nothing to restore."""

    def _say(self, t: float, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S', time.localtime(t))} {text}", file=self._err, flush=True)

    def _progress(self, event: Event, state: PipelineState) -> str:
        """The line for a progress or metric event, or "" while the last one is recent."""
        stage = state.stage(event.stage)
        share = stage.progress.share if event.ev == "progress" and stage.progress else 0.0
        key = f"{event.stage} {event.ev}"
        last_t, last_share = self._shown.get(key, (float("-inf"), float("-inf")))
        done = event.ev == "progress" and share >= 1 > last_share
        moved = event.ev == "metric" or share - last_share >= PROGRESS_SHARE or share < last_share
        if not done and not (event.t - last_t >= PROGRESS_S and moved):
            return ""
        self._shown[key] = (event.t, share)
        return narrate(event, state)


def narrate(event: Event, state: PipelineState) -> str:
    """One event as a phrase for people; "" for what needs none."""
    stage, d = state.stage(event.stage), event.d
    word = phrases.status_word(stage.state)
    text = ""
    if event.ev == "progress" and stage.progress is not None:
        text = phrases.progress(stage.progress)
    elif event.ev == "metric":
        text = phrases.metrics(d)
    elif event.ev == "stage_started":
        text = f"{word} ({d.get('action') or 'run'}, attempt {event.att})"
    elif event.ev in ("stage_skipped", "stage_not_needed", "service_stopped", "stage_ended"):
        text = f"{word} {phrases.outcome(stage)}"
    elif event.ev == "service_ready":
        text = f"{word} {_verdict(d)}"
    elif event.ev == "check":
        text = phrases.check(d)
    elif event.ev in ("note", "warning"):
        text = f"{'warning: ' if event.ev == 'warning' else ''}{d.get('text', '')}"
    elif event.ev == "pipeline_started":
        text = f"pipeline {event.pipe} {state.name}: {len(state.stages)} stages"
    elif event.ev == "pipeline_ended":
        text = f"pipeline ended with {state.code} after {duration(state.seconds or 0)}"
    elif event.ev == "needs_confirmation":
        text = f"needs confirmation: {d.get('what') or phrases.metrics(d)}"
    return clean(text.rstrip())


def _verdict(data: Mapping[str, Any]) -> str:
    """The gate's own sentence where it gave one, else its facts."""
    line = data.get("text") or data.get("verdict") or data.get("line")
    return str(line) if isinstance(line, str) else phrases.metrics({k: v for k, v in data.items() if k != "checks"})
