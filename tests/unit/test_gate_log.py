"""What the gate reads out of a server's log: the error that ended it, how loading went, hooks that were lost."""

from __future__ import annotations

from pathlib import Path

from backend.engine.server_log import last_errors, load_progress, lost_hooks

DYING = b"""[2026-12-01 12:00:00] Load weight begin. avail mem=22.10 GB
\rLoading safetensors checkpoint shards:   0% Completed | 0/2\rMulti-thread loading shards:  50% Completed | 1/2
\rLoading safetensors: 100%|##########| 2/2
[2026-12-01 12:00:09] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError("no room")
ValueError: no room for the KV cache: 12 tokens
\x1b[31m[2026-12-01 12:00:09] Received sigquit from a child process.\x1b[0m \xff
"""


def test_the_error_that_ended_a_server_is_found_behind_what_it_said_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(DYING)
    assert last_errors(log)[-1] == "ValueError: no room for the KV cache: 12 tokens"


def test_without_an_error_line_the_last_words_are_shown(tmp_path: Path) -> None:
    """A server that was killed from outside says nothing; an empty evidence would look like a fault of the gate."""
    log = tmp_path / "log"
    log.write_text("importing\nloading\n")
    assert last_errors(log) == ["importing", "loading"]
    assert last_errors(tmp_path / "absent") == []


def test_of_a_progress_bar_only_the_last_state_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(DYING)
    lines = load_progress(log)
    assert lines[0].endswith("Load weight begin. avail mem=22.10 GB")
    assert [line for line in lines if "%" in line] == ["Loading safetensors: 100%|##########| 2/2"]


def test_a_hook_that_could_not_be_applied_is_found_although_the_server_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\nFailed to apply hooks to sglang.srt.gone.Class.method\nThe server is fired up\n")
    assert lost_hooks(log) == ["Failed to apply hooks to sglang.srt.gone.Class.method"]
    log.write_text("starting\nThe server is fired up\n")
    assert lost_hooks(log) == []


def test_escape_sequences_and_broken_bytes_never_reach_the_evidence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\x1b]0;owned\x07RuntimeError: \x1b[31mred\x1b[0m \xff\n")
    (line,) = last_errors(log)
    assert "\x1b" not in line and "\x07" not in line
