"""Alpaca: `{"instruction", "input", "output"}`, optionally with `system` and `history` ([[question, answer], …]).

A non-empty `input` follows the instruction after a blank line. The prose frame of the original Alpaca ("Below is an
instruction …") is not added: the target's chat template takes its place.
"""

from __future__ import annotations

from typing import Any

from backend.data.readers.base import Format, text_of
from backend.data.records import Message, Unusable


def _recognise(value: Any) -> str | None:
    if isinstance(value, dict) and "instruction" in value and "output" in value:
        return '"instruction" and "output"'
    return None


def _messages(value: Any) -> list[Message]:
    if _recognise(value) is None:
        raise Unusable("wrong_shape", 'no "instruction" and "output"')
    messages = [Message("system", text_of(value["system"], '"system"'))] if value.get("system") else []
    for pair in value.get("history") or ():
        if not (isinstance(pair, list) and len(pair) == 2):
            raise Unusable("wrong_shape", '"history" is not a list of [question, answer]')
        messages += [Message("user", text_of(pair[0], "history")), Message("assistant", text_of(pair[1], "history"))]
    question = text_of(value["instruction"], '"instruction"')
    if value.get("input"):
        question = f"{question}\n\n{text_of(value['input'], chr(34) + 'input' + chr(34))}"
    return [*messages, Message("user", question), Message("assistant", text_of(value["output"], '"output"'))]


FORMAT = Format("alpaca", _recognise, _messages)
