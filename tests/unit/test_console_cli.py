"""The command line's grammar and weight: what it accepts, what it refuses, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.errors import Exit
from console import cli, parser

HEAVY = ("torch", "textual", "asyncssh", "pydantic", "sglang", "rich", "httpx", "asyncio", "pynvml")


def test_importing_the_cli_and_asking_for_help_loads_nothing_heavy() -> None:
    """`--help` on a laptop must not wait for half a second of imports, let alone need them."""
    code = (
        "import sys, console.cli\n"
        "try: console.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "exit codes:" in done.stdout and "examples:" in done.stdout


def test_without_a_command_the_way_on_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == Exit.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert "eagle3-console demo" in told.err
    for name in parser.COMMANDS:
        assert name in told.err


@pytest.mark.parametrize("command", [[], *([name] for name in parser.COMMANDS)])
def test_every_command_has_help_with_the_exit_codes(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse([*command, "--help"])
    assert ended.value.code == 0
    assert "--timeout, work goes on" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--auto", "status"],
        ["--from", "merge"],
        ["--yes", "status"],
        ["--auto", "--only", "merge", "--to", "train"],
        ["--auto", "--timeout", "soon"],
        ["--auto", "--timeout", "0"],
        ["--auto", "--output", "xml"],
        ["--aut"],
        ["logs", "--tail", "-3"],
        ["config", "edit"],
        ["stop", "--timeout", "5"],
        ["unheard-of"],
    ],
)
def test_a_wrong_command_line_is_refused_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse(words)
    assert ended.value.code == Exit.USAGE
    assert "error:" in capsys.readouterr().err


def test_flags_about_the_site_stand_before_or_after_the_command() -> None:
    assert parser.parse(["--profile", "demo", "status", "--idle"]).profile == "demo"
    assert parser.parse(["status", "--profile", "demo"]).profile == "demo"
    assert parser.parse(["status"]).profile is None


def test_allow_is_repeatable_and_starts_empty_every_time() -> None:
    assert parser.parse(["--auto", "--allow", "stop", "--allow", "purge=ab"]).allow == ["stop", "purge=ab"]
    assert parser.parse(["--auto"]).allow == []


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1h30m", 5400)])
def test_durations(text: str, seconds: float) -> None:
    assert parser.duration(text) == seconds


def test_an_unreachable_kind_of_host_is_named_with_those_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    assert cli.main(["--host", "ssh://box", "status"]) == Exit.USAGE
    assert "supported: local" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_auto_without_any_config_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("EAGLE3_CONFIG", raising=False)
    assert cli.main(["--auto", "--output", "jsonl"]) == Exit.USAGE
    told = capsys.readouterr()
    assert json.loads(told.out)["data"]["reason"] == "no_config"
    assert "init" in told.err


def test_init_writes_a_config_that_loads_and_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "--profile", "demo", "mine.toml"]) == Exit.OK
    assert capsys.readouterr().out == "mine.toml\n"
    assert cli.main(["--config", "mine.toml", "config", "show", "--output", "json"]) == Exit.OK
    shown = json.loads(capsys.readouterr().out)["values"]
    assert shown["server.port"]["value"] == 31800
    assert "mine.toml" in shown["server.port"]["origin"]
    Path("mine.toml").write_text("# mine\n")
    assert cli.main(["init", "mine.toml"]) == Exit.USAGE
    assert Path("mine.toml").read_text() == "# mine\n"
    assert "exists already" in capsys.readouterr().err


def test_status_of_a_home_that_does_not_exist_is_idle_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make clean-demo` asks this before there ever was a demo."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    assert cli.main(["status", "--idle"]) == Exit.OK
    assert cli.main(["status"]) == Exit.OK
    assert cli.main(["attach"]) == Exit.USAGE
    assert "no pipeline" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
