"""`python -m backend.data.demo FOLDER`: everything that the demo needs in one folder; what is there is left alone.

The target (converted once), the three sources, and the allow-list entry that lets a purge remove older stores of the
demo, and only those.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from backend.data.demo.sources import write_sources
from backend.data.demo.target import convert
from backend.errors import OperatorError
from backend.runs.allow import add_root
from backend.runs.layout import Home


def prepare(folder: Path) -> None:
    """Make what is missing under `folder`.

    Raises:
        OperatorError: a package is not installed, or the disk is full; nothing half-made stays under its final name.
    """
    convert(folder / "models" / "smollm2-135m")
    write_sources(folder / "sources")
    store = folder / "store"
    store.mkdir(parents=True, exist_ok=True)
    add_root(Home(folder / "state").create().allow, store)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m backend.data.demo", description="Prepare the demo's folder.")
    parser.add_argument("folder", type=Path)
    try:
        prepare(parser.parse_args(argv).folder.resolve())
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
