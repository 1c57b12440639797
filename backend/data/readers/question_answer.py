"""Questions and answers: a plain list of texts that alternate, user first; or `{"question": …, "answer": …}`.

The lists are what the YAML files of chatterbot's corpus hold under `conversations`.
"""

from __future__ import annotations

from typing import Any

from backend.data.readers.base import Format, text_of
from backend.data.records import Message, Unusable


def _recognise(value: Any) -> str | None:
    if isinstance(value, list) and len(value) >= 2 and all(isinstance(turn, str) for turn in value):
        return "a list of alternating texts"
    if isinstance(value, dict) and "question" in value and "answer" in value:
        return '"question" and "answer"'
    return None


def _messages(value: Any) -> list[Message]:
    if isinstance(value, dict):
        if _recognise(value) is None:
            raise Unusable("wrong_shape", 'no "question" and "answer"')
        value = [value["question"], value["answer"]]
    if not isinstance(value, list):
        raise Unusable("wrong_shape", f"{type(value).__name__}, not a list of turns")
    return [Message("assistant" if j % 2 else "user", text_of(turn, f"turn {j}")) for j, turn in enumerate(value)]


FORMAT = Format("question-answer", _recognise, _messages)
