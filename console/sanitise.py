"""Bytes from a host made safe for the operator's terminal.

A log line can move the cursor, paint over other rows, rename the window or answer as the keyboard. Everything that
comes from a host goes through here before it is shown: escape sequences and control characters are taken out, tokens
are blanked. The files on the host keep the original bytes. Knows nothing of where the text is shown.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

LONGEST_LINE = 16 * 1024  # a progress bar without newlines must not become one endless line

_ESCAPES = re.compile(
    r"""
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]                       # CSI: colours, cursor, modes
  | (?:\x1b\]|\x9d) [^\x07\x1b\x9c]* (?:\x07|\x1b\\|\x9c)?    # OSC: title, clipboard, links
  | (?:\x1b[PX^_]|[\x90\x98\x9e\x9f]) [^\x1b\x9c]* (?:\x1b\\|\x9c)?  # DCS, SOS, PM, APC
  | \x1b [ -/]* [0-~]                                         # two-character escapes
    """,
    re.VERBOSE,
)
_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks: text that reads other than it is
    "\u2028\u2029\ufeff\ud800-\udfff]"
)
_TOKENS = re.compile(r"hf_[A-Za-z0-9]{20,}")


def clean(text: str) -> str:
    """One line without escapes, controls or tokens. Of a line redrawn with carriage returns, the last drawing."""
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part), "")
    return redact(_CONTROLS.sub("", _ESCAPES.sub("", text)))


def redact(text: str) -> str:
    """The text without access tokens; all else as it was."""
    return _TOKENS.sub("hf_<redacted>", text)


class Lines:
    """Clean lines out of raw bytes that come in pieces of any size; undecodable bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[str]:
        """The lines that are complete; with `final`, also the unfinished last one."""
        self._rest += self._decode(data, final)
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            yield clean(line)
        while len(self._rest) > LONGEST_LINE:
            yield clean(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        if final and self._rest:
            yield clean(self._rest)
            self._rest = ""
