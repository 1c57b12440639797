"""Loss spans: every supervised token is one that the target produced, the end of turn among them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.data.chat import ChatFormat
from backend.data.records import Message, Record, Unusable
from backend.errors import OperatorError
from tests.unit.data_support import CHATML, REWRITING, STRICT, SYSTEM, model_folder, tokenizer

CHAT = ChatFormat(tokenizer())


def record(*turns: str, cut: int | None = None) -> Record:
    return Record(tuple(Message("assistant" if j % 2 else "user", turn, cut=j == cut) for j, turn in enumerate(turns)))


def supervised(chat: ChatFormat, dialogue: Record) -> list[list[str]]:
    """The decoded spans of each piece."""
    return [
        [chat.tokenizer.decode(piece.input_ids[start:end]) for start, end in piece.spans]
        for piece in chat.tokenise(dialogue)
    ]


TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=30)


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0))
def test_each_span_decodes_to_the_answer_and_its_end_of_turn(turns: list[str]) -> None:
    assert supervised(CHAT, record(*turns)) == [[f"{answer}<|im_end|>" for answer in turns[1::2]]]


def test_the_ids_are_those_of_the_whole_rendered_dialogue_up_to_the_last_end_of_turn() -> None:
    (piece,) = CHAT.tokenise(record("q", "a", "q2", "a2"))
    assert CHAT.tokenizer.decode(piece.input_ids) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>"
    )


def test_the_prompt_is_what_serving_renders_with_the_templates_default_system_turn() -> None:
    (piece,) = CHAT.tokenise(record("q", "a"))
    served = CHAT.tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=False
    )
    assert list(piece.input_ids[: piece.spans[0][0]]) == served == list(CHAT.prompt_ids([Message("user", "q")]))


def test_an_answer_cut_by_length_supervises_no_end_of_turn() -> None:
    assert supervised(CHAT, record("q", "a", "q2", "the end is", cut=3)) == [["a<|im_end|>", "the end is"]]
    assert supervised(CHAT, record("q", "the end is", "q2", "a", cut=1)) == [["the end is", "a<|im_end|>"]]
    (piece,) = CHAT.tokenise(record("q", "the end is", cut=1))
    assert piece.input_ids[-1] != CHAT.closing_ids[0]


def test_several_answers_in_a_row_and_other_roles_have_their_own_spans() -> None:
    turns = [("system", "s"), ("user", "q"), ("assistant", "a"), ("assistant", "b"), ("tool", "t"), ("assistant", "c")]
    dialogue = Record(tuple(Message(role, text) for role, text in turns))  # type: ignore[arg-type]
    assert supervised(CHAT, dialogue) == [["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]]


def test_a_template_that_rewrites_earlier_turns_gives_one_piece_per_answer_each_as_it_was_produced() -> None:
    chat = ChatFormat(tokenizer(REWRITING))
    dialogue = record("q", "r1</think>a1", "q2", "r2</think>a2")
    assert supervised(chat, dialogue) == [["r1</think>a1<|im_end|>"], ["r2</think>a2<|im_end|>"]]
    first, second = chat.tokenise(dialogue)
    assert (first.turns, second.turns) == (2, 4)
    assert "r1" not in chat.tokenizer.decode(second.input_ids)


def test_a_rewriting_template_splits_nothing_that_it_leaves_alone() -> None:
    chat = ChatFormat(tokenizer(REWRITING))
    assert supervised(chat, record("q", "a1", "q2", "a2")) == [["a1<|im_end|>", "a2<|im_end|>"]]


@pytest.mark.parametrize("turns", [("q<|im_end|>", "a"), ("q", "a<|im_start|>user\nhello"), ("q", "<|endoftext|>a")])
def test_a_special_token_spelled_in_a_text_is_refused_because_it_would_end_a_turn(turns: tuple[str, ...]) -> None:
    with pytest.raises(Unusable) as caught:
        CHAT.tokenise(record(*turns))
    assert caught.value.reason == "special_token_in_text"


def test_roles_that_the_template_refuses_drop_the_record_and_crash_nothing() -> None:
    chat = ChatFormat(tokenizer(STRICT))
    assert supervised(chat, record("q", "a")) == [["a<|im_end|>"]]
    with pytest.raises(Unusable, match="roles must alternate") as caught:
        chat.tokenise(Record((Message("user", "q"), Message("user", "q"), Message("assistant", "a"))))
    assert caught.value.reason == "template_refused"


def test_a_generation_prompt_that_is_no_prefix_of_the_answered_turn_is_refused() -> None:
    """A template that opens reasoning in the generation prompt but renders answers without it."""
    opening = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    with pytest.raises(Unusable) as caught:
        ChatFormat(tokenizer(opening)).tokenise(record("q", "a"))
    assert caught.value.reason == "prefix_differs"


def test_a_template_that_trims_the_last_answer_is_still_supervised_on_what_it_shows() -> None:
    trimming = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    assert supervised(ChatFormat(tokenizer(trimming)), record("q", "  a \n")) == [["a<|im_end|>"]]


def test_a_tokenizer_without_a_chat_template_or_without_an_end_of_turn_is_refused() -> None:
    with pytest.raises(OperatorError) as caught:
        ChatFormat(tokenizer(None))
    assert caught.value.reason == "no_template"
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(OperatorError) as caught:
        ChatFormat(tokenizer(plain))
    assert caught.value.reason == "no_end_of_turn"


def test_a_model_folder_is_loaded_with_its_template_and_hashes_stay_the_same(tmp_path: Path) -> None:
    loaded = ChatFormat.load(model_folder(tmp_path / "m"))
    assert loaded.tokenise(record("q", "a")) == CHAT.tokenise(record("q", "a"))
    assert (loaded.template_hash(), loaded.tokenizer_hash()) == (CHAT.template_hash(), CHAT.tokenizer_hash())


def test_hashes_tell_templates_and_tokenizers_apart() -> None:
    other = ChatFormat(tokenizer(REWRITING))
    assert other.template_hash() != CHAT.template_hash()
    assert other.tokenizer_hash() == CHAT.tokenizer_hash()
    more = tokenizer()
    more.add_tokens(["<|more|>"])
    assert ChatFormat(more).tokenizer_hash() != CHAT.tokenizer_hash()


def test_a_folder_without_a_tokenizer_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no tokenizer can be loaded") as caught:
        ChatFormat.load(tmp_path)
    assert "trust_remote_code" in caught.value.fix
