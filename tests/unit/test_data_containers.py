"""Files of every container, clean and damaged: each value comes out once, each damage names its place."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.data import containers
from backend.data.containers import Broken, Found, SourceFile
from backend.errors import OperatorError


def read(path: Path, data: bytes) -> list[Found | Broken]:
    path.write_bytes(data)
    return list(SourceFile(path))


def values(items: list[Found | Broken]) -> list[Any]:
    return [item.value for item in items if isinstance(item, Found)]


def broken(items: list[Found | Broken]) -> list[Broken]:
    return [item for item in items if isinstance(item, Broken)]


def test_json_lines_are_read_with_their_line_numbers_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    items = read(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": 2}')
    assert values(items) == [{"a": 1}, {"a": 2}]
    assert [item.where for item in items] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:4"]


def test_a_bad_line_is_named_and_the_lines_behind_it_are_read(tmp_path: Path) -> None:
    items = read(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": }\n{"a": 3}\n')
    assert values(items) == [{"a": 1}, {"a": 3}]
    (bad,) = broken(items)
    assert (bad.reason, bad.where, bad.rest_lost) == ("bad_json", f"{tmp_path}/a.jsonl:2", False)
    assert "byte 15" in bad.detail


def test_invalid_utf8_is_named_by_its_byte(tmp_path: Path) -> None:
    items = read(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n{"a": 3}\n')
    assert values(items) == [{"a": 1}, {"a": 3}]
    (bad,) = broken(items)
    assert (bad.reason, bad.where) == ("bad_utf8", f"{tmp_path}/a.jsonl:2")
    assert "0xff at byte 16" in bad.detail


def test_a_torn_last_line_is_called_truncated_and_not_bad_json(tmp_path: Path) -> None:
    items = read(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": "unfin')
    assert values(items) == [{"a": 1}]
    assert [(bad.reason, bad.where) for bad in broken(items)] == [("truncated", f"{tmp_path}/a.jsonl:2")]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_an_array_cut_at_any_byte_yields_each_complete_record_and_names_that_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(containers, "_CHUNK", chunk)
    records = [{"a": 'x"]}\\'}, {"b": [1, {"c": "é\n"}]}, {"d": None}]
    text = json.dumps(records, ensure_ascii=False, indent=1).encode()
    ends = [i + 1 for i in range(len(text)) if text[: i + 1].endswith(b"}") and _depth(text[: i + 1]) == 1]
    assert len(ends) == 3
    for cut in range(1, len(text)):
        items = read(tmp_path / "a.json", text[:cut])
        assert values(items) == records[: sum(end <= cut for end in ends)], cut
        (bad,) = broken(items)
        assert (bad.reason, bad.rest_lost) == ("truncated", True)
        assert bad.where == f"{tmp_path}/a.json@{cut}"
        assert f"breaks off at byte {cut}" in bad.detail
    assert values(read(tmp_path / "a.json", text)) == records


def _depth(text: bytes) -> int:
    """Bracket depth at the end of a text in which brackets inside strings are known."""
    bare = text.replace(b'x\\"]}\\\\', b"")
    return bare.count(b"[") + bare.count(b"{") - bare.count(b"]") - bare.count(b"}")


@settings(max_examples=50, deadline=None)
@given(
    records=st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=6,
    ),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
)
def test_any_array_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(records, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    items = read(tmp_path_factory.mktemp("array") / "a.json", text)
    assert values(items) == records
    assert broken(items) == []


def test_a_bad_element_does_not_end_the_array(tmp_path: Path) -> None:
    items = read(tmp_path / "a.json", b'[{"a": 1}, {"a": tru}, {"a": "\xc3("}, {"a": 4}]')
    assert values(items) == [{"a": 1}, {"a": 4}]
    assert [bad.reason for bad in broken(items)] == ["bad_json", "bad_utf8"]
    assert [bad.where for bad in broken(items)] == [f"{tmp_path}/a.json@11", f"{tmp_path}/a.json@23"]
    assert "0xc3 at byte 30" in broken(items)[1].detail


def test_lines_that_are_lists_are_lines_and_not_one_array_with_a_tail(tmp_path: Path) -> None:
    assert values(read(tmp_path / "a.jsonl", b'["q", "a"]\n["q2", "a2"]\n')) == [["q", "a"], ["q2", "a2"]]
    assert values(read(tmp_path / "a.jsonl", b'[{"a": 1},\n{"a": 2}]\n')) == [{"a": 1}, {"a": 2}]


def test_what_stands_behind_an_array_is_not_passed_over(tmp_path: Path) -> None:
    items = read(tmp_path / "a.json", b'[\n{"a": 1}][{"a": 2}]')
    assert values(items) == [{"a": 1}]
    assert [(bad.reason, bad.where) for bad in broken(items)] == [("trailing_bytes", f"{tmp_path}/a.json@11")]


@pytest.mark.parametrize(("name", "data"), [("a.json", b'[{"a": "' + b"x" * 300), ("a.jsonl", b'{"a": "' + b"x" * 300)])
def test_a_record_without_end_does_not_eat_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    monkeypatch.setattr(containers, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(containers, "_CHUNK", 16)
    assert [bad.reason for bad in broken(read(tmp_path / name, data))] == ["too_big"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json"])
def test_gzip_is_known_by_content_not_by_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    opened = SourceFile(file)
    assert [item.value for item in opened if isinstance(item, Found)] == [{"a": 1}, {"a": 2}]
    assert opened.position == file.stat().st_size


@pytest.mark.parametrize("array", [False, True])
def test_a_torn_gzip_file_yields_what_it_holds_and_says_that_the_rest_is_lost(tmp_path: Path, array: bool) -> None:
    records = [{"a": i, "noise": hashlib.sha256(str(i).encode()).hexdigest()} for i in range(5000)]
    lines = [json.dumps(record) for record in records]
    whole = gzip.compress((f"[{','.join(lines)}]" if array else "\n".join(lines)).encode())
    torn = whole[: len(whole) * 2 // 3]
    file = tmp_path / "a.gz"
    file.write_bytes(torn)
    held = zlib.decompressobj(wbits=31).decompress(torn).count(b"}" if array else b"\n")
    items = list(SourceFile(file))
    assert 0 < held < len(records)
    assert values(items) == records[:held]
    assert [(bad.reason, bad.rest_lost) for bad in broken(items)] == [("truncated", True)]


def test_yaml_items_keep_their_text_and_their_lines(tmp_path: Path) -> None:
    text = "categories:\n- x\nconversations:\n- - what year\n  - 1963\n- - version?\n  - 1.10\n- - sure?\n  - yes\n"
    items = read(tmp_path / "a.yml", text.encode())
    assert values(items) == [["what year", "1963"], ["version?", "1.10"], ["sure?", "yes"]]
    assert [item.where for item in items] == [f"{tmp_path}/a.yml:{line}" for line in (4, 6, 8)]


@pytest.mark.parametrize(
    ("data", "reason", "line"),
    [
        (b"conversations:\n- - a\n  - b\n - c: [\n", "bad_yaml", ":4"),
        (b"just: a mapping\n", "bad_yaml", ":1"),
        (b"conversations:\n- - a\xff\n", "bad_utf8", "@20"),
    ],
)
def test_bad_yaml_is_named_by_its_line(tmp_path: Path, data: bytes, reason: str, line: str) -> None:
    (bad,) = read(tmp_path / "a.yml", data)
    assert isinstance(bad, Broken)
    assert (bad.reason, bad.where, bad.rest_lost) == (reason, f"{tmp_path}/a.yml{line}", True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty_source"),
        (b" \n\t", "empty_source"),
        (b"id,text\n1,hello\n", "unknown_container"),
        (b"PAR1\x15\x04", "unknown_container"),
        (gzip.compress(b"{}")[:8], "unreadable"),
    ],
)
def test_a_file_that_is_no_source_is_refused_by_name(tmp_path: Path, data: bytes, reason: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(data)
    with pytest.raises(OperatorError, match=r"a\.json") as caught:
        SourceFile(file)
    assert caught.value.reason == reason
    assert caught.value.fix
