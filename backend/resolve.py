"""Finding, merging and validating the config: where each value came from, and errors that name key, file and line.

Order, weakest first: defaults in `backend.config` → profile → file → environment (`EAGLE3_SERVER_PORT=8001`) → flags.
Owns the search order and the built-in profiles. Knows nothing of stages; nothing here runs on the host.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from backend.config import Config, SourceConfig
from backend.errors import UsageError

ENV_PREFIX = "EAGLE3_"
PROFILES = ("demo", "kimi-k2.5")


@dataclass(frozen=True)
class Resolved:
    """A valid config, the name it is known by, and where each leaf (dotted path) came from."""

    config: Config
    name: str
    origin: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """The resolved values as plain JSON: what travels to the host."""
        return self.config.model_dump(mode="json")


@dataclass(frozen=True)
class _Layer:
    """One source of values: nested dict, a label for messages, and its text when it has lines to point at."""

    values: dict[str, Any]
    label: str
    text: str = ""


def load(
    *,
    config: Path | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    cwd: Path | None = None,
) -> Resolved:
    """Find, merge and validate the config.

    Search order: `config`, `profile`, `$EAGLE3_CONFIG`, `./eagle3.toml`, the user's config folder. `overrides` maps
    dotted paths to values (command-line flags). Relative `host.work` and `host.home` become absolute here: against
    the file's folder, or the current one for a profile.

    Raises:
        UsageError: nothing found, not TOML, or a value that does not fit; the message names key, file and line.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    base, anchor = _find(config, profile, environ, cwd)
    layers = [base, _environment_layer(environ), _Layer(_nest(overrides or {}), "flag")]
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer in layers:
        _merge_into(values, layer.values)
        for path in _leaves(layer.values):
            origin[path] = f"{layer.label}{_line_suffix(layer.text, path)}"
    try:
        parsed = Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error, layers) from None
    parsed = _anchored(parsed, anchor, environ)
    for path in _leaves(parsed.model_dump()):
        origin.setdefault(path, "default")
    return Resolved(parsed, profile or Path(base.label).stem, origin)


def profile_text(profile: str) -> str:
    """The commented TOML of a built-in profile; also what `init` writes.

    Raises:
        UsageError: no such profile.
    """
    if profile not in PROFILES:
        raise UsageError(
            f"there is no profile {profile!r}{_nearest(profile, PROFILES)}", fix=f"use one of: {', '.join(PROFILES)}"
        )
    return resources.files("backend").joinpath("profiles", f"{profile}.toml").read_text(encoding="utf-8")


def _find(config: Path | None, profile: str | None, environ: Mapping[str, str], cwd: Path) -> tuple[_Layer, Path]:
    """The base layer and the folder its relative paths stand in."""
    if config is not None and profile is not None:
        raise UsageError("--config and --profile were both given", fix="give one of the two")
    if config is not None:
        return _read_file(config), config.resolve().parent
    if profile is not None:
        return _Layer(tomllib.loads(profile_text(profile)), f"profile {profile}", profile_text(profile)), cwd
    user = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config")
    named = environ.get(f"{ENV_PREFIX}CONFIG")
    for candidate in [Path(named)] if named else [cwd / "eagle3.toml", user / "eagle3-console" / "config.toml"]:
        if named or candidate.is_file():
            return _read_file(candidate), candidate.resolve().parent
    raise UsageError(
        "no config found: neither --config, --profile, $EAGLE3_CONFIG, ./eagle3.toml nor the user's config.toml",
        fix="`eagle3-console init` writes one; `eagle3-console demo` needs none",
        reason="no_config",
    )


def _read_file(path: Path) -> _Layer:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"config {path} cannot be read: {error.strerror}", fix="check --config / $EAGLE3_CONFIG"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"config {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from error
    try:
        return _Layer(tomllib.loads(text), str(path), text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"config {path} is not valid TOML: {error}", fix="mend that line") from error


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    """`EAGLE3_<SECTION>_<KEY>` as nested values; other EAGLE3_ names (HOME, CONFIG, RUN_ID …) are not config."""
    values: dict[str, Any] = {}
    for name, raw in environ.items():
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if not name.startswith(ENV_PREFIX) or section not in Config.model_fields or not key:
            continue
        try:
            value = tomllib.loads(f"v = {raw}")["v"]
        except tomllib.TOMLDecodeError:
            value = raw
        values.setdefault(section, {})[key] = value
    return _Layer(values, "environment")


def _anchored(config: Config, anchor: Path, environ: Mapping[str, str]) -> Config:
    """The same config with absolute `host.work` and `host.home`, so that it means the same in every process."""
    work = anchor / Path(config.host.work).expanduser()
    home = environ.get(f"{ENV_PREFIX}HOME") or config.host.home
    if not home:
        state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".local/state"
        home = str(Path(state) / "eagle3-console")
    host = config.host.model_copy(
        update={"work": os.path.normpath(work), "home": os.path.normpath(anchor / Path(home).expanduser())}
    )
    return config.model_copy(update={"host": host})


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return out


def _merge_into(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge_into(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _line_suffix(text: str, path: str) -> str:
    line = _line_of(text, path)
    return f":{line}" if line else ""


def _line_of(text: str, path: str) -> int | None:
    """The 1-based line where `path` (dotted, list positions as numbers) is set, None if it cannot be told."""
    parts = path.split(".")
    keys, positions = [p for p in parts if not p.isdigit()], [int(p) for p in parts if p.isdigit()]
    section, seen = "", -1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?", line):
            section = header[1]
            seen += section == ".".join(keys[:-1]) and line.lstrip().startswith("[[")
            if section == ".".join(keys) and not positions:
                return number
            continue
        inside = section == ".".join(keys[:-1]) and (not positions or seen == positions[0])
        if inside and re.match(rf'\s*"?{re.escape(keys[-1])}"?\s*=', line):
            return number
    return None


def _nearest(word: str, known: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _explain(error: ValidationError, layers: list[_Layer]) -> UsageError:
    """One sentence a problem: file:line, key, what is wrong, the nearest known key."""
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            *parents, key = problem["loc"]
            known = _known_keys(parents)
            what = f"unknown key {path!r}{_nearest(str(key), known)}"
        elif problem["type"] == "missing":
            what = f"{path!r} is missing"
        else:
            said = problem["msg"].removeprefix("Value error, ")
            table = isinstance(problem["input"], (dict, BaseModel))
            what = f"[{path}] {said}" if table else f"{path!r} = {problem['input']!r}: {said}"
        lines.append(f"{_where(path, layers)}{what}")
    return UsageError(
        "\n".join(lines),
        fix="`eagle3-console config show` prints each value and its origin; docs/config.md lists them all",
    )


def _where(path: str, layers: list[_Layer]) -> str:
    """The strongest layer that sets `path`, as a prefix for a message."""
    for layer in reversed(layers):
        node: Any = layer.values
        try:
            for part in path.split("."):
                node = node[int(part)] if isinstance(node, list) else node[part]
        except (KeyError, TypeError, IndexError):
            continue
        return f"{layer.label}{_line_suffix(layer.text, path)}: "
    return ""


def _known_keys(parents: list[Any] | tuple[Any, ...]) -> list[str]:
    """The keys that the table at `parents` knows."""
    model: type[BaseModel] = Config
    for part in parents:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[str(part)].annotation
        model = (
            SourceConfig
            if part == "sources"
            else annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel)
            else model
        )
    return list(model.model_fields)
