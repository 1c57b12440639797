"""Facts about processes and their sockets, read from `/proc` of this machine.

Owns who listens on a port (socket inode → pid), when a process began in wall-clock time, what it was started with,
and how many bytes a process tree has read from disk or holds in memory. Which process is which is the business of
`backend.runs.identity`. Values are snapshots: a process may be gone a moment later, so every reader here answers None
(or leaves the process out) for one that ended meanwhile. Standard library only. Does not know what an attempt, a
server or a supervisor is; sends no signal.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from backend.runs.identity import all_processes, descendants, environment
from backend.runs.identity import start_ticks as start_ticks

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TCP_LISTEN = "0A"
_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]$")
WILDCARDS = frozenset({"0.0.0.0", "::"})


@dataclass(frozen=True)
class Listener:
    """One listening TCP socket. `pids` hold it open; empty when they belong to a user that we may not inspect."""

    address: str
    port: int
    inode: int
    uid: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class TreeUsage:
    """Sums over a process tree; None where the kernel refused the file (another user's process)."""

    read_bytes: int | None
    rss_bytes: int


def started_at(ticks: int) -> float:
    """Epoch seconds at which a process with these start ticks began.

    Reckoned back from CLOCK_BOOTTIME rather than from `btime` of `/proc/stat`, which has whole seconds only and which
    container file systems (lxcfs) replace by the container's.
    """
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_PER_S)


def tree(root: int) -> list[int]:
    """`root` and its living descendants. A supervisor that is a subreaper keeps orphans in its tree."""
    processes = all_processes()
    own = [root] if root in processes else []
    return own + [seen.pid for seen in descendants(root, processes)]


def argv(pid: int) -> list[str] | None:
    """The command line. A process that retitles itself (setproctitle, as SGLang's children do) shows its title here."""
    raw = _read(pid, "cmdline")
    return None if raw is None else [os.fsdecode(part) for part in raw.rstrip(b"\0").split(b"\0")]


def environ(pid: int) -> dict[str, str]:
    """The environment at exec, empty where it is not ours to read.

    setproctitle, which SGLang calls, overwrites it unless the process was started with SPT_NOENV=1.
    """
    return environment(pid)


def exe(pid: int) -> str | None:
    """Path of the running binary, as the kernel names it (ends in " (deleted)" after an upgrade)."""
    try:
        return str((PROC / str(pid) / "exe").readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def listeners(port: int) -> list[Listener]:
    """Every TCP socket of this network namespace that listens on `port`, IPv4 and IPv6, with its owners."""
    rows = [row for name in ("tcp", "tcp6") for row in _listening_rows(name, port)]
    owners = _socket_owners({inode for _, inode, _ in rows}) if rows else {}
    return [Listener(address, port, inode, uid, tuple(owners.get(inode, []))) for address, inode, uid in rows]


def answers_for(listener: Listener, host: str) -> bool:
    """Whether a client that connects to `host` can end at this listener: same address or wildcard."""
    if listener.address in WILDCARDS or host in WILDCARDS:
        return True
    addresses = {info[4][0] for info in socket.getaddrinfo(host, listener.port, type=socket.SOCK_STREAM)}
    return listener.address in addresses


def usage(root: int) -> TreeUsage:
    """Disk reads and resident memory of a tree.

    `read_bytes` of `/proc/PID/io` counts what was fetched from a block device or NFS, page faults and read-ahead of
    mapped files included, and not what the page cache had (nor what a FUSE file system served). A child that ended is
    counted in the parent that reaped it.
    """
    read: int | None = 0
    rss = 0
    for pid in tree(root):
        part = _read_bytes(pid)
        read = None if part is None or read is None else read + part
        statm = _read(pid, "statm")
        rss += int(statm.split()[1]) * _PAGE if statm else 0
    return TreeUsage(read_bytes=read, rss_bytes=rss)


def _read_bytes(pid: int) -> int | None:
    try:
        text = (PROC / str(pid) / "io").read_text()
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(re.search(r"^read_bytes: (\d+)", text, re.MULTILINE)[1])  # type: ignore[index]


def _read(pid: int, name: str) -> bytes | None:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _listening_rows(name: str, port: int) -> list[tuple[str, int, int]]:
    """(address, inode, uid) of the listening sockets on `port` in `/proc/self/net/NAME`."""
    try:
        lines = (PROC / "self" / "net" / name).read_text().splitlines()[1:]
    except FileNotFoundError:  # IPv6 switched off
        return []
    rows = []
    for line in lines:
        fields = line.split()
        address, _, hex_port = fields[1].partition(":")
        if fields[3] == _TCP_LISTEN and int(hex_port, 16) == port:
            rows.append((decode_address(address), int(fields[9]), int(fields[7])))
    return rows


def decode_address(text: str) -> str:
    """The kernel's hex form of an address (32-bit words in host order) as people write it; v4-mapped v6 becomes v4."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 4 and packed[:12] == b"\0" * 10 + b"\xff\xff":
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _socket_owners(inodes: set[int]) -> dict[int, list[int]]:
    """inode → pids that have it open; processes of other users are not visible without privilege and stay out."""
    owners: dict[int, list[int]] = {}
    for pid in all_processes():
        try:
            held = {_socket_inode(link) for link in (PROC / str(pid) / "fd").iterdir()}
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for inode in inodes & held:
            owners.setdefault(inode, []).append(pid)
    return owners


def _socket_inode(descriptor: Path) -> int:
    """Inode of a socket descriptor, -1 for anything else."""
    try:
        match = _SOCKET_LINK.match(str(descriptor.readlink()))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return -1
    return int(match[1]) if match else -1
