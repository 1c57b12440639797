"""The normal form of a dialogue and its content id.

Every reader ends here and every later step starts here. A record's id is a hash of what is said, by whom, in which
order: not of the file, the line or the source it came from, so it is stable over re-runs, renamed files and re-ordered
lines. Owns the canonical bytes under that hash: changing them changes every id in every store. Standard library only;
knows nothing of files, tokens or templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)

_PERSON = b"eagle3-record-1"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `cut` marks an assistant turn that ended at a token limit: its end-of-turn token was never produced,
    so none may be supervised."""

    role: Role
    content: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One dialogue in normal form: at least one assistant turn, the last turn is the assistant's, no turn is blank."""

    messages: tuple[Message, ...]

    @property
    def id(self) -> str:
        """The content id (32 lower-case hex digits)."""
        return content_id(self.messages)

    @property
    def prompt_key(self) -> str:
        """The content id of the prompt with case and spacing folded. Records that share it share their split, so that
        a held-out prompt is not trained on in another spelling."""
        return content_id(Message(m.role, " ".join(m.content.casefold().split())) for m in self.prompt)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The turns before the first assistant turn."""
        first = next(i for i, message in enumerate(self.messages) if message.role == "assistant")
        return self.messages[:first]


class Unusable(Exception):
    """What was read cannot become a training record; `reason` is a stable word for the counters.

    Readers, `normalise` and the chat template all raise this one type, and the merge counts it.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Normalised:
    """A record, and what was left off the dialogue to make it one (stable words for the counters)."""

    record: Record
    repairs: tuple[str, ...]


def normalise(turns: Sequence[Message]) -> Normalised:
    """Bring a dialogue into normal form.

    Turns behind the last assistant turn are left off (nothing in them is supervised), and so are assistant turns that
    stand before anyone spoke to it (an answer to nothing). Texts are kept to the byte.

    Raises:
        Unusable: no assistant turn is left, a turn is blank, or a text holds half of a surrogate pair.
    """
    repairs = []
    messages = list(turns)
    opening = next((i for i, m in enumerate(messages) if m.role not in ("system", "assistant")), len(messages))
    if any(m.role == "assistant" for m in messages[:opening]):
        repairs.append("leading_assistant")
        messages = [m for i, m in enumerate(messages) if i >= opening or m.role != "assistant"]
    last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=None)
    if last is None:
        raise Unusable("no_assistant_turn", f"{len(turns)} turns, none of them an answer of the assistant")
    if last + 1 < len(messages):
        repairs.append("trailing_turns")
    messages = messages[: last + 1]
    for j, message in enumerate(messages):
        if not message.content.strip():
            raise Unusable("blank_turn", f"turn {j} ({message.role}) is blank")
        try:
            message.content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Unusable("bad_unicode", f"turn {j} holds half of a surrogate pair") from error
    return Normalised(Record(tuple(messages)), tuple(repairs))


def content_id(messages: Iterable[Message]) -> str:
    """blake2b-128 over the canonical JSON of `messages`, in hex.

    Fields that are not set are not written, so that a field added later leaves the ids of older records as they were.
    """
    turns = [
        {"content": m.content, "role": m.role, "cut": True} if m.cut else {"content": m.content, "role": m.role}
        for m in messages
    ]
    canonical = json.dumps(turns, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8"), digest_size=16, person=_PERSON).hexdigest()
