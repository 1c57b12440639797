"""A log line may not do anything to the operator's terminal, nor show a token."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sanitise import LONGEST_LINE, Lines, clean


@pytest.mark.parametrize(
    ("dirty", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b[2J\x1b[1;1Hb", "ab"),
        ("\x1b]0;new title\x07text", "text"),
        ("\x1b]52;c;aGk=\x1b\\text", "text"),
        ("\x1bP$qm\x1b\\text", "text"),
        ("\x1b(0text\x1b7\x1bM", "text"),
        ("\x9b31mred", "red"),
        ("bell\x07 null\x00", "bell null"),
        ("10%\r50%\r100%", "100%"),
        ("done\r", "done"),
        ("abc\u202edef", "abcdef"),
        ("tab\tstays é 漢字 🙂", "tab\tstays é 漢字 🙂"),
        ("lone \udcff surrogate", "lone  surrogate"),
        ("token hf_abcdefghijABCDEFGHIJ0123 used", "token hf_<redacted> used"),
    ],
)
def test_what_would_move_paint_or_tell_is_taken_out(dirty: str, shown: str) -> None:
    assert clean(dirty) == shown


@given(st.text(max_size=200), st.sampled_from(["\x1b[", "\x1b]", "\x9b", "\x1b", "\r", "\x90"]))
def test_no_text_leaves_a_control_character(text: str, opener: str) -> None:
    for char in clean(opener.join([text, text])):
        assert char == "\t" or unicodedata.category(char) not in ("Cc", "Cs")


@given(st.binary(max_size=300), st.integers(1, 20))
def test_lines_do_not_depend_on_where_the_bytes_were_cut(data: bytes, size: int) -> None:
    whole, cut = Lines(), Lines()
    expected = [*whole.feed(data), *whole.feed(b"", final=True)]
    got = [line for at in range(0, len(data), size) for line in cut.feed(data[at : at + size])]
    assert [*got, *cut.feed(b"", final=True)] == expected


def test_a_line_that_never_ends_is_shown_in_parts() -> None:
    lines = Lines()
    shown = list(lines.feed(b"x" * (3 * LONGEST_LINE)))
    assert sum(map(len, shown)) >= 2 * LONGEST_LINE
