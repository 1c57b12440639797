"""Numbers and stages as phrases, shared by the plain and the live view, `status` and the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from console.marks import duration, mark, size
from console.sanitise import clean
from console.state import PipelineState, Progress, StageState

RATES = frozenset({"tokens_s", "gb_s"})
"""Names in `_s` that are rates per second; every other name in `_s` is a time in seconds."""
SOURCE_SEQ = "src"
"""A forwarded event's number in its attempt: for machines."""


def count(value: float) -> str:
    """`37,312`, or `0.83` for what is not whole."""
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"


def amount(name: str, value: Any) -> str:
    """A number of a plan or summary in the unit that its name ends with; any other value as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return clean(str(value))
    if name.endswith("bytes"):
        return size(value)
    if name in RATES:
        return f"{count(value)}/s"
    if name.endswith(("seconds", "_s")):
        return duration(value)
    if name == "gb" or name.endswith("_gb"):
        return size(value * 1e9)
    if name.endswith("hours") and not name.startswith("gpu"):
        return duration(value * 3600)
    return count(value)


def progress(state: Progress) -> str:
    """`1,412,006/2,520,000 samples 56 % · 54.3/s · ETA 5 h 40 min … 7 h 00 min`."""
    unit = clean(state.unit)
    if state.unit == "bytes":
        parts = [f"{size(state.done)} of {size(state.total)}"]
    else:
        parts = [f"{count(state.done)}/{count(state.total)} {unit}"]
    if state.total > 0:
        parts[0] += f" {int(state.share * 100)} %"
    if state.rate is not None:
        parts.append(f"{size(state.rate)}/s" if state.unit == "bytes" else f"{state.rate:,.3g}/s")
    if state.eta_s is not None and state.share < 1:
        parts.append("ETA " + eta(state))
    return " · ".join([*parts, *([metrics(state.detail)] if state.detail else [])])


def eta(state: Progress) -> str:
    """The host's range; one figure only where both ends read the same."""
    low = duration(state.eta_s or 0)
    high = duration(state.eta_hi_s) if state.eta_hi_s is not None else low
    return low if low == high else f"{low} … {high}"


def metrics(values: Mapping[str, Any]) -> str:
    """`step 118 · loss 1.83 · accept_length 1.41`."""
    shown = {str(name): value for name, value in values.items() if name != SOURCE_SEQ}
    return " · ".join(
        f"{clean(name.removesuffix('_s') if name in RATES else name)} {amount(name, value)}"
        for name, value in shown.items()
    )


def check(values: Mapping[str, Any]) -> str:
    """`✓ name: evidence`; a check that could not be made on this host is neither good nor bad."""
    sign = "-" if values.get("ok") is None else mark("succeeded" if values["ok"] else "failed").glyph
    return f"{sign} {values.get('name', '')}: {values.get('evidence', '')}"


def outcome(stage: StageState) -> str:
    """What became of a stage, after its mark's word: why it was skipped, how long it took, what went wrong."""
    if stage.failure is not None:
        return ": ".join(part for part in (clean(stage.failure.reason), clean(stage.failure.what)) if part)
    if stage.why:
        return clean(stage.why)
    return f"in {duration(stage.seconds)}" if stage.seconds is not None else ""


def position(state: PipelineState, name: str) -> str:
    """`[3/11]`, so that a line tells how far the pipeline is."""
    names = [stage.name for stage in state.stages]
    return f"[{names.index(name) + 1}/{len(names)}]" if name in names else "[-]"


def status_word(state: str) -> str:
    """Glyph and word, for output without colours."""
    return f"{mark(state).glyph} {mark(state).word}"
