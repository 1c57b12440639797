"""Real parts for the data tests: a small trained tokenizer with a chat template, saved as a model folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

SYSTEM = "You are a test."
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As SmolLM2's: a default system turn, and a line break behind the end of a turn."""

REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the reasoning models': the reasoning of earlier answers is dropped."""

STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)

_TEXT = [
    "the quick brown fox jumps over the lazy dog and asks what is the answer to this question",
    "user assistant system You are a test. Hello, how are you today? I am fine, thank you! 1 2 3",
    "def f(x):\n    return x + 1\n",
]


@cache
def _backend() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def tokenizer(template: str | None = CHATML) -> Any:
    """A byte-level BPE tokenizer that encodes any text."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=_backend(),
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        clean_up_tokenization_spaces=False,
    )
    if template is not None:
        made.chat_template = template
    return made


def model_folder(folder: Path, template: str | None = CHATML) -> Path:
    """A folder that a merge takes for a target."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(template).save_pretrained(folder)
    return folder


def dialogue(*turns: str) -> dict[str, Any]:
    """Alternating turns, user first, as OpenAI messages."""
    return {"messages": [{"role": ("user", "assistant")[j % 2], "content": turn} for j, turn in enumerate(turns)]}


def write_jsonl(path: Path, records: Sequence[object]) -> Path:
    """One JSON value a line; strings stand as they are (for dirty lines)."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
