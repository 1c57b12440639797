"""`undo`: take a purge back while its trash is still there."""

from __future__ import annotations

import argparse
import asyncio

from backend.errors import Exit
from console import session


def run(args: argparse.Namespace) -> int:
    """Rename the trash back and print where it is.

    Raises:
        UsageError: no such purge, or its undo window is over and it is gone.
    """
    where = session.site(args, needs_config=False)
    session.check_home(where)
    print(asyncio.run(_undo(where, args.sha)))
    return Exit.OK


async def _undo(where: session.Site, sha: str) -> str:
    async with session.connect(where) as client:
        answer = await client.call("undo", {"sha": sha, "operator": session.operator()})
        return str(answer["path"])
