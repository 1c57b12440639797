"""OpenAI messages: `{"messages": [{"role", "content"}, …]}`.

`"finish_reason": "length"` on an assistant message marks an answer that met its token limit. Fields that would change
what the target is shown or trained on, and that the normal form cannot hold yet, refuse the record: leaving them out
silently would train on a dialogue that never took place.
"""

from __future__ import annotations

from typing import Any

from backend.data.readers.base import Format, role_of, text_of
from backend.data.records import Message, Unusable

_UNSUPPORTED = ("tool_calls", "function_call", "reasoning_content", "reasoning")


def _recognise(value: Any) -> str | None:
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return 'a "messages" list'
    return None


def _messages(value: Any) -> list[Message]:
    turns = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(turns, list):
        raise Unusable("wrong_shape", 'no "messages" list')
    if value.get("tools"):
        raise Unusable("unsupported_field", '"tools" is set')
    return message_list(turns)


def message_list(turns: list[Any]) -> list[Message]:
    """A list of OpenAI message objects as messages; shared with formats that embed such lists.

    Raises:
        Unusable: a turn has the wrong shape, an unknown role or an unsupported field.
    """
    return [_message(turn, f"turn {j}") for j, turn in enumerate(turns)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise Unusable("wrong_shape", f"{where} is {type(turn).__name__}, not an object")
    for field in _UNSUPPORTED:
        if turn.get(field):
            raise Unusable("unsupported_field", f"{where} has {field!r}")
    if turn.get("weight", 1) != 1:
        raise Unusable("unsupported_field", f"{where} has a weight of {turn['weight']!r}")
    role = role_of(turn.get("role"))
    cut = role == "assistant" and turn.get("finish_reason") == "length"
    return Message(role, text_of(turn.get("content"), where), cut)


FORMAT = Format("openai", _recognise, _messages)
