"""Deleting a folder: plan, consent, re-check by descriptor, rename to trash, undo window, purge.

Owns the rules (docs/safety.md lists them with the attack that each one stops) and the trash name. A plan binds
consent to content: device, inode, owner, counts, newest change, marker, host. Whatever cannot be looked at is a
refusal, and nothing is unlinked until fifteen minutes after the rename. Knows neither stores nor stages: who else
refers to the folder is told by the caller, and "I could not find out" is a refusal too.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from backend.errors import Refused
from backend.report import Reporter, Silent
from backend.runs.allow import Allow
from backend.runs.audit import AuditLog
from backend.runs.beneath import Opener, choose_opener, mounts_at_or_below
from backend.runs.inuse import uses
from backend.runs.marker import MARKER, host_name, write_marker
from backend.runs.target import (
    TRASH_PREFIX,
    Content,
    Target,
    check_identity,
    check_names,
    entries_of,
    open_target,
    walk,
)

__all__ = [
    "DeletePlan",
    "Purged",
    "Trashed",
    "apply_delete",
    "pending_trash",
    "plan_delete",
    "purge_trash",
    "undo",
    "write_marker",
]

PLAN_VALID_S = 15 * 60.0
FROZEN_VALID_S = 24 * 3600.0
UNDO_WINDOW_S = 15 * 60.0
_FUTURE_S = 60.0
_NOT_CONTENT = frozenset({"time", "sha", "disk_bytes", "unseen_processes"})


@dataclass(frozen=True)
class DeletePlan:
    """What would be deleted, as shown to the person who consents.

    `files` counts everything that is no folder, `bytes` their sizes, `disk_bytes` the blocks that come free,
    `newest_mtime_ns` the newest change of a file or folder. `sha` (16 hex digits) covers all but the times and what
    does not belong to the content. `unseen_processes`: those of other users, which may use the folder unseen.
    """

    root: str
    rel: str
    host: str
    dev: int
    inode: int
    uid: int
    kind: str
    marker_id: str
    files: int
    folders: int
    bytes: int
    newest_mtime_ns: int
    disk_bytes: int
    unseen_processes: int
    time: float
    sha: str = ""

    @property
    def path(self) -> Path:
        """The folder itself."""
        return Path(self.root) / self.rel

    @property
    def phrase(self) -> str:
        """What a person types to consent: host and folder name, so that a wrong window cannot be confirmed."""
        return f"{self.host}/{Path(self.rel).name}"

    def content_sha(self) -> str:
        """The sha that these facts have; differs from `sha` in a plan that was edited."""
        facts = {name: value for name, value in asdict(self).items() if name not in _NOT_CONTENT}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeletePlan:
        """The plan that `as_json` wrote."""
        return cls(**{name.name: data[name.name] for name in fields(cls)})


@dataclass(frozen=True)
class Trashed:
    """A folder that was renamed to trash at `time` (epoch seconds) and can come back until it is purged."""

    plan: DeletePlan
    time: float

    @property
    def path(self) -> Path:
        """Where it stands now."""
        return self.plan.path.with_name(f"{TRASH_PREFIX}{self.plan.sha}")

    @property
    def undo_until(self) -> float:
        """Epoch seconds; the purge refuses to run before."""
        return self.time + UNDO_WINDOW_S


@dataclass(frozen=True)
class Purged:
    """What a purge unlinked."""

    files: int
    bytes: int


def _look(
    root: Path, rel: str, target: Target, kind: str | None, references: Sequence[str] | None
) -> tuple[os.stat_result, Content, int]:
    """Every check on an open target except those of consent, in the order cheap to dear."""
    path = root / rel
    info = check_identity(target, path)
    if kind is not None and target.marker.kind != kind:
        raise Refused(f"{path} is marked as {target.marker.kind}, not as {kind}", reason="foreign_marker")
    if references is None:
        raise Refused(
            f"it could not be found out which runs use {path}",
            fix="repair what made the listing of runs fail",
            reason="references_unknown",
        )
    if references:
        raise Refused(
            f"{path} is used by {', '.join(references)}", fix="finish or stop them first", reason="referenced"
        )
    mounts = mounts_at_or_below(path)
    if mounts:
        raise Refused(f"{path} holds a mount: {', '.join(mounts)}", fix="unmount it first", reason="mount")
    content = walk(target, path)
    users = uses(str(path), info.st_dev, content.inodes, own_fds=target.own_fds)
    if users.found:
        raise Refused(f"{path} is in use by pid {users.pids()}", fix="stop them first", reason="in_use")
    return info, content, users.unseen


def plan_delete(
    root: Path,
    rel: str,
    allow: Allow,
    *,
    references: Sequence[str] | None,
    kind: str | None = None,
    opener: Opener | None = None,
) -> DeletePlan:
    """Look at `root`/`rel` and say what deleting it would mean. Changes nothing.

    `references` names the running, stale or unfinished runs that use it: empty = none do, None = could not be found
    out. `kind` is the marker kind to insist on. Raises Refused with one of: root_not_allowed, bad_root, bad_path,
    symlink, mount, mount_unknown, gone, unreadable, too_deep, no_marker, bad_marker, foreign_marker, foreign_owner,
    references_unknown, referenced, in_use.
    """
    check_names(root, rel, allow)
    with open_target(root, rel, opener or choose_opener()) as target:
        info, content, unseen = _look(root, rel, target, kind, references)
        return _plan(root, rel, target, info, content, unseen)


def _plan(root: Path, rel: str, target: Target, info: os.stat_result, content: Content, unseen: int) -> DeletePlan:
    plan = DeletePlan(
        root=str(root),
        rel=rel,
        host=host_name(),
        dev=info.st_dev,
        inode=info.st_ino,
        uid=info.st_uid,
        kind=target.marker.kind,
        marker_id=target.marker.id,
        files=content.files,
        folders=content.folders,
        bytes=content.bytes,
        newest_mtime_ns=content.newest_mtime_ns,
        disk_bytes=content.disk_bytes,
        unseen_processes=unseen,
        time=time.time(),
    )
    return replace(plan, sha=plan.content_sha())


def _check_consent(plan: DeletePlan, consent_sha: str, frozen_at: float | None, now: float) -> None:
    if plan.content_sha() != plan.sha:
        raise Refused(f"the plan {plan.sha} was edited", fix="make a new plan", reason="plan_edited")
    if consent_sha != plan.sha:
        raise Refused(
            f"consent is for plan {consent_sha!r}, this is plan {plan.sha}",
            fix=f"look at the plan, then consent to purge={plan.sha}",
            reason="no_consent",
        )
    if plan.host != host_name():
        raise Refused(f"the plan was made on {plan.host}, this is {host_name()}", reason="other_host")
    since, valid = (plan.time, PLAN_VALID_S) if frozen_at is None else (frozen_at, FROZEN_VALID_S)
    if frozen_at is not None and not 0 <= frozen_at - plan.time <= PLAN_VALID_S:
        raise Refused("the plan was older than 15 minutes when it was frozen", reason="plan_expired")
    if not -_FUTURE_S <= now - since <= valid:
        raise Refused(
            f"the plan is {(now - since) / 60:.0f} min old, valid are {valid / 60:.0f}",
            fix="make a new plan and consent to it",
            reason="plan_expired",
        )


def _check_same(plan: DeletePlan, now: DeletePlan) -> None:
    for name, old in asdict(plan).items():
        new = getattr(now, name)
        if name not in _NOT_CONTENT and old != new:
            raise Refused(
                f"{plan.path} changed since the plan: {name} was {old}, is {new}",
                fix="look at it again and make a new plan",
                reason="content_changed",
            )


def apply_delete(
    plan: DeletePlan,
    consent_sha: str,
    allow: Allow,
    *,
    references: Sequence[str] | None,
    audit: AuditLog,
    who: str,
    frozen_at: float | None = None,
    opener: Opener | None = None,
) -> Trashed:
    """Check everything again and rename the folder to trash, in place. No byte is freed before `purge_trash`.

    Consent is `consent_sha`; it is valid for 15 minutes, or for 24 h after `frozen_at` (epoch seconds) when the plan
    was frozen into a pipeline's plan. Raises Refused as `plan_delete`, and: plan_edited, no_consent, other_host,
    plan_expired, content_changed, trash_exists, swapped; the folder is then where it was. Audited before and after.
    """
    facts = {"plan": plan.as_json(), "consent": consent_sha, "frozen_at": frozen_at}
    try:
        _check_consent(plan, consent_sha, frozen_at, time.time())
        root = Path(plan.root)
        check_names(root, plan.rel, allow)
        with open_target(root, plan.rel, opener or choose_opener()) as target:
            found = _look(root, plan.rel, target, plan.kind, references)
            _check_same(plan, _plan(root, plan.rel, target, *found))
            trashed = Trashed(plan, time.time())
            facts |= {"trash": str(trashed.path), "time": trashed.time}
            audit.append("delete", "before", who=who, **facts)
            _rename_verified(target, plan, trashed)
    except Refused as refusal:
        audit.append("delete", "refused", who=who, **facts, refusal=refusal.as_json())
        raise
    audit.append("delete", "after", who=who, **facts)
    return trashed


def _rename_verified(target: Target, plan: DeletePlan, trashed: Trashed) -> None:
    """Rename, then look whether it was the right folder and still the same; else rename it back."""
    trash = trashed.path.name
    _rename_new(target.parent_fd, target.name, trash, "trash_exists")
    try:
        fd = target.opener(target.parent_fd, trash)
        try:
            info = os.fstat(fd)
            if (info.st_dev, info.st_ino) != (plan.dev, plan.inode):
                raise Refused(f"{plan.path} was swapped at the last moment", fix="nothing was lost", reason="swapped")
        finally:
            os.close(fd)
        # What was written between the look and the rename would be deleted unseen.
        content = walk(target, trashed.path)
        counts = (content.files, content.folders, content.bytes, content.newest_mtime_ns)
        if counts != (plan.files, plan.folders, plan.bytes, plan.newest_mtime_ns):
            raise Refused(f"{plan.path} changed at the last moment", fix="make a new plan", reason="content_changed")
    except BaseException:
        _rename_new(target.parent_fd, trash, target.name, "undo_blocked")
        raise


def _rename_new(parent_fd: int, old: str, new: str, reason: str) -> None:
    """Rename without ever replacing something: a plain rename(2) silently replaces an empty folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, goal = (ctypes.c_char_p(os.fsencode(name)) for name in (old, new))
    if libc.renameat2(parent_fd, source, parent_fd, goal, 1) == 0:  # RENAME_NOREPLACE
        os.fsync(parent_fd)
        return
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):  # a file system without the flag (NFS): look first, then rename
        number = _rename_looking(parent_fd, old, new)
        if number == 0:
            return
    if number == errno.EEXIST:
        raise Refused(f"{new} exists already", fix="move it out of the way", reason=reason)
    raise Refused(f"{old} cannot be renamed to {new}: {os.strerror(number)}", reason="rename_failed")


def _rename_looking(parent_fd: int, old: str, new: str) -> int:
    try:
        os.stat(new, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(old, new, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
        return 0
    return errno.EEXIST


def _check_trash(trashed: Trashed, target: Target) -> None:
    plan = trashed.plan
    info = check_identity(target, trashed.path)
    if (info.st_dev, info.st_ino, target.marker.id) != (plan.dev, plan.inode, plan.marker_id):
        raise Refused(f"{trashed.path} is not the folder that was put there", reason="swapped")


def _trash_rel(trashed: Trashed) -> str:
    return str(Path(trashed.plan.rel).with_name(trashed.path.name))


def undo(trashed: Trashed, allow: Allow, *, audit: AuditLog, who: str, opener: Opener | None = None) -> Path:
    """Rename the folder back to where it was; possible until it is purged. Returns its path.

    Raises Refused: undo_blocked (something stands there now), gone, swapped.
    """
    root = Path(trashed.plan.root)
    allow.check(root)
    facts = {"sha": trashed.plan.sha, "path": str(trashed.plan.path), "trash": str(trashed.path)}
    with open_target(root, _trash_rel(trashed), opener or choose_opener()) as target:
        _check_trash(trashed, target)
        audit.append("undo", "before", who=who, **facts)
        _rename_new(target.parent_fd, target.name, trashed.plan.path.name, "undo_blocked")
    audit.append("undo", "after", who=who, **facts)
    return trashed.plan.path


def purge_trash(
    trashed: Trashed,
    allow: Allow,
    *,
    audit: AuditLog,
    who: str,
    reporter: Reporter | None = None,
    opener: Opener | None = None,
) -> Purged:
    """Unlink a trashed folder by descriptor, the marker last, so that a purge that was cut off can be done again.

    Raises Refused: undo_window (15 minutes are not over), and the looks of `plan_delete`.
    """
    root, rel = Path(trashed.plan.root), _trash_rel(trashed)
    allow.check(root)
    facts = {"sha": trashed.plan.sha, "path": str(trashed.plan.path), "trash": str(trashed.path)}
    left = trashed.undo_until - time.time()
    if left > 0:
        raise Refused(f"{trashed.path} can be undone for another {left:.0f} s", reason="undo_window")
    with open_target(root, rel, opener or choose_opener()) as target:
        _check_trash(trashed, target)
        _look(root, rel, target, trashed.plan.kind, ())
        audit.append("purge", "before", who=who, **facts)
        purge = _Purge(target, trashed.plan.files, reporter or Silent())
        purge.run()
        os.unlink(MARKER, dir_fd=target.fd)
        os.rmdir(target.name, dir_fd=target.parent_fd)
    purged = Purged(purge.files + 1, purge.bytes)
    audit.append("purge", "after", who=who, files=purged.files, bytes=purged.bytes, **facts)
    return purged


class _Purge:
    """Depth-first unlinking below one target, everything but its marker."""

    def __init__(self, target: Target, total: int, reporter: Reporter) -> None:
        self._target = target
        self._total = total
        self._reporter = reporter
        self.files = 0
        self.bytes = 0

    def run(self) -> None:
        self._below(self._target.fd, str(self._target.name), 0)

    def _below(self, fd: int, name: str, depth: int) -> None:
        for child, info in entries_of(fd, name, depth):
            if stat.S_ISDIR(info.st_mode):
                below = self._target.opener(fd, child)
                try:
                    self._below(below, f"{name}/{child}", depth + 1)
                finally:
                    os.close(below)
                os.rmdir(child, dir_fd=fd)
            elif depth > 0 or child != MARKER:
                os.unlink(child, dir_fd=fd)
                self.files += 1
                self.bytes += info.st_size
                self._reporter.progress(self.files, self._total, "file", bytes=self.bytes)


def pending_trash(audit: AuditLog) -> tuple[Trashed, ...]:
    """What was trashed and neither undone nor purged, oldest first.

    The folder itself decides: a rename whose second audit line was lost (power cut) is found by its first one, and a
    purge that was cut off is not a purge.
    """
    pending: dict[str, Trashed] = {}
    for entry in audit.entries():
        if entry.action == "delete" and entry.phase != "refused":
            trashed = Trashed(DeletePlan.from_json(entry.facts["plan"]), entry.facts["time"])
            pending[str(trashed.path)] = trashed
    return tuple(trashed for trashed in pending.values() if trashed.path.is_dir())
