"""`logs`: a stage's log on stdout, clean, from the start, from its last lines, or followed to the stage's end."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

from backend.errors import Exit
from console import session
from console.commands.status import look
from console.interrupt import Interrupted, interrupts
from console.link.client import Client
from console.sanitise import Lines
from console.session import Site

PILOT = "pilot"


def run(args: argparse.Namespace) -> int:
    """Print the log. Interrupting it is its normal end: 0."""
    where = session.site(args, needs_config=False)
    session.check_home(where)
    return asyncio.run(_logs(args, where))


async def _logs(args: argparse.Namespace, where: Site) -> int:
    with interrupts(None) as taken:
        async with session.connect(where) as client:
            try:
                await taken.race(_print(client, args))
            except Interrupted as interrupt:
                return Exit.OK if args.follow else interrupt.code
    return Exit.OK


async def _print(client: Client, args: argparse.Namespace) -> None:
    pipeline = await look(client, args.pipeline)
    order = {
        "pipeline": pipeline["id"],
        "stage": args.stage or at_work(pipeline),
        "attempt": args.attempt,
        "tail_lines": args.tail,
        "follow": args.follow,
    }
    stream = await client.stream("log", order)
    session.to_stderr(f"{stream.opening['path']} (attempt {stream.opening['attempt']})")
    lines = Lines()
    try:
        async for chunk in stream:
            for line in lines.feed(chunk.body):
                print(line, flush=args.follow)
        for line in lines.feed(b"", final=True):
            print(line, flush=True)
    finally:
        await stream.close()


def at_work(pipeline: Mapping[str, Any]) -> str:
    """The stage that runs; else the one attempted last; else the pilot."""
    tried = [stage for stage in pipeline["stages"] if stage["attempt"]]
    running = [stage for stage in tried if stage["state"] == "running"]
    latest = sorted(running or tried, key=lambda stage: stage.get("t0") or 0)
    return str(latest[-1]["name"]) if latest else PILOT
