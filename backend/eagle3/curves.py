"""What a training run tells while it runs: metric events at a bearable rate, and TensorBoard event files.

Owns: the names and the throttling of these numbers. Does not know how they are computed.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from backend.eagle3.accept import AcceptEstimate
from backend.report import Reporter

METRIC_EVERY_S = 1.0


class Curves:
    """Sends each point to the reporter and to `<folder>` as TensorBoard scalars. Use as a context manager."""

    def __init__(self, folder: Path, reporter: Reporter, start_step: int) -> None:
        self._reporter = reporter
        # a resumed run takes up at its checkpoint: points that the lost part wrote after it must not stay
        self._writer = SummaryWriter(str(folder), purge_step=start_step or None)
        self._last_at: float | None = None
        self._losses: list[float] = []

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._writer.close()

    def training(self, step: int, seconds: float, loss: float, values: dict[str, float]) -> None:
        """One optimizer step; sent at most every `METRIC_EVERY_S` training seconds, the loss as the mean since then."""
        self._losses.append(loss)
        if self._last_at is not None and seconds - self._last_at < METRIC_EVERY_S:
            return
        self._last_at = seconds
        point = {"loss": sum(self._losses) / len(self._losses), **values}
        self._losses.clear()
        self._send("train", step, point)

    def accept(self, step: int, estimate: AcceptEstimate) -> None:
        """An evaluation on the validation records; always sent."""
        values = {
            "accept_length": estimate.anchor_mean,
            "serving_walk": estimate.walk.accept_length,
            "serving_walk_low": estimate.walk.low,
            "serving_walk_high": estimate.walk.high,
        }
        self._send("validation", step, values)

    def _send(self, group: str, step: int, values: dict[str, float]) -> None:
        self._reporter.metric(step=step, **values)
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
