"""Which stores are spoken for: every running, stale or unfinished attempt of this home that names one."""

from __future__ import annotations

from backend.runs.atomic import read_json
from backend.runs.layout import Home
from backend.runs.state import state as state_of
from backend.stages.handover import INPUT, OPENED


def stores_in_use(home: Home) -> dict[str, list[str]]:
    """Folder of a store → attempts that need it: a training that reads it, an extraction that writes it."""
    used: dict[str, list[str]] = {}
    for pipeline in home.pipelines():
        for name in ("extract", "train"):
            for attempt in pipeline.attempts(name):
                if state_of(attempt.path).state not in ("running", "stale"):
                    continue
                products = (read_json(attempt.path / INPUT) or {}).get("products", {})
                opened = read_json(attempt.path / OPENED)
                for folder in (
                    products.get("extract", {}).get("outputs", {}).get("store"),
                    (opened or {}).get("store"),
                ):
                    if folder:
                        used.setdefault(folder, []).append(str(attempt.path))
    return used
