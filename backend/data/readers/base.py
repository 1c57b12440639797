"""What a source format is: how to know one of its records, and how to turn it into messages.

A format sees one decoded value (a dict from JSON, a list from YAML) and nothing else: no file, no line number, no
tokenizer. Owns the type that every format module fills and the spellings they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backend.data.records import Message, Role, Unusable


@dataclass(frozen=True)
class Format:
    """One line of the registry.

    `recognise` returns why a value looks like this format, or None; `messages` raises `Unusable`. A format's
    `recognise` must look at what sets it apart from the others, so that at most one of them answers.
    """

    name: str
    recognise: Callable[[Any], str | None]
    messages: Callable[[Any], list[Message]]


ROLE_SPELLINGS: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def role_of(spelling: Any) -> Role:
    """The role behind one of its spellings (any case).

    Raises:
        Unusable: not a known spelling.
    """
    role = ROLE_SPELLINGS.get(spelling.strip().lower()) if isinstance(spelling, str) else None
    if role is None:
        raise Unusable("unknown_role", f"role {spelling!r}")
    return role


def text_of(value: Any, what: str) -> str:
    """`value` as text: a string, or a list of text parts (joined).

    Raises:
        Unusable: anything else, such as an image part.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
        raise Unusable("not_text", f"{what} has a part that is not text")
    raise Unusable("wrong_shape", f"{what} is {type(value).__name__}, not text")
