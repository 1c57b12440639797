"""`stop`: end a pipeline's work (pilot and running task), or one stage; its servers only where that was asked for.

What is stopped is what was seen: the order carries the attempt and state that the operator was shown, and the host
refuses where they have changed since.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from backend.errors import Exit, Refused, UsageError
from console import consent, session
from console.commands.status import look
from console.consent import Consent, Need
from console.marks import mark
from console.session import Site

_LIVE = ("running", "ready")


def run(args: argparse.Namespace) -> int:
    """Stop it and print what was stopped.

    Raises:
        Refused: not agreed to, or the state changed in between; nothing was stopped.
    """
    where = session.site(args, needs_config=False)
    session.check_home(where)
    pipeline = asyncio.run(_look(where, args.pipeline))
    parts = targets(pipeline, args.stage, services=args.services)
    if not parts:
        session.to_stderr(f"nothing to stop: no part of {pipeline['id']} that was asked for is running")
        return Exit.OK
    _agree(args, parts)
    order = {
        "pipeline": pipeline["id"],
        "stage": args.stage,
        "services": args.services,
        "expect": [{"stage": part["name"], "attempt": part["attempt"], "state": part["state"]} for part in parts],
        "operator": session.operator(),
    }
    report = asyncio.run(_stop(where, order))
    for part in report["stopped"]:
        look = mark(part["state"])
        print(f"{part['stage']} attempt {part['attempt']}: {look.glyph} {look.word}")
    return Exit.OK


def targets(pipeline: Mapping[str, Any], stage: str | None, *, services: bool) -> list[dict[str, Any]]:
    """The live parts that the words mean, pilot first: it must not start the next thing while the last one ends.

    Raises:
        UsageError: no such stage in the pipeline.
    """
    pilot = {"name": "pilot", "kind": "task", **pipeline["pilot"]}
    everything = [pilot, *pipeline["stages"]]
    if stage is not None:
        wanted = [part for part in everything if part["name"] == stage]
        if not wanted:
            names = ", ".join(part["name"] for part in everything)
            raise UsageError(f"{pipeline['id']} has no stage {stage!r}", fix=f"one of: {names}", reason="no_stage")
    else:
        wanted = [part for part in everything if services or part["kind"] == "task"]
    return [part for part in wanted if part["state"] in _LIVE or part.get("job_alive")]


def _agree(args: argparse.Namespace, parts: list[dict[str, Any]]) -> None:
    """Severity 1 for tasks (their work can be taken up again), 2 for a server (its load is lost)."""
    serving = [part["name"] for part in parts if part["kind"] == "service"]
    lacking = [Need(", ".join(part["name"] for part in parts), 1, ("--yes",))] if len(parts) > len(serving) else []
    lacking += [Need(name, 2, ("--allow stop",)) for name in serving]
    agreed = Consent(args.yes, tuple(args.allow))
    lacking = [need for need in lacking if not agreed.covers(need)]
    if not lacking:
        return
    if args.no_input or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Refused(
            f"confirmation needed, nothing was stopped: {', '.join(part['name'] for part in parts)}",
            fix=f"add {' '.join(consent.flags(lacking))}",
            reason="needs_confirmation",
        )
    for need in lacking:
        question = f"stop {need.stage}? [y/N] " if need.severity == 1 else f"type {need.stage} to stop its server: "
        sys.stderr.write(question)
        sys.stderr.flush()
        answer = sys.stdin.readline().strip()
        if answer.lower() not in ("y", "yes") if need.severity == 1 else answer != need.stage:
            raise Refused("not confirmed, nothing was stopped", reason="not_confirmed")


async def _look(where: Site, pipeline: str | None) -> dict[str, Any]:
    async with session.connect(where) as client:
        return await look(client, pipeline)


async def _stop(where: Site, order: dict[str, Any]) -> dict[str, Any]:
    async with session.connect(where) as client:
        return await client.call("stop", order)
