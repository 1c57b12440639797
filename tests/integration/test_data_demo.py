"""The demo's real target: converted once, and every committed answer is its own, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.data.chat import ChatFormat
from backend.data.demo.generate import read_answers
from backend.data.demo.prompts import prompt_index
from backend.data.demo.target import convert, converted
from backend.data.records import Record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "smollm2"
    convert(folder)
    return folder


def test_a_second_conversion_does_nothing(target: Path) -> None:
    weights = target / "model.safetensors"
    first = weights.stat()
    assert convert(target) == converted(target)
    assert (weights.stat().st_mtime_ns, weights.stat().st_ino) == (first.st_mtime_ns, first.st_ino)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_the_answers_tokenise_to_what_the_target_was_given_and_said(target: Path) -> None:
    chat, index = ChatFormat.load(target), prompt_index()
    for answer in read_answers():
        prompt = index[answer.id]
        (piece,) = chat.tokenise(Record((*prompt.messages, answer.message)))
        ((start, end),) = piece.spans
        assert piece.input_ids[:start] == chat.prompt_ids(prompt.messages)
        said = answer.answer if answer.finish == "length" else f"{answer.answer}<|im_end|>"
        assert chat.tokenizer.decode(piece.input_ids[start:end], clean_up_tokenization_spaces=False) == said
        assert end - start <= 96
