"""Opening folders so that neither a symlink, nor `..`, nor a mount can lead out of the tree.

The kernel does it in one call (`openat2`, Linux 5.6); where that is missing or forbidden (containers), each component
is opened with O_NOFOLLOW and its mount compared with its parent's. `os.path.ismount`, `st_dev` and
`rm --one-file-system` do not see a bind mount of the same file system: here they emptied one. Deletes nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from backend.errors import Refused

Opener = Callable[[int, str], int]
"""(folder descriptor, relative path) → descriptor of the folder there; raises Refused."""

_SYS_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_WORDS = {
    errno.EXDEV: ("mount", "there is a mount point on the way, or it leads out of the root"),
    errno.ELOOP: ("symlink", "there is a symlink on the way"),
    errno.ENOTDIR: ("symlink", "a part of it is a symlink or no folder"),
    errno.ENOENT: ("gone", "it does not exist"),
}


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def _openat2(dir_fd: int, relative: str) -> int:
    how = _How(_DIR_FLAGS, 0, _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH)
    path = ctypes.c_char_p(os.fsencode(relative))
    fd = int(_libc.syscall(_SYS_OPENAT2, dir_fd, path, ctypes.byref(how), ctypes.sizeof(how)))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), relative)
    return fd


def _refusal(relative: str, error: OSError) -> Refused:
    reason, words = _WORDS.get(error.errno or 0, ("unreadable", f"it cannot be opened: {error.strerror}"))
    return Refused(f"{relative}: {words}", fix="nothing was changed", reason=reason)


def open_by_kernel(dir_fd: int, relative: str) -> int:
    """Open with `openat2`: beneath `dir_fd`, no symlink, no mount crossed."""
    try:
        return _openat2(dir_fd, relative)
    except OSError as error:
        raise _refusal(relative, error) from error


def open_by_component(dir_fd: int, relative: str) -> int:
    """The same without `openat2`. Raises Refused (`mount_unknown`) where the kernel does not name mounts."""
    fd = os.dup(dir_fd)
    try:
        for part in relative.split("/"):
            if part in ("", ".", ".."):
                raise Refused(f"{relative}: {part!r} is no plain component", reason="bad_path")
            below = os.open(part, _DIR_FLAGS, dir_fd=fd)
            crossed = _mount_id(below) != _mount_id(fd)
            os.close(fd)
            fd = below
            if crossed:
                raise OSError(errno.EXDEV, "mount point", part)
    except OSError as error:
        os.close(fd)
        raise _refusal(relative, error) from error
    except Refused:
        os.close(fd)
        raise
    return fd


def _mount_id(fd: int) -> int:
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    except OSError as error:
        raise Refused(f"mounts cannot be checked: {error}", reason="mount_unknown") from error
    match = re.search(r"^mnt_id:\s*(\d+)$", text, re.MULTILINE)
    if match is None:
        raise Refused("mounts cannot be checked: the kernel does not name them", reason="mount_unknown")
    return int(match[1])


def choose_opener() -> Opener:
    """`openat2` where the kernel has and allows it, else the walk by component."""
    root = os.open("/", _DIR_FLAGS)
    try:
        os.close(_openat2(root, "."))
    except OSError:
        return open_by_component
    finally:
        os.close(root)
    return open_by_kernel


def mounts_at_or_below(path: Path) -> tuple[str, ...]:
    """Mount points at or below `path` (which is real, without symlinks), from the kernel's own list.

    Raises Refused (`mount_unknown`) where it cannot be read: then nothing may be deleted.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError as error:
        raise Refused(f"mounts cannot be checked: {error}", reason="mount_unknown") from error
    points = (os.fsdecode(_unescape(line.split()[4])) for line in lines)
    return tuple(point for point in points if point == str(path) or point.startswith(f"{path}/"))


def _unescape(field: bytes) -> bytes:
    r"""mountinfo writes space, tab, newline and backslash as \040 and so on."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
