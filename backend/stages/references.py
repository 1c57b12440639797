"""Which stores are spoken for: every extraction or training of this home that has not succeeded and names one."""

from __future__ import annotations

from backend.runs.atomic import read_json
from backend.runs.layout import Home
from backend.runs.state import state as state_of
from backend.stages.handover import INPUT, OPENED


def stores_in_use(home: Home) -> dict[str, list[str]]:
    """Folder of a store → attempts that need it.

    An attempt that failed or was stopped counts too: it can be taken up again. Only a pipeline's newest attempt of a
    stage speaks for it.
    """
    used: dict[str, list[str]] = {}
    for pipeline in home.pipelines():
        for name in ("extract", "train"):
            attempt = pipeline.current(name)
            if attempt is None or state_of(attempt.path).state == "succeeded":
                continue
            products = (read_json(attempt.path / INPUT) or {}).get("products", {})
            opened = read_json(attempt.path / OPENED) or {}
            read = products.get("extract", {}).get("outputs", {}).get("store")
            for folder in {read, opened.get("store")} - {None}:
                used.setdefault(folder, []).append(str(attempt.path))
    return used
