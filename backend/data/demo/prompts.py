"""The demo's prompts: which first turns of two packages the target is asked to answer.

`chatterbot-corpus` (BSD) gives questions of 21 subjects, `chitchat-dataset` (MIT) its challenge questions and people's
opening messages. The choice is a pure function of the packages' content: candidates are put in the order of a keyed
hash and taken up to a cap, so it needs no random generator and no stored list. What is not chosen stays free for the
human sources (`sources.py`). Owns the selection and nothing else; the texts stay in their packages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from backend.data.records import Message, content_id
from backend.errors import OperatorError

Package = Literal["chatterbot", "chitchat"]

_YamlLoader: Any = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader

PER_SUBJECT = 30
"""At most this many prompts of one chatterbot subject, and at most two thirds of it."""
OPENERS = 40
"""Opening messages taken from chitchat, beside its challenge questions."""

_OPENER = re.compile(
    r"(What|Who|Which|Where|When|Why|How|If|Do|Does|Is|Are|Can|Could|Would|Should|Have)\b[^.?!]{20,}\?"
)
"""One message, one sentence, a question."""
_NOISE = re.compile(
    r"\b(you there|any ?(one|body)|some ?(one|body)|here|chat|byu|prompt|about you|kavanaugh|zuckerberg)\b",
    re.IGNORECASE,
)
"""Talk about the chat itself, and people whom a small model should not be asked about."""


@dataclass(frozen=True)
class Prompt:
    """One user turn that the target answers; `id` is the content id of that turn."""

    package: Package
    id: str
    text: str

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as the turns of a dialogue."""
        return (Message("user", self.text),)


@cache
def demo_prompts() -> tuple[Prompt, ...]:
    """All prompts, in their stable order; no two are equal after folding case and punctuation."""
    chosen: dict[str, tuple[Package, str]] = {}
    for subject in chatterbot_subjects().values():
        texts = sorted({text for dialogue in subject if _askable(text := dialogue[0])}, key=stable_key)
        for text in texts[: min(PER_SUBJECT, -(-2 * len(texts) // 3))]:
            chosen.setdefault(folded(text), ("chatterbot", text))
    dialogues = chitchat_dialogues()
    for text in sorted({d.challenge for d in dialogues if len(d.challenge) >= 12}, key=stable_key):
        chosen.setdefault(folded(text), ("chitchat", text))
    openers = {d.opening for d in dialogues if _is_opener(d.opening)}
    for text in sorted(openers, key=stable_key)[:OPENERS]:
        chosen.setdefault(folded(text), ("chitchat", text))
    return tuple(sorted((_prompt(package, text) for package, text in chosen.values()), key=lambda prompt: prompt.id))


def prompt_index() -> dict[str, Prompt]:
    """Every text that could be a prompt, by its content id: wider than `demo_prompts`, so that answers keep their
    prompts when the selection changes. A text of both packages counts as chatterbot's, as it does there."""
    texts: list[tuple[Package, str]] = []
    for subject in chatterbot_subjects().values():
        texts += [("chatterbot", dialogue[0]) for dialogue in subject]
    for dialogue in chitchat_dialogues():
        texts += [("chitchat", dialogue.challenge), ("chitchat", dialogue.opening)]
    index: dict[str, Prompt] = {}
    for prompt in (_prompt(package, text) for package, text in texts if text):
        index.setdefault(prompt.id, prompt)
    return index


def folded(text: str) -> str:
    """`text` without case, punctuation and spacing: the key under which two prompts count as the same."""
    return " ".join(re.findall(r"[a-z0-9]+", text.casefold()))


@cache
def chatterbot_subjects() -> dict[str, tuple[tuple[str, ...], ...]]:
    """Subject -> dialogues (turns, alternating) of the English corpus, subjects and dialogues in file order."""
    subjects: dict[str, tuple[tuple[str, ...], ...]] = {}
    for path in sorted((package_dir("chatterbot_corpus") / "data" / "english").glob("*.yml")):
        dialogues = yaml.load(path.read_bytes(), _YamlLoader)["conversations"]
        subjects[path.stem] = tuple(tuple(turn.strip() for turn in dialogue) for dialogue in dialogues if dialogue)
    return subjects


@dataclass(frozen=True)
class Chitchat:
    """One dialogue between two people about the challenge question that they were given.

    `turns` alternate; `opening` is the first one where it was sent as a single message, else empty.
    """

    challenge: str
    opening: str
    turns: tuple[str, ...]


@cache
def chitchat_dialogues() -> tuple[Chitchat, ...]:
    """All dialogues of the package, in the order of their keys. A turn is a sender's messages joined by a space."""
    path = package_dir("chitchat_dataset") / "dataset.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tuple(_chitchat(data[key]) for key in sorted(data))


def package_dir(name: str) -> Path:
    """Folder of an installed package, without importing it.

    Raises:
        OperatorError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise OperatorError(
            f"the package {name} is not installed",
            fix=f"install it into this environment: pip install --no-deps {name.replace('_', '-')}",
            reason="package_missing",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def stable_key(text: str) -> bytes:
    """A sort key that mixes texts and depends on nothing but each text itself."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=b"eagle3-demo").digest()


def _chitchat(dialogue: dict[str, Any]) -> Chitchat:
    spoken = [[text for message in turn if (text := message["text"].strip())] for turn in dialogue["messages"]]
    turns = tuple(" ".join(texts) for texts in spoken if texts)
    opening = spoken[0][0] if spoken and len(spoken[0]) == 1 else ""
    return Chitchat((dialogue.get("prompt") or "").strip(), opening, turns)


def _prompt(package: Package, text: str) -> Prompt:
    return Prompt(package, content_id([Message("user", text)]), text)


def _askable(text: str) -> bool:
    return 12 <= len(text) <= 240 and text.isascii() and "\n" not in text


def _is_opener(text: str) -> bool:
    return _askable(text) and _OPENER.fullmatch(text) is not None and not _NOISE.search(text)
