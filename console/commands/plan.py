"""`plan`: what the pipeline would do, printed or saved; and the one way in which every command asks for a plan."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from backend.errors import Exit
from console import session
from console.render_plan import print_deletions, print_plan
from console.session import Site
from console.summary import screen


def run(args: argparse.Namespace) -> int:
    """Print the plan on stdout, as text or as the JSON that `--plan` reads."""
    where = session.site(args, needs_config=True)
    plan = asyncio.run(make_plan(where, selection(args)))
    if args.output != "text":
        print(json.dumps(plan, indent=1))
    elif args.stage == "purge":
        console = screen(sys.stdout)
        print_deletions(plan, console)
        if not plan.get("destructive"):
            console.print("Nothing would be deleted.")
    else:
        print_plan(plan, screen(sys.stdout))
    return Exit.OK


def selection(args: argparse.Namespace) -> dict[str, Any]:
    """`--from --to --only` in the form that the plan holds."""
    return {"from": args.from_stage, "to": args.to_stage, "only": [args.only] if args.only else []}


async def make_plan(where: Site, chosen: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Ask the host what it would do. `config` replaces the resolved one (a saved plan's).

    Raises:
        OperatorError: the plan cannot be made; ConnectionLost.
    """
    assert where.config is not None
    order = {
        "config": dict(config) if config is not None else where.config.as_json(),
        "name": where.config.name,
        "selection": dict(chosen),
        "python": where.python,
    }
    async with session.connect(where) as client:
        return await client.call("plan", order)
