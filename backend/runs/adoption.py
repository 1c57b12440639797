"""Adopting a folder that this product did not make (an old cache), so that it may be deleted later.

Owns the look that a person consents to: how many files match the patterns that such a cache has, which do not (there
must be none), and a sample of names. Adoption only writes the marker; deleting still needs a plan of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from backend.errors import Refused
from backend.runs.allow import Allow
from backend.runs.audit import AuditLog
from backend.runs.beneath import Opener, choose_opener, mounts_at_or_below
from backend.runs.marker import MARKER, Marker, host_name, put_marker
from backend.runs.target import check_names, check_owner, entries_of, open_folder

SAMPLE = 20
VALID_S = 15 * 60.0


@dataclass(frozen=True)
class Adoption:
    """What is in a folder, by pattern. `strangers` match none of the patterns; `sha` covers all but the time."""

    root: str
    rel: str
    host: str
    dev: int
    inode: int
    files: int
    bytes: int
    counts: dict[str, int]
    strangers: int
    sample: tuple[str, ...]
    stranger_sample: tuple[str, ...]
    time: float
    sha: str = ""

    @property
    def path(self) -> Path:
        """The folder itself."""
        return Path(self.root) / self.rel

    @property
    def phrase(self) -> str:
        """What a person types to consent."""
        return f"{self.host}/{Path(self.rel).name}"

    def content_sha(self) -> str:
        """The sha that these facts have."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("time", "sha")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, for display and audit."""
        return asdict(self)


@dataclass
class _Tally:
    patterns: Sequence[str]
    files: int = 0
    bytes: int = 0
    strangers: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)
    stranger_sample: list[str] = field(default_factory=list)

    def add(self, rel: str, size: int) -> None:
        self.files += 1
        self.bytes += size
        pattern = next((pattern for pattern in self.patterns if fnmatchcase(rel, pattern)), None)
        if pattern is None:
            self.strangers += 1
            self.stranger_sample.append(rel)
        else:
            self.counts[pattern] = self.counts.get(pattern, 0) + 1
            self.sample.append(rel)
        # The smallest names, whatever the order of the listing: the same folder gives the same sample and sha.
        for names in (self.sample, self.stranger_sample):
            if len(names) > 50 * SAMPLE:
                names[:] = sorted(names)[:SAMPLE]


def look_for_adoption(
    root: Path, rel: str, allow: Allow, patterns: Sequence[str], *, opener: Opener | None = None
) -> Adoption:
    """Look at a folder below an allowed root. Changes nothing.

    `patterns` are shell patterns over the path relative to the folder (`*` also crosses `/`), e.g. `rows_*/*.ckpt`.
    Raises Refused as `deletion.plan_delete` does for paths, mounts and owners.
    """
    check_names(root, rel, allow)
    with open_folder(root, rel, opener or choose_opener()) as fds:
        return _look(root, rel, fds[-1], patterns, opener or choose_opener())


def _look(root: Path, rel: str, fd: int, patterns: Sequence[str], opener: Opener) -> Adoption:
    path, info, tally = root / rel, os.fstat(fd), _Tally(patterns)
    check_owner(info, str(path))
    mounts = mounts_at_or_below(path)
    if mounts:
        raise Refused(f"{path} holds a mount: {', '.join(mounts)}", fix="unmount it first", reason="mount")
    _tally_below(fd, "", tally, opener, 0)
    found = Adoption(
        root=str(root),
        rel=rel,
        host=host_name(),
        dev=info.st_dev,
        inode=info.st_ino,
        files=tally.files,
        bytes=tally.bytes,
        counts=tally.counts,
        strangers=tally.strangers,
        sample=tuple(sorted(tally.sample)[:SAMPLE]),
        stranger_sample=tuple(sorted(tally.stranger_sample)[:SAMPLE]),
        time=time.time(),
    )
    return replace(found, sha=found.content_sha())


def _tally_below(fd: int, prefix: str, tally: _Tally, opener: Opener, depth: int) -> None:
    for name, info in entries_of(fd, prefix or ".", depth):
        rel = f"{prefix}{name}"
        if stat.S_ISDIR(info.st_mode):
            check_owner(info, rel)
            below = opener(fd, name)
            try:
                _tally_below(below, f"{rel}/", tally, opener, depth + 1)
            finally:
                os.close(below)
        elif rel != MARKER:
            tally.add(rel, info.st_size)


def adopt(
    adoption: Adoption,
    consent_sha: str,
    allow: Allow,
    *,
    kind: str,
    audit: AuditLog,
    who: str,
    opener: Opener | None = None,
) -> Marker:
    """Write our marker into the folder that was looked at, if it is still the same and holds no strangers.

    Raises Refused: no_consent, plan_expired, content_changed, strangers, nothing_there (an empty or failed listing is
    no reason to own something), and what `look_for_adoption` raises.
    """
    if consent_sha != adoption.sha or adoption.content_sha() != adoption.sha:
        raise Refused(
            f"consent is for {consent_sha!r}, this is {adoption.sha}", fix="look at it again", reason="no_consent"
        )
    if not 0 <= time.time() - adoption.time <= VALID_S:
        raise Refused("the look is older than 15 minutes", fix="look at it again", reason="plan_expired")
    if adoption.files == 0:
        raise Refused(f"{adoption.path} holds no file: nothing proves what it is", reason="nothing_there")
    if adoption.strangers:
        raise Refused(
            f"{adoption.path} holds {adoption.strangers} files of no known pattern, e.g. {adoption.stranger_sample[0]}",
            fix="move them elsewhere, or name the folder below that holds only the cache",
            reason="strangers",
        )
    root = Path(adoption.root)
    check_names(root, adoption.rel, allow)
    use = opener or choose_opener()
    with open_folder(root, adoption.rel, use) as fds:
        if _look(root, adoption.rel, fds[-1], tuple(adoption.counts), use).sha != adoption.sha:
            raise Refused(f"{adoption.path} changed since the look", fix="look again", reason="content_changed")
        facts = {"path": str(adoption.path), "look": adoption.as_json(), "kind": kind}
        audit.append("adopt", "before", who=who, **facts)
        marker = put_marker(Path(f"/proc/self/fd/{fds[-1]}"), kind, f"adopted-{adoption.sha}", who)
    audit.append("adopt", "after", who=who, marker=marker.as_json(), path=str(adoption.path))
    return marker
