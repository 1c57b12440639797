"""`init`: write a built-in profile as a commented config file to start from."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from pathlib import Path

from backend.errors import Exit, OperatorError, Refused, UsageError
from backend.resolve import profile_text
from console import session


def run(args: argparse.Namespace) -> int:
    """Write the file; never over an existing one.

    Raises:
        UsageError: the file exists (reason ``file_exists``), or there is no such profile.
    """
    path = Path(args.path)
    if args.allow_store:
        return _allow_store(path)
    text = profile_text(args.profile)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already and is left as it is",
            fix="name another file: eagle3-console init PATH",
            reason="file_exists",
        ) from None
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}", code=Exit.USAGE) from error
    print(path)
    session.to_stderr(f"next: edit {path}, then `eagle3-console --config {path} plan`")
    session.to_stderr(f"to let purge delete older stores: `eagle3-console init --allow-store {path}`")
    return Exit.OK


def _allow_store(path: Path) -> int:
    """Ask for the typed phrase `<host>/<folder>` and put the store's root on the host's allow list.

    Raises:
        Refused: not confirmed, or there is no terminal to confirm on.
    """
    where = session.site(argparse.Namespace(config=str(path), profile=None, host=None), needs_config=True)
    assert where.config is not None
    config = where.config.config
    root = Path(config.host.work) / config.store.root
    phrase = f"{socket.gethostname()}/{root.name}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Refused("this needs a terminal: the agreement is typed", reason="needs_confirmation")
    sys.stderr.write(f"purge may delete stores of ours under {root}\ntype {phrase} to agree: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip() != phrase:
        raise Refused("not confirmed, nothing was changed", reason="not_confirmed")
    root.mkdir(parents=True, exist_ok=True)
    print("\n".join(asyncio.run(_allow(where, root))))
    return Exit.OK


async def _allow(where: session.Site, root: Path) -> list[str]:
    async with session.connect(where) as client:
        answer = await client.call("allow", {"root": str(root), "operator": session.operator()})
        return [str(entry) for entry in answer["roots"]]
