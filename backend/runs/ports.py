"""Who listens on a TCP port of this host, from the kernel's tables. No connection is made, nothing is signalled."""

from __future__ import annotations

from pathlib import Path

_LISTEN = "0A"


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for words in (line.split() for line in lines):
            if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(words[9])
    return inodes


def is_listening(port: int) -> bool:
    """True while some process of this network namespace listens on `port`, on any address."""
    return bool(_listening_inodes(port))


def listeners(port: int) -> tuple[int, ...]:
    """Pids that hold a listening socket of `port`; those of other users stay unseen without root."""
    links = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not links:
        return ()
    found = set()
    for fds in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(str(fd.readlink()) in links for fd in fds.iterdir()):
                found.add(int(fds.parent.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return tuple(sorted(found))
