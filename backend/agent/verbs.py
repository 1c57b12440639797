"""The agent's vocabulary: one table of calls, one of streams, shared by `agent serve` and `agent VERB`.

Owns the handshake and the table; each verb's work stands in a module of its own. Calls that wait for a file system or
a process run in a thread, so that heartbeats and other requests go on meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import platform
import pwd
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from backend.agent import deletions, orders, protocol, streams
from backend.agent.child import ask_pilot, code_root
from backend.agent.snapshot import snapshot
from backend.agent.streams import Stream
from backend.errors import UsageError
from backend.runs.identity import boot_id
from backend.runs.layout import Home
from backend.runs.marker import host_name

__all__ = ["CALLS", "STREAMS", "Stream", "call", "check_protocol", "hello", "home_of"]

Args = Mapping[str, Any]
Call = Callable[[Home, Args], Awaitable[dict[str, Any]]]


def home_of(args: Args) -> Home:
    """The home that the client names, or this host's default."""
    named = args.get("home")
    return Home(Path(str(named))) if named else Home.from_environ(os.environ)


def check_protocol(args: Args) -> None:
    """Raises UsageError (reason ``protocol_mismatch``) if the client speaks another version than we do."""
    if args.get("protocol") != protocol.PROTOCOL:
        raise UsageError(
            f"the console speaks protocol {args.get('protocol')!r}, this agent {protocol.PROTOCOL}",
            fix="use the agent that the console brings along",
            reason="protocol_mismatch",
        )


def hello(home: Home) -> dict[str, Any]:
    """Who and where this agent is."""
    return {
        "v": 1,
        "protocol": protocol.PROTOCOL,
        "version": _version(),
        "host": host_name(),
        "host_id": _host_id(),
        "boot_id": boot_id(),
        "time": time.time(),
        "user": _user(),
        "home": str(home.path),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "code": code_root(),
        "pid": os.getpid(),
    }


async def call(verb: str, home: Home, args: Args) -> dict[str, Any]:
    """Carry out a call.

    Raises:
        UsageError: no such verb (reason ``unknown_verb``).
    """
    if verb not in CALLS:
        raise UsageError(
            f"unknown verb {verb!r}", fix=f"one of: {', '.join(sorted({*CALLS, *STREAMS}))}", reason="unknown_verb"
        )
    return await CALLS[verb](home, args)


async def _plan(home: Home, args: Args) -> dict[str, Any]:
    return await ask_pilot("plan", _python(args), home.path, args)


async def _explain(home: Home, args: Args) -> dict[str, Any]:
    return await ask_pilot("explain", _python(args), home.path, args)


async def _start(home: Home, args: Args) -> dict[str, Any]:
    return await asyncio.to_thread(orders.start, home, args)


async def _stop(home: Home, args: Args) -> dict[str, Any]:
    return await asyncio.to_thread(orders.stop, home, args)


async def _undo(home: Home, args: Args) -> dict[str, Any]:
    return await asyncio.to_thread(deletions.undo, home, args)


async def _allow(home: Home, args: Args) -> dict[str, Any]:
    return await asyncio.to_thread(deletions.allow_root, home, args)


async def _snapshot(home: Home, args: Args) -> dict[str, Any]:
    return await asyncio.to_thread(snapshot, home, args.get("limit"))


def _python(args: Args) -> str:
    return str(args.get("python") or sys.executable)


def _version() -> str:
    """The zipapp's name, which holds the hash of its contents; in a checkout the word "checkout"."""
    root = Path(code_root())
    return root.stem if root.suffix == ".pyz" else "checkout"


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's uid without a passwd entry
        return f"uid {os.geteuid()}"


def _host_id() -> str:
    """The machine's id where it has one; containers often share or lack it, so `boot_id` stands beside it."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


CALLS: dict[str, Call] = {
    "allow": _allow,
    "explain": _explain,
    "plan": _plan,
    "snapshot": _snapshot,
    "start": _start,
    "stop": _stop,
    "undo": _undo,
}
STREAMS: dict[str, Callable[[Home, Args], Stream]] = {"log": streams.log, "watch": streams.watch}
