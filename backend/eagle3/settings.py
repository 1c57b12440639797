"""The settings of a training run, and which of them a checkpoint must agree with.

Owns: defaults, bounds and that distinction. The configuration file's `[train]` section maps onto this one to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.eagle3.draft import draft_class
from backend.eagle3.initial import INITS
from backend.eagle3.schedule import Schedule
from backend.errors import UsageError

# A run may be continued with other values of these: they change neither the batches nor the optimizer's path
# (max_seconds does under `cosine_wall`, where giving a run more time is the point).
_FREE = ("max_seconds", "threads", "device", "eval_every_s", "eval_every_steps", "checkpoint_every_s",
         "checkpoint_every_steps", "keep_checkpoints")  # fmt: skip


@dataclass(frozen=True)
class TrainSettings:
    """One run. Evaluation and checkpoints are due after so many training seconds or steps, whichever comes first."""

    ttt_steps: int = 7
    batch_tokens: int = 8192
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    warmup_share: float = 0.015
    schedule: Schedule = "cosine_steps"
    epochs: int = 1
    max_seconds: float | None = None
    seed: int = 0
    draft_vocab_size: int = 32000
    init: str = "random"
    arch: str = "llama"
    layers: tuple[int, ...] | None = None
    threads: int | None = None
    device: str = "cpu"
    eval_every_s: float | None = 600.0
    eval_every_steps: int | None = None
    checkpoint_every_s: float | None = 600.0
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        """Raises `UsageError` naming the setting (reason `train_settings`, `draft_arch` or `init_unknown`)."""
        draft_class(self.arch)
        if self.init not in INITS:
            raise UsageError(f"no initial weights {self.init!r}", fix=f"one of {INITS}", reason="init_unknown")
        for name in ("ttt_steps", "batch_tokens", "lr", "clip", "epochs", "draft_vocab_size", "keep_checkpoints"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} = {getattr(self, name)} must be above 0", reason="train_settings")
        if not 0 <= self.warmup_share < 1:
            raise UsageError(f"warmup_share = {self.warmup_share} must be in [0, 1)", reason="train_settings")
        if self.schedule == "cosine_wall" and self.max_seconds is None:
            raise UsageError('schedule = "cosine_wall" needs max_seconds', reason="train_settings")

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued."""
        return {name: value for name, value in vars(self).items() if name not in _FREE}
