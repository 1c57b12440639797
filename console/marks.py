"""How a state looks: glyph, word and colour, always all three, so that neither colour nor glyph alone carries it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """`style` is a Rich style; `word` is what plain output, `status` and tests show."""

    glyph: str
    word: str
    style: str


MARKS = {
    "pending": Mark("·", "waiting", "dim"),
    "running": Mark("▶", "running", "bold cyan"),
    "ready": Mark("●", "ready", "bold green"),
    "succeeded": Mark("✓", "done", "green"),
    "skipped": Mark("»", "skipped", "dim green"),
    "not_needed": Mark("–", "not needed", "dim"),
    "exited": Mark("○", "stopped", "dim"),
    "failed": Mark("✗", "failed", "bold red"),
    "cancelled": Mark("■", "cancelled", "yellow"),
    "stale": Mark("?", "stale", "bold magenta"),
}

_UNKNOWN = Mark("?", "unknown", "magenta")


def mark(state: str) -> Mark:
    """The mark of a state; a word from a newer host is shown as "unknown", never as a good state."""
    return MARKS.get(state, _UNKNOWN)


def duration(seconds: float) -> str:
    """Seconds as an operator reads them: `41 s`, `3 min 20 s`, `5 h 12 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    """Bytes in decimal units, as disks are sold: `924.1 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
