"""Prompt and completion: `{"prompt": …, "completion": …}`; `response` is read as `completion`.

Either may be a text (one user turn, one assistant turn) or a list of OpenAI messages.
"""

from __future__ import annotations

from typing import Any

from backend.data.readers.base import Format, text_of
from backend.data.readers.openai import message_list
from backend.data.records import Message, Role, Unusable

_ANSWERS = ("completion", "response")


def _recognise(value: Any) -> str | None:
    if isinstance(value, dict) and "prompt" in value and "messages" not in value:
        for name in _ANSWERS:
            if name in value:
                return f'"prompt" and "{name}"'
    return None


def _messages(value: Any) -> list[Message]:
    if _recognise(value) is None:
        raise Unusable("wrong_shape", 'no "prompt" and "completion"')
    answer = next(name for name in _ANSWERS if name in value)
    return _side(value["prompt"], "user", "prompt") + _side(value[answer], "assistant", answer)


def _side(value: Any, role: Role, name: str) -> list[Message]:
    if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
        return message_list(value)
    return [Message(role, text_of(value, f'"{name}"'))]


FORMAT = Format("prompt-completion", _recognise, _messages)
