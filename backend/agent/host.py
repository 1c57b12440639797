"""Facts about the host that stages and screens ask for: memory limit, disk, shared memory, containers, limits.

Standard library only; each function looks once and returns a value. What a container hides (the memory limit of its
cgroup, the small `/dev/shm`, the overlay under the home folder) is looked for by name, since it is what kills runs.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DiskSpace:
    """Free and total space of the file system that holds a path, for an ordinary user. Bytes and inodes."""

    path: str
    total: int
    free: int
    inodes_free: int
    """Free inodes; -1 where the file system has no fixed number (btrfs, some overlays)."""
    kind: str


def disk_space(path: Path) -> DiskSpace:
    """Space of the file system under `path`, or under its nearest ancestor that exists."""
    there = nearest_existing(path)
    facts = os.statvfs(there)
    inodes = facts.f_favail if facts.f_files else -1
    return DiskSpace(
        str(there), facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize, inodes, mount_kind(there)
    )


def nearest_existing(path: Path) -> Path:
    """`path` itself or the closest ancestor that exists."""
    path = Path.cwd() / path
    while not path.exists():
        path = path.parent
    return path


def mount_kind(path: Path) -> str:
    """File system type of the mount that holds `path` (ext4, overlay, tmpfs, nfs4 …), "" if it cannot be read."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    target = os.path.realpath(path)
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def memory_limit() -> tuple[int, str]:
    """Bytes that this process tree may use, and who says so: a cgroup (v2, v1) or the machine itself."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < total:
            return int(text), f"cgroup limit ({name})"
    return total, "physical memory"


def available_memory() -> int:
    """Bytes that can be had without swapping (`MemAvailable`)."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def open_file_limit() -> tuple[int, int]:
    """Soft and hard limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def container() -> str:
    """The kind of container this runs in ("docker", "lxc", "kubernetes" …), "" if none is seen."""
    if Path("/.dockerenv").exists():
        return "docker"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if Path("/run/.containerenv").exists():
        return "podman"
    try:
        environ = Path("/proc/1/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    named = [value.removeprefix(b"container=") for value in environ if value.startswith(b"container=")]
    return named[0].decode(errors="replace") if named else ""
