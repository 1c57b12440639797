"""The ownership marker: the file by which a folder says that this product made it, and which one it is.

Owns `.eagle3-owned.json`. It names the folder's own device and inode, so that a copied or moved marker proves
nothing, and the host, because processes on other hosts that use a shared folder cannot be seen from here.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.errors import Refused
from backend.runs.atomic import write_json

MARKER = ".eagle3-owned.json"
_LIMIT = 65536


@dataclass(frozen=True)
class Marker:
    """What a marker says. `dev` and `inode` are those of the folder that holds it; `time` is in epoch seconds."""

    kind: str
    id: str
    host: str
    inode: int
    dev: int
    created_by: str
    time: float

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, as on disk."""
        return asdict(self)


def host_name() -> str:
    """The name under which this host stands in markers, plans and typed confirmations."""
    return os.uname().nodename


def write_marker(path: Path, kind: str, marker_id: str, created_by: str) -> Marker:
    """Mark the folder `path` as ours: `kind` (hidden-state-store …), `marker_id`, `created_by` (a run id or a person).

    Writing the marker again is fine for the same id; over another one it is Refused (`foreign_marker`).
    """
    old = None
    if (path / MARKER).exists():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            old = read_marker(fd, str(path))
        finally:
            os.close(fd)
    if old is not None and (old.kind, old.id) != (kind, marker_id):
        raise Refused(
            f"{path} is marked as {old.kind} {old.id}, not as {kind} {marker_id}",
            fix="use another folder",
            reason="foreign_marker",
        )
    return put_marker(path, kind, marker_id, created_by)


def put_marker(path: Path, kind: str, marker_id: str, created_by: str) -> Marker:
    """Mark the folder, over whatever marker it has: for `adoption`, after a person looked."""
    info = path.stat()
    marker = Marker(kind, marker_id, host_name(), info.st_ino, info.st_dev, created_by, time.time())
    write_json(path / MARKER, marker.as_json())
    return marker


def read_marker(dir_fd: int, name: str) -> Marker:
    """The marker in an open folder (`name` is for the words). Raises Refused: `no_marker`, `bad_marker`."""
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        raise Refused(
            f"{name} has no marker {MARKER} ({error.strerror}): it was not made by this product",
            fix="adopt it first, after looking at what is in it",
            reason="no_marker",
        ) from error
    try:
        data = os.read(fd, _LIMIT)
    finally:
        os.close(fd)
    try:
        return Marker(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise Refused(f"the marker in {name} cannot be read: {error}", reason="bad_marker") from error
