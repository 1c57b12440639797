"""The config tells where each value came from, and each error names key, file, line and the nearest known key."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.config import Config
from backend.errors import UsageError
from backend.resolve import PROFILES, load, profile_text

ENV = {"HOME": "/nonexistent"}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid_and_survives_the_trip_to_the_host(profile: str) -> None:
    resolved = load(profile=profile, environ=ENV)
    assert Config.model_validate(resolved.as_json()) == resolved.config


def test_the_strongest_layer_wins_and_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "eagle3.toml", profile_text("demo"))
    resolved = load(config=path, environ={**ENV, "EAGLE3_SERVER_TP": "2"}, overrides={"server.port": 4242})
    assert (resolved.config.server.tp, resolved.config.server.port) == (2, 4242)
    assert resolved.origin["server.tp"] == "environment"
    assert resolved.origin["server.port"] == "flag"
    line = profile_text("demo").splitlines().index('dtype = "bfloat16"') + 1
    assert resolved.origin["server.dtype"] == f"{path}:{line}"
    assert resolved.origin["gate.probe_timeout_s"] == "default"


def test_an_unknown_key_names_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    text = profile_text("demo").replace("on_policy = true", "on_polcy = true")
    path = write(tmp_path / "eagle3.toml", text)
    with pytest.raises(UsageError) as error:
        load(config=path, environ=ENV)
    line = text.splitlines().index("on_polcy = true") + 1
    assert f"{path}:{line}: unknown key 'data.sources.0.on_polcy'; did you mean 'on_policy'?" in error.value.what


def test_a_wrong_type_names_the_value(tmp_path: Path) -> None:
    text = profile_text("demo").replace("port = 31800", 'port = "eight"')
    path = write(tmp_path / "eagle3.toml", text)
    with pytest.raises(UsageError, match=r"eagle3.toml:\d+: 'server.port' = 'eight'"):
        load(config=path, environ=ENV)


def test_a_wrong_environment_variable_is_named_as_such() -> None:
    with pytest.raises(UsageError, match=r"environment: unknown key 'server\.prot'; did you mean 'port'"):
        load(profile="demo", environ={**ENV, "EAGLE3_SERVER_PROT": "1"})


def test_variables_that_are_not_config_are_left_alone() -> None:
    environ = {**ENV, "EAGLE3_RUN_ID": "x", "EAGLE3_LAUNCH_ID": "y", "EAGLE3_HOME": "/somewhere/else"}
    assert load(profile="demo", environ=environ).config.host.home == "/somewhere/else"


def test_a_wall_clock_schedule_without_an_end_is_refused(tmp_path: Path) -> None:
    text = "\n".join(line for line in profile_text("demo").splitlines() if not line.startswith("max_seconds"))
    path = write(tmp_path / "eagle3.toml", text)
    with pytest.raises(UsageError, match='schedule = "cosine_wall" needs max_seconds'):
        load(config=path, environ=ENV)


def test_a_source_name_used_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "eagle3.toml", profile_text("demo").replace('"chitchat"', '"own-answers"'))
    with pytest.raises(UsageError, match="source name used twice: own-answers"):
        load(config=path, environ=ENV)


@pytest.mark.parametrize(("raw", "match"), [(b"[host\n", "not valid TOML"), (b"\xff", "not UTF-8: byte 0 is 0xff")])
def test_a_file_that_is_no_config_says_so(tmp_path: Path, raw: bytes, match: str) -> None:
    path = tmp_path / "eagle3.toml"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=match):
        load(config=path, environ=ENV)


def test_the_search_order_is_the_documented_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no config found"):
        load(environ=ENV, cwd=tmp_path)
    write(tmp_path / "eagle3.toml", profile_text("demo"))
    assert load(environ=ENV, cwd=tmp_path).config.target.name == "SmolLM2-135M-Instruct"
    named = write(tmp_path / "named.toml", profile_text("kimi-k2.5"))
    assert load(environ={**ENV, "EAGLE3_CONFIG": str(named)}, cwd=tmp_path).config.target.name == "Kimi-K2.5"
    with pytest.raises(UsageError, match="cannot be read"):
        load(environ={**ENV, "EAGLE3_CONFIG": str(tmp_path / "gone.toml")}, cwd=tmp_path)


def test_relative_paths_stand_under_the_files_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "eagle3.toml", profile_text("demo"))
    assert load(config=path, environ=ENV).config.host.work == str(tmp_path / ".demo")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("lr = 1e-3", "lr = inf", r"'train\.lr' = inf"),
        ("spec_draft_tokens = 4", "spec_draft_tokens = 50", r"it must be spec_steps \+ 1 = 4"),
        ("heldout_share = 0.13", "heldout_share = 0.96", "leave nothing"),
        ('device = "cpu"', 'device = "cuda"', "needs more than the 0 GPUs"),
        ("tp = 1", 'tp = 1\nextra_args = ["--port", "1"]', "extra_args may not set --port"),
        ('route = "plugin"', "layers = [2, 2, 5]", "must be distinct and ascending"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_loads(
    tmp_path: Path, old: str, new: str, match: str
) -> None:
    path = write(tmp_path / "eagle3.toml", profile_text("demo").replace(old, new, 1))
    with pytest.raises(UsageError, match=match):
        load(config=path, environ=ENV)
