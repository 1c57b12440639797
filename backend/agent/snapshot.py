"""Everything that stands on the host, in one cheap look: pipelines, the states of their pilots and stages, progress.

Reads small files only (plan, exit, progress), never a log or an event history, so that it costs the same for a run of
an hour and of a week. What was skipped stands in the pilot's `skipped.json`; what it has not reached yet, in the plan.
"""

from __future__ import annotations

import time
from typing import Any

from backend.agent import pilots
from backend.runs.atomic import read_json
from backend.runs.layout import Home, Pipeline
from backend.runs.state import state

_PLANNED = {"skip": "skipped", "not_needed": "not_needed", "outside": "not_needed"}


def snapshot(home: Home, limit: int | None = None) -> dict[str, Any]:
    """All pipelines, newest first, or the newest `limit`."""
    known = home.pipelines()[::-1]
    return {
        "v": 1,
        "t": time.time(),
        "home": str(home.path),
        "total": len(known),
        "pipelines": [_pipeline(pipeline) for pipeline in (known if limit is None else known[:limit])],
    }


def _pipeline(pipeline: Pipeline) -> dict[str, Any]:
    plan = read_json(pipeline.plan) or {}
    attempted = {name: path for _, name, path in pipeline.stages()}
    planned = {str(stage["name"]): stage for stage in plan.get("stages", [])}
    for name, skipped in (read_json(pipeline.skipped) or {}).items():
        planned[name] = {**planned.get(name, {}), **skipped}
    names = [*planned, *(name for name in attempted if name not in planned)]
    return {
        "id": pipeline.id,
        "name": plan.get("name", ""),
        "created": plan.get("created"),
        "operator": plan.get("operator"),
        "key": plan.get("key"),
        "pilot": pilots.pilot_state(pipeline),
        "events_bytes": _size(pipeline),
        "stages": [_stage(pipeline, name, planned.get(name, {}), attempted=name in attempted) for name in names],
    }


def _stage(pipeline: Pipeline, name: str, planned: dict[str, Any], *, attempted: bool) -> dict[str, Any]:
    current = pipeline.current(name) if attempted else None
    if current is None:
        return {
            "name": name,
            "kind": planned.get("kind", "task"),
            "state": _PLANNED.get(str(planned.get("action")), "pending"),
            "attempt": 0,
            "why": planned.get("why", ""),
        }
    now = state(current.path)
    return {
        "name": name,
        "kind": planned.get("kind", "task"),
        **pilots.brief(current, now),
        "log": str(current.log),
        "progress": None if now.ended else read_json(pilots.task_of(current).progress),
    }


def _size(pipeline: Pipeline) -> int:
    try:
        return pipeline.events.stat().st_size
    except FileNotFoundError:
        return 0
