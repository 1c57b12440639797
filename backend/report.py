"""How long work tells what it does: the `Reporter` that library code takes and the `Check` that proofs are made of.

Library code (data, store, engine, eagle3) knows only this protocol; where the words end up (an attempt's
`events.jsonl`, a test's list, nowhere) is the caller's business. Standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Check:
    """One proof with its evidence. `ok` is None where the check could not be made on this host (and says why)."""

    name: str
    ok: bool | None
    evidence: str
    detail: dict[str, Any] = field(default_factory=dict)
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, as written into verdicts, `outputs.json` and events."""
        return asdict(self)


class Reporter(Protocol):
    """Receiver of progress. Calls are cheap, may come from one thread only, and never raise."""

    def progress(self, done: int, total: int, unit: str, **detail: float | int | str) -> None:
        """`done` of `total` `unit`s; `detail` carries rates and byte counts. Callers need not throttle."""

    def metric(self, **values: float | int | str) -> None:
        """One point of a curve, e.g. ``step=, loss=, accept_length=``."""

    def note(self, text: str) -> None:
        """A fact worth a line in the log."""

    def warning(self, text: str) -> None:
        """Something the operator should look at; the work goes on."""

    def check(self, check: Check) -> None:
        """A check was made (in gates and verifications, as they pass)."""


class Silent:
    """A reporter for callers that want no news (tests, one-off tools)."""

    def progress(self, done: int, total: int, unit: str, **detail: float | int | str) -> None:
        """Ignored."""

    def metric(self, **values: float | int | str) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def warning(self, text: str) -> None:
        """Ignored."""

    def check(self, check: Check) -> None:
        """Ignored."""
