"""A folder that appears complete or not at all: written beside its final name, synced, then renamed.

Owns: that sequence and the replacement of a folder of the same kind. Does not know what is written into it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.errors import Refused


@contextmanager
def complete_folder(final: Path, *, replace: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield an empty folder to fill; on leaving it is synced and renamed to `final`, on an error it is removed.

    An existing `final` is replaced only where it holds nothing but files named in `replace`; anything else is someone
    else's: `Refused` (reason `folder_taken`), before anything is written.
    """
    partial, outgoing = final.with_name(f".{final.name}.tmp"), final.with_name(f".{final.name}.old")
    if outgoing.exists() and not final.exists():  # a crash between the two renames below
        outgoing.rename(final)
    foreign = sorted(p.name for p in final.iterdir() if p.name not in replace) if final.exists() else []
    if foreign or (final.exists() and not replace):
        raise Refused(
            f"{final} exists and holds {foreign[0] if foreign else 'something'}, which was not written here",
            fix="choose another folder, or move that one away",
            reason="folder_taken",
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    for rest in (partial, outgoing):
        if rest.exists():
            shutil.rmtree(rest)
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        if final.exists():
            final.rename(outgoing)
            partial.rename(final)
            shutil.rmtree(outgoing)
        else:
            partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(final.parent)


def discard_partial(parent: Path) -> None:
    """Remove what killed writers left half-written under `parent`. Only the one writer of that folder may call this."""
    for rest in parent.glob(".*.tmp"):
        shutil.rmtree(rest)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
