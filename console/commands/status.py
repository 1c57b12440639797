"""`status`: the pipelines on the host, and what each pilot and stage is doing, from one snapshot."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from backend.errors import Exit, Refused, UsageError
from console import phrases, session
from console.interrupt import Interrupted, interrupts
from console.link.client import Client
from console.marks import duration, mark
from console.sanitise import clean
from console.session import Site
from console.state import Progress
from console.summary import screen

NEWEST = 10
WATCH_S = 2.0
_WORKING = ("running", "ready")


def run(args: argparse.Namespace) -> int:
    """Print it once, or again and again with `--watch`; with `--idle` only say whether anything runs."""
    where = session.site(args, needs_config=False)
    if not where.home.is_dir():
        return _nothing(args, where)
    return asyncio.run(_status(args, where))


async def look(client: Client, pipeline: str | None) -> dict[str, Any]:
    """The snapshot of one pipeline, the newest if `pipeline` is None.

    Raises:
        UsageError: there is none (reason ``no_pipeline``).
    """
    limit = 1 if pipeline is None else None
    known: list[dict[str, Any]] = (await client.call("snapshot", {"limit": limit}))["pipelines"]
    for candidate in known:
        if pipeline in (None, candidate["id"]):
            return candidate
    raise UsageError(
        f"there is no pipeline {pipeline!r} here" if pipeline else "there is no pipeline here yet",
        fix="`eagle3-console status --all` lists them; `eagle3-console --auto` starts one",
        reason="no_pipeline",
    )


def working(snapshot: Mapping[str, Any]) -> list[str]:
    """What runs now: `<pipeline> <pilot or stage>`, also a job whose supervisor died under it."""
    found = []
    for pipeline in snapshot["pipelines"]:
        for part in ({"name": "pilot", **pipeline["pilot"]}, *pipeline["stages"]):
            if part["state"] in _WORKING or part.get("job_alive"):
                found.append(f"{pipeline['id']} {part['name']}")
    return found


async def _status(args: argparse.Namespace, where: Site) -> int:
    with interrupts(None) as taken:
        async with session.connect(where) as client:
            limit = None if args.all or args.idle else NEWEST
            while True:
                now = await taken.race(client.call("snapshot", {"limit": limit}))
                if args.idle:
                    return _idle(now)
                if args.output != "text":
                    print(json.dumps(now), flush=True)
                else:
                    _show(now)
                if not args.watch:
                    return Exit.OK
                with contextlib.suppress(Interrupted):
                    await taken.race(asyncio.sleep(WATCH_S))
                    continue
                return Exit.OK


def _nothing(args: argparse.Namespace, where: Site) -> int:
    if args.output != "text":
        print(json.dumps({"v": 1, "t": time.time(), "home": str(where.home), "total": 0, "pipelines": []}))
    elif not args.idle:
        print(f"no pipelines: {where.home} does not exist yet", file=sys.stderr)
    return Exit.OK


def _idle(snapshot: Mapping[str, Any]) -> int:
    """0 if nothing runs.

    Raises:
        Refused: something does (reason ``not_idle``).
    """
    if busy := working(snapshot):
        raise Refused(
            "not idle:\n" + "\n".join(busy),
            fix="`eagle3-console stop --services` stops a pipeline and its servers",
            reason="not_idle",
        )
    return Exit.OK


def _show(snapshot: Mapping[str, Any]) -> None:
    console = screen(sys.stdout)
    if not snapshot["pipelines"]:
        console.print(f"no pipelines in {clean(snapshot['home'])}")
    for pipeline in snapshot["pipelines"]:
        console.print(_heading(pipeline, float(snapshot["t"])))
        console.print(_stages(pipeline))
    left = snapshot["total"] - len(snapshot["pipelines"])
    if left > 0:
        console.print(f"{left} older ones: --all")


def _heading(pipeline: Mapping[str, Any], now: float) -> Text:
    pilot = pipeline["pilot"]
    look = mark(pilot["state"])
    age = f", {duration(now - pipeline['created'])} ago" if pipeline.get("created") else ""
    by = pipeline.get("operator") or {}
    who = f" by {clean(str(by.get('who')))}@{clean(str(by.get('host')))}" if by else ""
    why = f" ({clean(pilot['reason'])})" if pilot.get("reason") else ""
    text = Text(f"{pipeline['id']} {clean(pipeline['name'])}{who}{age}: ", "bold")
    return text.append(f"pilot {look.glyph} {look.word}{why}", look.style)


def _stages(pipeline: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for number, stage in enumerate(pipeline["stages"], 1):
        look = mark(stage["state"])
        table.add_row(
            Text(f"{number:>4}", "dim"),
            Text(clean(stage["name"])),
            Text(f"{look.glyph} {look.word}", look.style),
            Text(_detail(stage)),
        )
    return table


def _detail(stage: Mapping[str, Any]) -> str:
    if d := stage.get("progress"):
        made = Progress(d["done"], d["total"], d["unit"], d["t"], d.get("rate"), d.get("eta_s"), d.get("eta_hi_s"))
        return phrases.progress(made)
    if why := stage.get("why") or stage.get("reason"):
        return clean(str(why))
    if stage.get("t0") and stage.get("t1"):
        return f"in {duration(stage['t1'] - stage['t0'])}"
    return ""
