"""Earlier attempts of all pipelines on this host: which result can be used again, and what changed since.

Reads attempt directories only. An earlier result counts when its fingerprint is equal *and* its outputs verify now;
`exit.json` with code 0 is the only proof that an attempt ended well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.errors import OperatorError
from backend.runs.atomic import read_json
from backend.runs.fingerprint import first_difference
from backend.runs.layout import Home
from backend.runs.state import state as state_of
from backend.stages.base import Product, Stage, StageContext
from backend.stages.handover import MATERIAL, read_product


class History:
    """All attempts under one home, newest first."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._doubts: dict[Path, str] = {}

    def attempts(self, stage: str) -> Iterator[Path]:
        """Attempt directories of a stage over all pipelines, newest pipeline first, newest attempt first."""
        for pipeline in reversed(self.home.pipelines()):
            yield from (attempt.path for attempt in reversed(pipeline.attempts(stage)))

    def verified(self, stage: Stage, ctx: StageContext, fingerprint: str) -> tuple[Product | None, str]:
        """The newest usable result with this fingerprint; else None and, if one was found but fails, why."""
        doubt = ""
        for attempt in self.attempts(stage.name):
            product = read_product(attempt, stage.name)
            if product is None or product.fingerprint != fingerprint or state_of(attempt).state != "succeeded":
                continue
            found = self._doubt(stage, ctx, product)
            if not found:
                return product, ""
            doubt = doubt or found
        return None, doubt

    def _doubt(self, stage: Stage, ctx: StageContext, product: Product) -> str:
        """Why a product does not verify, "" if it does. Looked at once in a process: the pilot decides often."""
        if product.attempt not in self._doubts:
            what = _failure(stage, ctx, product)
            self._doubts[product.attempt] = what and f"an earlier result no longer verifies: {what}"
        return self._doubts[product.attempt]

    def why_changed(self, stage: str, material: dict[str, Any]) -> str:
        """Why a stage must run: never run, not finished, or the first key that differs from the newest attempt."""
        for attempt in self.attempts(stage):
            before = read_json(attempt / MATERIAL)
            if before is None:
                continue
            change = first_difference(before, material)
            if change is None:
                return f"the last attempt with the same inputs ended {state_of(attempt).state}"
            key, old, new = change
            return f"{key} changed: {_short(old)} → {_short(new)}"
        return "never run for this config"

    def label(self, product: Product) -> str:
        """A short name of the attempt that made a product: pipeline and attempt number."""
        return f"{product.attempt.parents[3].name[-6:]} attempt {product.attempt.name}"


def _failure(stage: Stage, ctx: StageContext, product: Product) -> str:
    """The first check that fails, or the error of a result so damaged that it cannot even be checked."""
    try:
        failed = [check for check in stage.verify(ctx, product.outputs) if check.ok is False]
    except (OperatorError, OSError) as error:
        return error.what if isinstance(error, OperatorError) else str(error)
    return f"{failed[0].name}: {failed[0].evidence}" if failed else ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
