"""What the gate reads out of an SGLang log: the last error, load progress, and hooks that were never applied.

Owns the patterns of SGLang's log lines (0.5.14 and 0.5.23) that matter to readiness. Reads only the end and, for the
load lines, the beginning of the file, as bytes: logs grow to gigabytes and hold carriage returns and invalid UTF-8.
Never a proof of readiness: a server that loses the race for its port still logs that it is ready to roll.
"""

from __future__ import annotations

import re
from pathlib import Path

_HEAD_BYTES = 4 << 20
_TAIL_BYTES = 256 << 10
_MAX_LINE = 400

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_LOAD = re.compile(
    r"Load weight (?:begin|end)|Loading safetensors|Multi-thread loading shards|KV Cache is allocated|Memory pool end"
    r"|Capture .*graph|max_total_num_tokens=|Application startup complete|fired up and ready"
)
_PROGRESS_BAR = re.compile(r"\d+%[^|]*\|")
_HOOKS_LOST = re.compile(r"Failed to (?:apply hooks to|load plugin|execute general plugin)")
_EXCEPTION = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b")
_COMPLAINT = re.compile(r"\b(?:ERROR|CRITICAL|error:|Errno|Killed|out of memory|Segmentation fault|SIG[A-Z]+ received)")


def last_errors(log: Path, count: int = 4) -> list[str]:
    """The last error lines of a log, oldest first: exceptions by their final line, and lines marked as errors.

    Where nothing looks like an error, the last lines as they are: a process that is killed from outside says nothing.
    """
    lines = _lines(_end(log, _TAIL_BYTES))
    found = [line for line in lines if _EXCEPTION.match(line) or _COMPLAINT.search(line)]
    distinct = list(dict.fromkeys(reversed(found or lines)))[:count]
    return distinct[::-1]


def load_progress(log: Path) -> list[str]:
    """The lines that tell how loading went, in order; of a progress bar only its last state."""
    kept: list[str] = []
    for line in _lines(_start(log, _HEAD_BYTES)):
        if not _LOAD.search(line):
            continue
        if kept and _PROGRESS_BAR.search(line) and _PROGRESS_BAR.search(kept[-1]):
            kept[-1] = line
        else:
            kept.append(line)
    return kept


def lost_hooks(log: Path) -> list[str]:
    """Lines in which SGLang reports a plugin or a hook that it could not apply, and goes on without it, healthy."""
    return [line for line in _lines(_start(log, _HEAD_BYTES)) if _HOOKS_LOST.search(line)]


def _lines(raw: bytes) -> list[str]:
    """Printable lines; a carriage return ends a line as a newline does (progress bars)."""
    text = raw.decode("utf-8", errors="replace").replace("\r", "\n")
    cleaned = (_CONTROL.sub("", line).strip() for line in text.split("\n"))
    return [line[:_MAX_LINE] for line in cleaned if line]


def _start(log: Path, limit: int) -> bytes:
    if not log.is_file():
        return b""
    with log.open("rb") as file:
        return file.read(limit)


def _end(log: Path, limit: int) -> bytes:
    if not log.is_file():
        return b""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - limit))
        return file.read()
