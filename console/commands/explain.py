"""`explain STAGE`: why a stage would run or be skipped, down to the first input that differs, as the host sees it."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from backend.errors import Exit
from console import session
from console.sanitise import clean
from console.session import Site


def run(args: argparse.Namespace) -> int:
    """Print the decision, its reason, and the attempts that it was compared with; or all of it as JSON."""
    where = session.site(args, needs_config=True)
    answer = asyncio.run(_ask(where, args.stage))
    if args.output != "text":
        print(json.dumps(answer, indent=1))
        return Exit.OK
    print(clean(f"{answer['stage']}: {answer['action'].replace('_', ' ')}: {answer['why']}"))
    if answer.get("fingerprint"):
        print(f"  fingerprint {answer['fingerprint']}")
    for attempt in answer.get("attempts") or []:
        print(clean(f"  attempt {attempt}"))
    return Exit.OK


async def _ask(where: Site, stage: str) -> dict[str, Any]:
    assert where.config is not None
    order = {
        "config": where.config.as_json(),
        "name": where.config.name,
        "stage": stage,
        "python": where.python,
    }
    async with session.connect(where) as client:
        return await client.call("explain", order)
