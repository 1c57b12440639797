"""Files that travel with the code: where they are in a checkout, an installation or a zip archive, and unpacking them.

A process started by us sees such files only through an unpacked copy named by its content: the source may stand inside
an archive, and a running server must not see its plugin change under it. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path


def patches() -> Traversable:
    """`backend/_patches` of an installation or archive, else `patches/` of the checkout."""
    packaged = resources.files("backend").joinpath("_patches")
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "patches"


def package_folder(relative: str) -> Traversable:
    """A folder inside the package `backend`."""
    return resources.files("backend").joinpath(*relative.split("/"))


def unpacked(source: Traversable, under: Path) -> Path:
    """A copy of a folder at `under/<name>-<content hash>`, made once, complete as soon as it is there."""
    files = sorted(_files(source, ""))
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}:{len(content)}:".encode() + content)
    final = under / f"{source.name}-{digest.hexdigest()[:16]}"
    if final.is_dir():
        return final
    under.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=under, prefix=".unpack-"))
    for name, content in files:
        target = scratch / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    try:
        os.rename(scratch, final)  # noqa: PTH104 - must fail, not replace, where another process was first
    except OSError:
        if not final.is_dir():
            raise
        for path in sorted(scratch.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        scratch.rmdir()
    return final


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(entry, f"{prefix}{entry.name}/")
        elif not entry.name.endswith(".pyc"):
            yield f"{prefix}{entry.name}", entry.read_bytes()
