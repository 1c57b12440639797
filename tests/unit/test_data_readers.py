"""Each source format on good and on dirty records, and the choice between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.data.readers import FORMATS, choose
from backend.data.records import Message, Unusable, normalise
from backend.data.sources import Dropped, Parsed, Source, SourceSpec
from backend.errors import OperatorError, UsageError
from tests.unit.data_support import dialogue, write_jsonl

Q, A = Message("user", "q"), Message("assistant", "a")

GOOD: list[tuple[str, Any, list[Message]]] = [
    ("openai", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [Q, A]),
    (
        "openai",
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "a", "finish_reason": "length", "tool_calls": None},
            ]
        },
        [Message("system", "s"), Q, Message("assistant", "a", cut=True)],
    ),
    ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [Q, A]),
    (
        "sharegpt",
        {"system": "s", "conversation": [{"role": "Prompter", "text": "q"}, {"role": "ChatGPT", "content": "a"}]},
        [Message("system", "s"), Q, A],
    ),
    ("alpaca", {"instruction": "q", "input": "", "output": "a"}, [Q, A]),
    (
        "alpaca",
        {"instruction": "q", "input": "x", "output": "a", "history": [["q", "a"]]},
        [Q, A, Message("user", "q\n\nx"), A],
    ),
    ("prompt-completion", {"prompt": "q", "completion": "a"}, [Q, A]),
    ("prompt-completion", {"prompt": [{"role": "user", "content": "q"}], "response": "a"}, [Q, A]),
    ("question-answer", ["q", "a", "q", "a"], [Q, A, Q, A]),
    ("question-answer", {"question": "q", "answer": "a"}, [Q, A]),
]

DIRTY: list[tuple[str, Any, str]] = [
    ("openai", {"messages": "hello"}, "wrong_shape"),
    ("openai", {"messages": ["hello"]}, "wrong_shape"),
    ("openai", {"messages": [{"role": "narrator", "content": "q"}]}, "unknown_role"),
    ("openai", {"messages": [{"role": ["user"], "content": "q"}]}, "unknown_role"),
    ("openai", {"messages": [{"role": "user", "content": None}]}, "wrong_shape"),
    ("openai", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not_text"),
    ("openai", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "unsupported_field"),
    ("openai", {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "r"}]}, "unsupported_field"),
    ("openai", {"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "unsupported_field"),
    ("openai", {"messages": [], "tools": [{}]}, "unsupported_field"),
    ("sharegpt", {"conversations": None}, "wrong_shape"),
    ("sharegpt", {"conversations": [["human", "q"]]}, "wrong_shape"),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "{}"}]}, "unknown_role"),
    ("sharegpt", {"conversations": [{"from": "human"}]}, "wrong_shape"),
    ("alpaca", {"instruction": "q"}, "wrong_shape"),
    ("alpaca", {"instruction": 7, "output": "a"}, "wrong_shape"),
    ("alpaca", {"instruction": "q", "output": "a", "history": ["q"]}, "wrong_shape"),
    ("prompt-completion", {"prompt": "q"}, "wrong_shape"),
    ("prompt-completion", {"prompt": "q", "completion": {"text": "a"}}, "wrong_shape"),
    ("question-answer", {"question": "q"}, "wrong_shape"),
    ("question-answer", ["q", ["a"]], "not_text"),
    ("question-answer", "q", "wrong_shape"),
]


@pytest.mark.parametrize(("name", "value", "messages"), GOOD)
def test_a_good_record_becomes_its_messages(name: str, value: Any, messages: list[Message]) -> None:
    assert FORMATS[name].messages(value) == messages


@pytest.mark.parametrize(("name", "value", "messages"), GOOD)
def test_a_record_is_recognised_by_its_own_format_alone(name: str, value: Any, messages: list[Message]) -> None:
    assert [known.name for known in FORMATS.values() if known.recognise(value)] == [name]


@pytest.mark.parametrize(("name", "value", "reason"), DIRTY)
def test_a_dirty_record_is_refused_with_its_reason(name: str, value: Any, reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        FORMATS[name].messages(value)
    assert caught.value.reason == reason


@pytest.mark.parametrize("value", [{}, [], None, 3, "text", {"messages": 1}, {"text": "plain"}])
def test_a_shapeless_record_is_recognised_by_no_format_and_crashes_none(value: Any) -> None:
    assert [known.name for known in FORMATS.values() if known.recognise(value)] == []
    for known in FORMATS.values():
        with pytest.raises(Unusable):
            normalise(known.messages(value))


def test_auto_goes_with_the_majority_and_says_why() -> None:
    detected = choose("auto", [GOOD[2][1], GOOD[2][1], {"text": "x"}], "s")
    assert detected.format.name == "sharegpt"
    assert detected.why == '2 of the first 3 records have a "conversations" list'


def test_auto_refuses_what_it_does_not_know_and_names_the_keys() -> None:
    with pytest.raises(OperatorError, match="an object with the keys text, url") as caught:
        choose("auto", [{"url": "u", "text": "t"}], "web")
    assert caught.value.reason == "unknown_format"
    assert "sharegpt" in caught.value.fix


def source(tmp_path: Path, *paths: str, format: str = "auto") -> Source:
    return Source(SourceSpec("s", tuple(str(tmp_path / path) for path in paths), format))


def test_a_folder_gives_its_known_files_and_each_decides_its_own_format(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "1.jsonl", [dialogue("q", "a")])
    (tmp_path / "d" / "deep").mkdir()
    (tmp_path / "d" / "deep" / "2.json").write_text(json.dumps([{"instruction": "q2", "output": "a"}]))
    (tmp_path / "d" / "README.md").write_text("not data")
    (tmp_path / "d" / ".hidden.jsonl").write_text("not data")
    read = source(tmp_path, "d")
    items = [item for item in read if isinstance(item, Parsed)]
    assert [item.record.messages[0].content for item in items] == ["q", "q2"]
    assert sorted(read.formats) == ["alpaca", "openai"]
    assert read.position == read.size == sum(path.stat().st_size for path in read.files)


def test_globs_and_overlapping_paths_read_no_file_twice(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "1.jsonl", [dialogue("q", "a")])
    write_jsonl(tmp_path / "d" / "e" / "2.jsonl", [dialogue("q2", "a")])
    assert len(source(tmp_path, "d", "d/*.jsonl", "d/**/*.jsonl", "d/e/2.jsonl").files) == 2


def test_damage_in_the_first_records_hides_nothing_behind_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["{"] * 45 + [dialogue("q", "a")] * 3)
    items = list(source(tmp_path, "a.jsonl"))
    assert [type(item) for item in items] == [Dropped] * 45 + [Parsed] * 3


@pytest.mark.parametrize(
    ("path", "named"),
    [("absent.jsonl", "absent.jsonl does not exist"), ("none/*.jsonl", "no file matches"), ("empty", "holds nothing")],
)
def test_a_missing_source_names_path_and_fix(tmp_path: Path, path: str, named: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OperatorError, match=r"source s: ") as caught:
        source(tmp_path, path)
    assert named in str(caught.value).replace("(it holds nothing)", "holds nothing")
    assert caught.value.reason == "source_missing"
    assert "[[data.sources]] s" in caught.value.fix


def test_a_folder_of_unknown_files_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(OperatorError, match=r"only \.parquet"):
        source(tmp_path, "d")


def test_an_empty_array_is_an_empty_source(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[ ]")
    with pytest.raises(OperatorError) as caught:
        list(source(tmp_path, "a.json"))
    assert caught.value.reason == "empty_source"


def test_an_unknown_format_name_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no format 'sharegtp'"):
        source(tmp_path, "absent.jsonl", format="sharegtp")
