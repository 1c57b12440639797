"""From flags to a connected agent: which config, which host, which home, which interpreter, which operator.

Owns that resolution and nothing after it. Commands that only look (`status`, `logs`, `attach`, `stop`) work without
any config: then the home is `$EAGLE3_HOME` or the default one.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backend.errors import UsageError
from backend.runs.layout import Home

if TYPE_CHECKING:
    from backend.resolve import Resolved
    from console.link.client import Client

SUPPORTED_HOSTS = ("local",)


@dataclass(frozen=True)
class Site:
    """Where to work. `config` is None only where no config was needed and none was found."""

    host: str
    home: Path
    python: str
    config: Resolved | None


def site(args: argparse.Namespace, *, needs_config: bool) -> Site:
    """Resolve the flags.

    Raises:
        UsageError: no config where one is needed, a wrong one, or a host that this version cannot reach.
    """
    from backend.resolve import load

    overrides = {"host.address": args.host} if args.host else {}
    try:
        resolved = load(config=Path(args.config) if args.config else None, profile=args.profile, overrides=overrides)
    except UsageError as error:
        if needs_config or error.reason != "no_config":
            raise
        _check_host(args.host or "local")
        return Site("local", Home.from_environ(os.environ).path, sys.executable, None)
    host = resolved.config.host
    _check_host(host.address)
    return Site(host.address, Path(host.home), host.python or sys.executable, resolved)


def check_home(where: Site) -> None:
    """For commands that look at what is there: a home that does not exist has nothing to show, and is not made.

    Raises:
        UsageError: there is no home (reason ``no_pipeline``).
    """
    if not where.home.is_dir():
        raise UsageError(
            f"there is no pipeline here: {where.home} does not exist",
            fix="start one with `eagle3-console --auto`, or name its --config, --profile or $EAGLE3_HOME",
            reason="no_pipeline",
        )


@asynccontextmanager
async def connect(where: Site, narrate: Callable[[str], None] | None = None) -> AsyncIterator[Client]:
    """A connected agent at `where`; its narration goes to stderr unless somebody else takes it."""
    from console.link import local

    async with local.connect(where.home, narrate or to_stderr) as client:
        yield client


def to_stderr(line: str) -> None:
    """One line of narration."""
    print(line, file=sys.stderr, flush=True)


def operator() -> dict[str, str]:
    """Who acts, for leases and audit lines."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a passwd entry
        user = f"uid {os.getuid()}"
    return {"who": user, "host": socket.gethostname()}


def _check_host(address: str) -> None:
    if address not in SUPPORTED_HOSTS:
        raise UsageError(
            f"host {address!r} cannot be reached by this version",
            fix=f"supported: {', '.join(SUPPORTED_HOSTS)} (set --host or [host] address)",
            reason="unsupported_host",
        )
