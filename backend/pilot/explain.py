"""`explain STAGE`: why a stage runs, is skipped, or is not needed, down to the first input that differs."""

from __future__ import annotations

from typing import Any

from backend.pilot.decide import Selection, decide
from backend.pilot.history import History
from backend.stages.base import StageContext
from backend.stages.registry import stage_named


def explain(ctx: StageContext, selection: Selection, name: str) -> dict[str, Any]:
    """What would happen with one stage now, why, and the material behind it.

    Raises:
        UsageError: there is no such stage.
    """
    stage = stage_named(name)
    history = History(ctx.home)
    decision = next(decision for decision in decide(ctx, selection, history) if decision.stage == stage.name)
    return {
        "stage": name,
        "action": decision.action,
        "why": decision.why,
        "fingerprint": decision.fingerprint,
        "material": decision.material,
        "attempts": [str(attempt) for attempt in history.attempts(name)][:5],
    }
