"""Pipelines and their pilots on disk: finding them, their states, and the attempts a request means.

A pilot is the process that drives a pipeline; its attempts stand beside the stages', in `<pipeline>/pilot/attempts/n`,
since a pilot that ended may be followed by another one (resume). Owns those paths; the rest is `backend.runs.layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.errors import UsageError
from backend.runs.atomic import read_json
from backend.runs.layout import Attempt, Home, Pipeline
from backend.runs.state import AttemptState, state

PILOT = "pilot"
PROOF = "proof"


def existing(home: Home, args: Mapping[str, Any]) -> Pipeline:
    """The pipeline that `args["pipeline"]` names; the newest where it is None.

    Raises:
        UsageError: there is none (reason ``no_pipeline``).
    """
    wanted = args.get("pipeline")
    if wanted is None:
        if known := home.pipelines():
            return known[-1]
        raise UsageError(
            f"there is no pipeline in {home.path}", fix="start one with `eagle3-console --auto`", reason="no_pipeline"
        )
    pipeline = home.pipeline(str(wanted))
    if not pipeline.path.is_dir():
        raise UsageError(
            f"there is no pipeline {wanted!r} in {home.path}", fix="`status` lists them", reason="no_pipeline"
        )
    return pipeline


def pilot_folder(pipeline: Pipeline) -> Path:
    """Where a pipeline's pilots have their attempts."""
    return pipeline.path / PILOT / "attempts"


def pilot_attempts(pipeline: Pipeline) -> list[Attempt]:
    """The pilots of a pipeline, oldest first."""
    folder = pilot_folder(pipeline)
    if not folder.is_dir():
        return []
    numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    return [Attempt(folder / str(number)) for number in numbers]


def pilot_state(pipeline: Pipeline) -> dict[str, Any]:
    """The state of the newest pilot as JSON; `ended` is True where it will write nothing more."""
    attempts = pilot_attempts(pipeline)
    if not attempts:
        return {"state": "pending", "attempt": 0, "ended": True, "reason": "no pilot was ever started"}
    return brief(attempts[-1], state(attempts[-1].path))


def to_resume(home: Home, key: str) -> Pipeline | None:
    """The pipeline that a start with this plan key goes on with: the newest of that key, if its last pilot did not
    succeed, or if a server of it still lives (loading it again would cost its whole load time)."""
    for pipeline in reversed(home.pipelines()):
        if (read_json(pipeline.plan) or {}).get("key") == key:
            ended_well = pilot_state(pipeline)["state"] == "succeeded"
            return pipeline if not ended_well or _serves(pipeline) else None
    return None


def _serves(pipeline: Pipeline) -> bool:
    newest = (pipeline.current(name) for _, name, _ in pipeline.stages())
    return any(attempt is not None and state(attempt.path).state == "ready" for attempt in newest)


def summary(pipeline: Pipeline) -> Any:
    """What the newest pilot wrote as `summary` into its `outputs.json`; None where it wrote none."""
    attempts = pilot_attempts(pipeline)
    return (read_json(attempts[-1].outputs) or {}).get("summary") if attempts else None


def brief(attempt: Attempt, now: AttemptState) -> dict[str, Any]:
    """What a console wants to know of an attempt."""
    return {
        "state": now.state,
        "attempt": attempt.number,
        "ended": now.ended or now.state == "pending",
        "reason": now.reason,
        "code": now.code,
        "signal": now.signal,
        "job_alive": now.job_alive,
        "t0": now.t0,
        "t1": now.t1,
        "pid": now.job.pid if now.job else None,
    }


def task_of(attempt: Attempt) -> Attempt:
    """The attempt that works: of a service, the one that proves it, which stands inside the server's."""
    proof = attempt.path / PROOF
    return Attempt(proof) if proof.is_dir() else attempt


def attempt(pipeline: Pipeline, stage: str, number: Any = None) -> Attempt:
    """An attempt of a stage, or of the pilot; the newest unless `number` says which.

    Raises:
        UsageError: no such stage or attempt in this pipeline (reason ``no_attempt``).
    """
    attempts = pilot_attempts(pipeline) if stage == PILOT else list(pipeline.attempts(stage))
    if not attempts:
        tried = [PILOT, *(name for _, name, _ in pipeline.stages())]
        raise UsageError(
            f"stage {stage!r} was not attempted in pipeline {pipeline.id}",
            fix=f"attempted so far: {', '.join(tried)}",
            reason="no_attempt",
        )
    if number is None:
        return attempts[-1]
    for candidate in attempts:
        if candidate.number == number:
            return candidate
    raise UsageError(
        f"stage {stage!r} has no attempt {number!r}",
        fix=f"attempts: {', '.join(str(candidate.number) for candidate in attempts)}",
        reason="no_attempt",
    )
