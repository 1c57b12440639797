"""What the console knows about a pipeline, and the one function that changes it: `apply(state, event) -> state`.

Frozen values. The live stream, a recording and the tests feed the same reducer, so what a follower shows is what a
replay shows. Knows neither files nor terminals; times are the host's, so an ETA does not depend on when we attached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from console.events import Event

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Progress:
    """`done` of `total` `unit`s at host time `t`; rate in units per second; the host's ETA is a range in seconds."""

    done: float
    total: float
    unit: str
    t: float
    rate: float | None = None
    eta_s: float | None = None
    eta_hi_s: float | None = None
    detail: Values = field(default_factory=dict)
    """What the stage adds: tokens and bytes per second, the last health code …"""

    @property
    def share(self) -> float:
        """Between 0 and 1; 0 while the total is unknown."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0


@dataclass(frozen=True)
class Failure:
    """Why a stage did not succeed, in the words of its `OperatorError`."""

    reason: str
    what: str
    fix: str


@dataclass(frozen=True)
class StageState:
    """One stage. `state` is a key of `console.marks.MARKS`; `checks` are (name, ok, evidence) in the order made."""

    name: str
    state: str = "pending"
    attempt: int = 0
    why: str = ""
    log: str = ""
    started: float | None = None
    seconds: float | None = None
    progress: Progress | None = None
    metrics: Values = field(default_factory=dict)
    checks: tuple[tuple[str, bool | None, str], ...] = ()
    failure: Failure | None = None
    summary: Values = field(default_factory=dict)
    verdict: Values = field(default_factory=dict)


@dataclass(frozen=True)
class PipelineState:
    """A pipeline as its events tell it. `code` is the pilot's own account; its exit status is the proof.

    `failure` is the pilot's own, where no stage tells why it ended: set by the follower, from the pilot's files.
    """

    name: str = ""
    stages: tuple[StageState, ...] = ()
    current: str = ""
    seq: int = -1
    t: float = 0.0
    started: float | None = None
    warnings: tuple[str, ...] = ()
    needs: Values | None = None
    code: int | None = None
    seconds: float | None = None
    summary: Values = field(default_factory=dict)
    failure: Failure | None = None

    def stage(self, name: str) -> StageState:
        """The stage of that name; one that nobody announced is `pending`."""
        return next((stage for stage in self.stages if stage.name == name), StageState(name))


def apply(state: PipelineState, event: Event) -> PipelineState:
    """The state after `event`. Unknown kinds change nothing but the position; a repeated event changes nothing."""
    if event.seq <= state.seq and event.ev != "pipeline_started":
        return state
    rule = _RULES.get(event.ev)
    after = rule(state, event) if rule else state
    return replace(after, seq=event.seq, t=max(state.t, event.t))


def _pipeline_started(state: PipelineState, event: Event) -> PipelineState:
    """A pilot begins, perhaps not the first one: what earlier pilots said about stages is history."""
    names = [str(item["name"]) if isinstance(item, dict) else str(item) for item in event.d.get("stages", [])]
    return PipelineState(
        name=str(event.d.get("name", "")), stages=tuple(StageState(name) for name in names), started=event.t
    )


def _pipeline_ended(state: PipelineState, event: Event) -> PipelineState:
    code = _number(event.d.get("code"))
    return replace(
        state,
        current="",
        code=int(code) if code is not None else None,
        seconds=_number(event.d.get("seconds")),
        summary=_object(event.d.get("summary")),
    )


def _needs_confirmation(state: PipelineState, event: Event) -> PipelineState:
    return replace(state, needs=dict(event.d))


def _warning(state: PipelineState, event: Event) -> PipelineState:
    prefix = f"{event.stage}: " if event.stage else ""
    return replace(state, warnings=(*state.warnings, prefix + str(event.d.get("text", ""))))


def _stage(change: Callable[[StageState, Event], StageState]) -> Callable[[PipelineState, Event], PipelineState]:
    """A rule about one stage, as a rule about the pipeline."""

    def rule(state: PipelineState, event: Event) -> PipelineState:
        after = change(state.stage(event.stage), event)
        known = any(stage.name == event.stage for stage in state.stages)
        stages = tuple(after if stage.name == event.stage else stage for stage in state.stages)
        current = event.stage if after.state == "running" else "" if state.current == event.stage else state.current
        return replace(state, stages=stages if known else (*state.stages, after), current=current)

    return rule


def _started(stage: StageState, event: Event) -> StageState:
    return StageState(stage.name, "running", attempt=event.att, log=str(event.d.get("log") or ""), started=event.t)


def _skipped(stage: StageState, event: Event) -> StageState:
    return replace(stage, state="skipped", why=str(event.d.get("why", "")))


def _not_needed(stage: StageState, event: Event) -> StageState:
    return replace(stage, state="not_needed", why=str(event.d.get("why", "")))


_PROGRESS_KEYS = frozenset({"done", "total", "unit", "rate", "eta_s", "eta_hi_s", "src"})


def _progress(stage: StageState, event: Event) -> StageState:
    d = event.d
    return replace(
        stage,
        progress=Progress(
            done=_number(d.get("done")) or 0.0,
            total=_number(d.get("total")) or 0.0,
            unit=str(d.get("unit", "")),
            t=event.t,
            rate=_number(d.get("rate")),
            eta_s=_number(d.get("eta_s")),
            eta_hi_s=_number(d.get("eta_hi_s")),
            detail={name: value for name, value in d.items() if name not in _PROGRESS_KEYS},
        ),
    )


def _metric(stage: StageState, event: Event) -> StageState:
    return replace(stage, metrics={**stage.metrics, **event.d})


def _check(stage: StageState, event: Event) -> StageState:
    ok = event.d.get("ok")
    made = (str(event.d.get("name", "")), ok if isinstance(ok, bool) else None, str(event.d.get("evidence", "")))
    return replace(stage, checks=(*stage.checks, made))


def _ready(stage: StageState, event: Event) -> StageState:
    return replace(stage, state="ready", verdict=dict(event.d))


def _stopped(stage: StageState, event: Event) -> StageState:
    return replace(stage, state="exited", why=str(event.d.get("why", "")))


def _ended(stage: StageState, event: Event) -> StageState:
    d = event.d
    ended = str(d.get("state", "failed"))
    good = ended == "succeeded"
    seconds = _number(d.get("seconds"))
    return replace(
        stage,
        state="ready" if good and stage.state == "ready" else ended,
        seconds=seconds if seconds is not None or stage.started is None else event.t - stage.started,
        failure=None if good else Failure(*(str(d.get(key) or "") for key in ("reason", "what", "fix"))),
        summary=_object(d.get("summary")),
    )


def _number(value: Any) -> float | None:
    """A finite number, or None: what a bar or an ETA can be drawn from."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


def _object(value: Any) -> Values:
    return value if isinstance(value, dict) else {}


_RULES: dict[str, Callable[[PipelineState, Event], PipelineState]] = {
    "pipeline_started": _pipeline_started,
    "pipeline_ended": _pipeline_ended,
    "needs_confirmation": _needs_confirmation,
    "warning": _warning,
    "stage_started": _stage(_started),
    "stage_skipped": _stage(_skipped),
    "stage_not_needed": _stage(_not_needed),
    "progress": _stage(_progress),
    "metric": _stage(_metric),
    "check": _stage(_check),
    "service_ready": _stage(_ready),
    "service_stopped": _stage(_stopped),
    "stage_ended": _stage(_ended),
}
