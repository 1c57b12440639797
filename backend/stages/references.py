"""Which stores are spoken for: those that an unfinished pipeline of this home, extraction or training names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from backend.agent.pilots import pilot_attempts
from backend.runs.atomic import read_json
from backend.runs.layout import Attempt, Home, Pipeline
from backend.runs.state import state as state_of
from backend.stages.handover import INPUT, OPENED


def stores_in_use(home: Home, beside: Path | None = None) -> dict[str, list[str]]:
    """Folder of a store → attempts that need it, those of the pipeline `beside` left out.

    A pipeline whose newest pilot did not succeed can be resumed: every store that it has filled or read is needed,
    also where extract succeeded and train has not begun. Beyond that an extraction or training that failed or was
    stopped counts: it can be taken up again. Only a pipeline's newest attempt of a stage speaks for it.
    """
    used: dict[str, list[str]] = {}
    for pipeline in home.pipelines():
        if pipeline.path == beside:
            continue
        for attempt in _speaking(pipeline):
            products = (read_json(attempt.path / INPUT) or {}).get("products", {})
            opened = read_json(attempt.path / OPENED) or {}
            read = products.get("extract", {}).get("outputs", {}).get("store")
            for folder in {read, opened.get("store")} - {None}:
                used.setdefault(folder, []).append(str(attempt.path))
    return used


def _speaking(pipeline: Pipeline) -> Iterator[Attempt]:
    """The newest attempts that a pipeline still needs the stores of."""
    pilots = pilot_attempts(pipeline)
    unfinished = bool(pilots) and state_of(pilots[-1].path).state != "succeeded"
    for _, name, _ in pipeline.stages():
        attempt = pipeline.current(name)
        if attempt is None:
            continue
        if unfinished or (name in ("extract", "train") and state_of(attempt.path).state != "succeeded"):
            yield attempt
