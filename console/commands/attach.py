"""`attach`: follow a pipeline again, running or ended; its pilot's exit code becomes ours."""

from __future__ import annotations

import argparse
import asyncio

from console import auto, session
from console.commands.status import look
from console.interrupt import interrupts
from console.session import Site
from console.views import View


def run(args: argparse.Namespace) -> int:
    """Replay the pipeline's events from the first, then follow."""
    where = session.site(args, needs_config=False)
    session.check_home(where)
    view = auto.view_for(args.output, where.host)
    try:
        return asyncio.run(_attach(args, where, view))
    finally:
        view.close()


async def _attach(args: argparse.Namespace, where: Site, view: View) -> int:
    with interrupts(args.timeout) as taken:
        async with session.connect(where) as client:
            pipeline = await look(client, args.pipeline)
            view.own("accepted", {"id": pipeline["id"], "how": "attached"})
            return await auto.follow_or_detach(client, pipeline["id"], view, taken, stop=args.stop_on_interrupt)
