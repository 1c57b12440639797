"""Normal form and content ids."""

from __future__ import annotations

import pytest

from backend.data.records import Message, Record, Unusable, content_id, normalise

S, U, A = Message("system", "s"), Message("user", "u"), Message("assistant", "a")


def test_the_id_of_a_dialogue_never_changes() -> None:
    """Stores and answers of earlier versions refer to records by this id."""
    assert content_id([U, A]) == "b84f9fbf9909d084d4731fc2c8766f0e"
    assert content_id([U, Message("assistant", "naïve 漢字 \n", cut=True)]) == "d16ab7f17ce592c4b2fb94311228f0ee"


def test_ids_differ_by_text_role_order_and_cut() -> None:
    cut = Message("assistant", "a", cut=True)
    several = [[U, A], [A, U], [U], [U, cut], [S, U, A], [U, Message("assistant", "a ")], [U, Message("tool", "a")]]
    assert len({content_id(messages) for messages in several}) == len(several)


def test_text_cannot_pose_as_a_turn_boundary() -> None:
    assert content_id([Message("user", 'u","role":"user"},{"content":"a')]) != content_id([U, Message("user", "a")])


@pytest.mark.parametrize(
    ("turns", "kept", "repairs"),
    [
        ([U, A], (U, A), ()),
        ([S, U, A], (S, U, A), ()),
        ([U, A, U], (U, A), ("trailing_turns",)),
        ([A, U, A], (U, A), ("leading_assistant",)),
        ([S, A, U, A, U, U], (S, U, A), ("leading_assistant", "trailing_turns")),
        ([U, U, A, A], (U, U, A, A), ()),
    ],
)
def test_what_cannot_be_supervised_is_left_off_and_said(
    turns: list[Message], kept: tuple[Message, ...], repairs: tuple[str, ...]
) -> None:
    normal = normalise(turns)
    assert (normal.record.messages, normal.repairs) == (kept, repairs)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "no_assistant_turn"),
        ([S, U], "no_assistant_turn"),
        ([A], "no_assistant_turn"),
        ([U, Message("assistant", " \n")], "blank_turn"),
        ([Message("user", ""), A], "blank_turn"),
        ([Message("user", "\ud800"), A], "bad_unicode"),
    ],
)
def test_a_dialogue_without_something_to_learn_is_refused(turns: list[Message], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        normalise(turns)
    assert caught.value.reason == reason


def test_prompts_in_another_spelling_share_their_key_and_not_their_id() -> None:
    one, other = Record((Message("user", "Who are you?"), A)), Record((Message("user", "who  are YOU?\n"), A))
    assert one.prompt_key == other.prompt_key
    assert one.id != other.id
    assert one.prompt_key != Record((Message("user", "who are you"), A)).prompt_key
