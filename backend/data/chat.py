"""Dialogue -> token ids and loss spans, with the target's own chat template and tokenizer.

A turn's span is found by prefix difference on token ids: what the template renders up to the generation prompt of
turn j must be a prefix of what it renders with turn j. No offsets, no regular expression over rendered text: right for
slow (tiktoken) tokenizers as well. Each span ends with the end-of-turn token; the template's line break behind it is
outside, because serving stops before it. Owns this rule and the two hashes that tie data to a template and a
tokenizer; knows nothing of files or sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from backend.data.records import Message, Record, Unusable
from backend.errors import OperatorError

_PROBE = ("ping", "pong")


@dataclass(frozen=True)
class Tokenised:
    """One training record: `spans` are [start, end) over `input_ids`, one per assistant turn, in order.

    `input_ids` end where the last span ends: nothing behind it can be supervised. `turns` is how many turns of the
    dialogue it covers: fewer than all where a rewriting template forced a split.
    """

    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    turns: int


class ChatFormat:
    """The chat template and tokenizer of one target.

    `closing_ids` is what the template puts behind an assistant turn's text: the end-of-turn token first.
    """

    def __init__(self, tokenizer: Any, *, end_ids: Sequence[int] = ()) -> None:
        """`end_ids`: further ids that end a turn (of the generation config), beside the tokenizer's own EOS.

        Raises:
            OperatorError: no chat template, or one whose end of turn cannot be told from the text before it.
        """
        if not tokenizer.chat_template:
            raise OperatorError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template",
                fix="use the instruction-tuned model's own folder, with its chat_template",
                reason="no_template",
            )
        self.tokenizer = tokenizer
        self._specials = tuple(_special_texts(tokenizer))
        self.closing_ids = self._probe_closing({tokenizer.eos_token_id, *end_ids})

    @classmethod
    def load(cls, model_dir: Path, *, trust_remote_code: bool = False) -> ChatFormat:
        """The format of the model in `model_dir` (nothing is fetched).

        Raises:
            OperatorError: the folder has no usable tokenizer or template.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise OperatorError(
                f"no tokenizer can be loaded from {model_dir}: {error}",
                fix="give a model folder with its tokenizer files; a tokenizer with code of its own needs "
                "[target] trust_remote_code = true",
                reason="no_tokenizer",
            ) from error
        return cls(tokenizer, end_ids=_generation_end_ids(model_dir))

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """What the target is given before it answers `messages`: the template with its generation prompt.

        A default system turn that the template adds is in it, as it is when the server renders the same messages.

        Raises:
            Unusable: the template refuses the messages.
        """
        return self._render(messages, generation=True)

    def tokenise(self, record: Record) -> list[Tokenised]:
        """One `Tokenised` for the dialogue; several, one per assistant turn, where the template rewrites earlier turns
        (such as dropping their reasoning) so that no single token sequence holds them all as they were produced.

        Raises:
            Unusable: the template refuses it, its text contains special tokens, or a turn's prefix differs.
        """
        self._refuse_special_texts(record)
        turns = [self._turn(record, j) for j, m in enumerate(record.messages) if m.role == "assistant"]
        whole = turns[-1].input_ids
        if all(whole[: len(turn.input_ids)] == turn.input_ids for turn in turns):
            return [Tokenised(whole, tuple(turn.spans[0] for turn in turns), len(record.messages))]
        return turns

    def template_hash(self) -> str:
        """blake2b-128 (hex) of the chat template's text."""
        return _hash(json.dumps(self.tokenizer.chat_template, sort_keys=True))

    def tokenizer_hash(self) -> str:
        """blake2b-128 (hex) of the vocabulary, the special tokens and the ids of a fixed text.

        The text stands for what the vocabulary does not tell: merges, normalisation, pre-tokenisation.
        """
        tokenizer = self.tokenizer
        sample = tokenizer.encode(_HASH_TEXT, add_special_tokens=False)
        return _hash(json.dumps([sorted(tokenizer.get_vocab().items()), sorted(self._specials), sample]))

    def _turn(self, record: Record, j: int) -> Tokenised:
        """The dialogue up to assistant turn `j`, supervised in that turn only."""
        message = record.messages[j]
        prompt = self._render(record.messages[:j], generation=True)
        ids = self._render(record.messages[: j + 1], generation=False)
        if ids[: len(prompt)] != prompt:
            raise Unusable("prefix_differs", f"turn {j}: the generation prompt is not a prefix of the answered turn")
        text_end = len(ids) - len(self.closing_ids)
        if text_end <= len(prompt) or ids[text_end:] != self.closing_ids:
            raise Unusable("closing_differs", f"turn {j} does not end as the template ends other assistant turns")
        end = text_end if message.cut else text_end + 1
        return Tokenised(ids[:end], ((len(prompt), end),), j + 1)

    def _render(self, messages: Sequence[Message], *, generation: bool) -> tuple[int, ...]:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            ids = self.tokenizer.apply_chat_template(
                turns, tokenize=True, add_generation_prompt=generation, return_dict=False
            )
        except TemplateError as error:
            raise Unusable("template_refused", str(error)) from error
        return tuple(ids)

    def _probe_closing(self, end_ids: set[int]) -> tuple[int, ...]:
        """The ids behind an assistant turn's text, found on one short dialogue."""
        user, answer = Message("user", _PROBE[0]), Message("assistant", _PROBE[1])
        ids = self._render([user, answer], generation=False)
        ends = end_ids | {int(self.tokenizer.convert_tokens_to_ids(text)) for text in self._specials}
        for i in range(1, len(ids)):
            if ids[i] in ends and _PROBE[1] in self.tokenizer.decode(ids[:i], clean_up_tokenization_spaces=False):
                return ids[i:]
        raise OperatorError(
            "the chat template puts no end-of-turn token behind an assistant turn",
            fix="use a template that closes turns with a special token, as the server's template does",
            reason="no_end_of_turn",
        )

    def _refuse_special_texts(self, record: Record) -> None:
        """A special token spelled out in a text would become a real one: a turn boundary that nobody produced."""
        for j, message in enumerate(record.messages):
            for special in self._specials:
                if special in message.content:
                    raise Unusable("special_token_in_text", f"turn {j} contains {special!r}")


_HASH_TEXT = "Hello, world!\n\n\tdef f(x):  return x**2  # 1234567 — naïve Ünïcode 漢字 🦅 don't"


def _special_texts(tokenizer: Any) -> list[str]:
    """Every token text that the tokenizer marks as special."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens))


def _generation_end_ids(model_dir: Path) -> tuple[int, ...]:
    """EOS ids of generation_config.json: with several, the end of turn is often not the tokenizer's own EOS."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return ()
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()
