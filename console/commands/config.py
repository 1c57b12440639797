"""`config show`: every resolved value and where it came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from backend.errors import Exit
from console import session


def run(args: argparse.Namespace) -> int:
    """Print `key = value   # origin` in the order of the config's sections, or the whole as JSON."""
    resolved = session.site(args, needs_config=True).config
    assert resolved is not None
    values = dict(_leaves(resolved.as_json()))
    if args.output != "text":
        rows = {path: {"value": value, "origin": resolved.origin[path]} for path, value in values.items()}
        print(json.dumps({"v": 1, "name": resolved.name, "values": rows}, indent=1))
        return Exit.OK
    width = min(60, max(len(f"{path} = {json.dumps(value)}") for path, value in values.items()))
    for path, value in values.items():
        print(f"{f'{path} = {json.dumps(value)}':<{width}}  # {resolved.origin[path]}")
    return Exit.OK


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf, as `backend.resolve` names origins: an empty table is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
