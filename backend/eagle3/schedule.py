"""The learning rate over a run: linear warm-up, then a cosine down to a twentieth, over steps or over wall time.

A cosine over epochs that a time limit cuts off never decays, and the decay is where much of the accept length comes
from; hence `cosine_wall`. Owns only this arithmetic.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine_steps", "cosine_wall"]
FLOOR = 0.05


def share_done(schedule: Schedule, step: int, total_steps: int, seconds: float, max_seconds: float | None) -> float:
    """How far the run will be after step number `step` (0-based): 0 … 1. Wall time counts in `cosine_wall` alone."""
    by_steps = (step + 1) / max(total_steps, 1)
    by_wall = seconds / max_seconds if schedule == "cosine_wall" and max_seconds else 0.0
    return min(1.0, max(by_steps, by_wall))


def lr_factor(share: float, warmup_share: float) -> float:
    """Factor on the peak learning rate at `share` of the run."""
    warm = min(1.0, share / warmup_share) if warmup_share > 0 else 1.0
    return warm * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))
