"""The roots below which this product may delete: `allow.json`, on the host, written only after a typed confirmation.

Owns the file and the rules for a root. It stands outside every project, because a project file travels between hosts
and people; there are no patterns, no variables and no `~` in it. No file means: nothing may be deleted.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from backend.errors import Refused
from backend.runs.atomic import read_json, write_json
from backend.runs.beneath import mounts_at_or_below

_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
_SYSTEM_EXCEPT = ("/dev/shm",)


@dataclass(frozen=True)
class Allow:
    """Deletable roots, in the order in which they were allowed."""

    roots: tuple[Path, ...] = ()

    def check(self, root: Path) -> None:
        """Raise Refused unless `root` is on the list and (still) a root that may be there."""
        if root not in self.roots:
            listed = ", ".join(map(str, self.roots)) or "none"
            raise Refused(
                f"{root} is not an allowed root (allowed: {listed})",
                fix="add it with `eagle3-console init`, which asks for a typed confirmation",
                reason="root_not_allowed",
            )
        check_root(root)


def check_root(root: Path) -> None:
    """Raise Refused (`bad_root`) for a root so wide, or so indirect, that a slip below it would be a catastrophe."""
    why = _why_not(root)
    if why:
        raise Refused(f"{root} cannot be a deletable root: {why}", fix="name a folder of its own", reason="bad_root")


def _why_not(root: Path) -> str | None:
    if not root.is_absolute() or ".." in root.parts:
        return "it is not a plain absolute path"
    if len(root.parts) < 3:
        return "it is too close to /"
    if os.path.realpath(root) != str(root):
        return f"it is reached through a symlink (really {os.path.realpath(root)})"
    inside = [root, *root.parents]
    if any(Path(path) in inside for path in _SYSTEM) and not any(Path(path) in root.parents for path in _SYSTEM_EXCEPT):
        return "it is a system path"
    home = Path(os.path.realpath(Path.home()))
    if root in [home, *home.parents]:
        return "it is, or holds, the home folder"
    if str(root) in mounts_at_or_below(root):
        return "it is a mount point; name a folder on it"
    return None


def load(path: Path) -> Allow:
    """Read `allow.json`. Raises Refused (`allow_insecure`) unless it is a plain file, ours, and mode 0600."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return Allow()
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or mode & 0o077:
        raise Refused(
            f"{path} must be a plain file of uid {os.geteuid()} with mode 0600 (uid {info.st_uid}, mode {mode:04o})",
            fix=f"look at what it allows, then: chmod 600 {path}",
            reason="allow_insecure",
        )
    roots = (read_json(path) or {}).get("roots")
    if not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise Refused(f"{path} has no list of roots", reason="allow_insecure")
    return Allow(tuple(Path(root) for root in roots))


def add_root(path: Path, root: Path) -> Allow:
    """Allow one more root; the caller has had it confirmed. Raises Refused (`bad_root`) for one that cannot be."""
    check_root(root)
    home = path.parent.absolute()
    if root in [home, *home.parents]:
        raise Refused(f"{root} holds the state of this product ({home})", reason="bad_root")
    old = load(path)
    allow = old if root in old.roots else Allow((*old.roots, root))
    write_json(path, {"v": 1, "roots": [str(entry) for entry in allow.roots]})
    return allow
