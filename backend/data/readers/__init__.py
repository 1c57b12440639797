"""The source formats: one module and one line here for each.

`detect` decides by content, over the first records of a source, and says why; a name given in the config decides
without looking. Owns the registry; the formats know neither each other nor the files they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.data.readers import alpaca, openai, prompt_completion, question_answer, sharegpt
from backend.data.readers.base import Format
from backend.errors import OperatorError, UsageError

FORMATS: Mapping[str, Format] = {
    format_.name: format_
    for format_ in (
        openai.FORMAT,
        sharegpt.FORMAT,
        alpaca.FORMAT,
        prompt_completion.FORMAT,
        question_answer.FORMAT,
    )
}

__all__ = ["FORMATS", "Detected", "Format", "check_name", "choose"]


@dataclass(frozen=True)
class Detected:
    """The format of a source, and why it was chosen."""

    format: Format
    why: str


def check_name(name: str, source: str) -> None:
    """Refuse a configured format that does not exist.

    Raises:
        UsageError: `name` is neither ``auto`` nor registered.
    """
    if name != "auto" and name not in FORMATS:
        raise UsageError(
            f"source {source}: there is no format {name!r}", fix=f"use auto or one of: {', '.join(FORMATS)}"
        )


def choose(name: str, samples: Sequence[Any], source: str) -> Detected:
    """The format called `name`, or for ``auto`` the one that most of `samples` (not empty) look like.

    Raises:
        OperatorError: ``auto`` and more than half of the samples look like no single format.
    """
    if name != "auto":
        return Detected(FORMATS[name], "set in the config")
    votes: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for sample in samples:
        for format_ in FORMATS.values():
            why = format_.recognise(sample)
            if why is not None:
                votes[format_.name] += 1
                reasons.setdefault(format_.name, why)
    best = votes.most_common(1)[0] if votes else ("", 0)
    if 2 * best[1] <= len(samples):
        raise OperatorError(
            f"source {source}: its records look like none of the known formats; the first is {_shape(samples[0])}",
            fix=f"set format to one of: {', '.join(FORMATS)}; or convert the source to OpenAI messages",
            reason="unknown_format",
        )
    return Detected(FORMATS[best[0]], f"{best[1]} of the first {len(samples)} records have {reasons[best[0]]}")


def _shape(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with the keys {', '.join(sorted(map(str, value))[:8]) or '(none)'}"
    return f"a {type(value).__name__}"
