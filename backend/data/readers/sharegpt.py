"""ShareGPT: `{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}`.

The spellings met in the wild are accepted: `conversation` for the list, `role` for `from`, `content` or `text` for
`value`, a `system` string beside the list, and the role names of `base.ROLE_SPELLINGS`.
"""

from __future__ import annotations

from typing import Any

from backend.data.readers.base import Format, role_of, text_of
from backend.data.records import Message, Unusable

_LISTS = ("conversations", "conversation")
_ROLES = ("from", "role")
_TEXTS = ("value", "content", "text")


def _recognise(value: Any) -> str | None:
    if isinstance(value, dict) and "messages" not in value:
        for name in _LISTS:
            if isinstance(value.get(name), list):
                return f'a "{name}" list'
    return None


def _messages(value: Any) -> list[Message]:
    turns = _first(value, _LISTS) if isinstance(value, dict) else None
    if not isinstance(turns, list):
        raise Unusable("wrong_shape", 'no "conversations" list')
    system = value.get("system")
    messages = [Message("system", text_of(system, '"system"'))] if system else []
    return messages + [_message(turn, f"turn {j}") for j, turn in enumerate(turns)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise Unusable("wrong_shape", f"{where} is {type(turn).__name__}, not an object")
    return Message(role_of(_first(turn, _ROLES)), text_of(_first(turn, _TEXTS), where))


def _first(value: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((value[name] for name in names if name in value), None)


FORMAT = Format("sharegpt", _recognise, _messages)
