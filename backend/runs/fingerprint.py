"""Fingerprints: is this result still the one that these inputs would give, and if not, what differs?

Owns canonical JSON (the same material gives the same bytes in every process and Python) and a cache of content
hashes, so that a dataset is read once and not at every plan. What belongs into a material is the stages' business.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backend.errors import OperatorError
from backend.runs.atomic import read_json, write_json

ABSENT = "(absent)"
_CHUNK = 4 << 20
_SETTLE_NS = 2_000_000_000
"""A file changed less than this ago is not cached: a second change in the same clock tick would keep its mtime."""


def canonical(obj: Any) -> bytes:
    """`obj` as JSON with sorted keys and no spaces, in ASCII.

    Raises TypeError for what is no JSON (a Path, a set) and ValueError for NaN: a material must say what it means.
    """
    _check_keys(obj)
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _check_keys(obj: Any) -> None:
    """json turns the key 1 into "1" silently; two materials that differ only there would be equal."""
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} of a fingerprinted object is {type(key).__name__}, not str")
            _check_keys(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            _check_keys(value)


def digest(obj: Any) -> str:
    """sha256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical(obj)).hexdigest()


def first_difference(old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """The first key path (in key order) at which two materials differ, with both values; None where they are equal.

    A value that one side lacks is ABSENT. Paths read like `train.lr` or `sources[2].path`.
    """
    return next(_differences(json.loads(canonical(old)), json.loads(canonical(new)), ""), None)


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            below = f"{path}.{key}" if path else key
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), below)
    elif isinstance(old, list) and isinstance(new, list):
        for index in range(max(len(old), len(new))):
            left, right = (items[index] if index < len(items) else ABSENT for items in (old, new))
            yield from _differences(left, right, f"{path}[{index}]")
    elif type(old) is not type(new) or old != new:
        yield path, old, new


class ContentHashes:
    """sha256 of files, cached under (device, inode, size, mtime, ctime); `save` writes the cache.

    ctime is in the key because `cp -p` and `rsync -t` give a changed file its old mtime back.
    """

    def __init__(self, cache: Path) -> None:
        self._path = cache
        self._known: dict[str, str] = {}
        try:
            self._known = {key: str(value) for key, value in (read_json(cache) or {}).items()}
        except OperatorError:
            # A cache that cannot be read costs one more pass over the data, never a wrong answer.
            self._changed = True
        else:
            self._changed = False

    def sha256(self, path: Path) -> str:
        """Hex digest of the file's bytes. Raises OperatorError (`changed_while_read`) where it is being written."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            before = _stamp(os.fstat(fd))
            if before in self._known:
                return self._known[before]
            hasher = hashlib.sha256()
            while chunk := os.read(fd, _CHUNK):
                hasher.update(chunk)
            info = os.fstat(fd)
        finally:
            os.close(fd)
        if _stamp(info) != before:
            raise OperatorError(
                f"{path} changed while it was read", fix="wait until it is complete", reason="changed_while_read"
            )
        if time.time_ns() - max(info.st_mtime_ns, info.st_ctime_ns) > _SETTLE_NS:
            self._known[before] = hasher.hexdigest()
            self._changed = True
        return hasher.hexdigest()

    def save(self) -> None:
        """Write the cache if it has grown."""
        if self._changed:
            write_json(self._path, self._known, durable=False)
            self._changed = False


def _stamp(info: os.stat_result) -> str:
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"
