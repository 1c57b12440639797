"""The follower: watches a pipeline to its end and turns the end into an exit code. Used by --auto, demo and attach.

The work is a detached pilot on the host; whatever happens to a follower (Ctrl-C, timeout, lost connection, closed
terminal) leaves the work alone, unless `--stop-on-interrupt` asked for more. Knows nothing of plans or consent.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from backend.agent.protocol import Chunk, unpack
from backend.errors import Exit
from console.events import EventReader
from console.interrupt import Interrupted, Interrupts
from console.link.client import Client, Stream
from console.session import operator
from console.state import Failure, PipelineState, apply
from console.views import QUIET_S, Json, Plain, Quiet, View


def view_for(output: str, host: str) -> View:
    """The view of an `--output` choice; text is drawn live where stderr is a terminal."""
    if output == "quiet":
        return Quiet()
    if output == "jsonl":
        return Json(host)
    if sys.stderr.isatty():
        from console.live import Terminal

        return Terminal(sys.stdout, sys.stderr)
    return Plain()


async def follow(client: Client, pipeline: str, view: View, *, offset: int = 0) -> int:
    """Show the pipeline's events from byte `offset` on until its pilot has ended; the pilot's code.

    Raises:
        ConnectionLost: the agent is gone; the pilot goes on.
    """
    stream = await client.stream("watch", {"pipeline": pipeline, "offset": offset})
    try:
        state = await _consume(stream, EventReader(offset), view)
    finally:
        await stream.close()
    end = stream.end or {}
    code = exit_code(end)
    told = any(stage.failure for stage in state.stages) or state.needs is not None
    if code != Exit.OK and not (told and state.code is not None):
        state = replace(state, failure=pilot_failure(end))
    if end.get("summary"):
        state = replace(state, summary=end["summary"])
    view.ended(state, code)
    return code


def exit_code(pilot: dict[str, Any]) -> int:
    """The exit code for the end of a pilot as the agent proved it from files: its own, where it has one of ours."""
    if pilot.get("state") == "cancelled":
        return Exit.STAGE_FAILED  # somebody stopped it; its own 143 would say that the work goes on
    if pilot.get("state") not in ("succeeded", "failed") or _killed(pilot):
        return Exit.NEEDS_HUMAN
    code = pilot.get("code")
    return code if code in tuple(Exit) else Exit.STAGE_FAILED


def _killed(pilot: dict[str, Any]) -> bool:
    """True for a pilot that a signal ended from outside, itself or its supervisor: nobody stopped its stage."""
    if pilot.get("state") == "stale":
        return pilot.get("reason") == "supervisor_died" and not pilot.get("job_alive")
    ended_by_signal = pilot.get("signal") is not None or pilot.get("code") in (Exit.INTERRUPTED, Exit.TERMINATED)
    return pilot.get("state") == "failed" and ended_by_signal


def pilot_failure(pilot: dict[str, Any]) -> Failure:
    """Why a pilot ended, where no event says so: it was stopped, killed, or could not even start."""
    state, reason = str(pilot.get("state")), str(pilot.get("reason") or "")
    if state == "cancelled":
        return Failure("stopped", "the pilot was stopped", "start again to go on from what is done")
    if _killed(pilot):
        what = f"the pilot was killed ({reason}); the running stage goes on"
        return Failure(reason, what, "start again to take it over")
    what = (
        f"the pilot is {state}" if state in ("stale", "pending") else f"the pilot ended with code {pilot.get('code')}"
    )
    alive = f"; its process lives on (pid {pilot.get('pid')})" if pilot.get("job_alive") else ""
    fix = "`eagle3-console stop`, then start again" if alive else "`eagle3-console logs pilot` shows its own words"
    return Failure(reason, f"{what}{f': {reason}' if reason else ''}{alive}", fix)


async def follow_or_detach(
    client: Client, pipeline: str, view: View, interrupts: Interrupts, *, offset: int = 0, stop: bool = False
) -> int:
    """`follow`, with an interrupt as a normal end: say how to come back, or stop the work where that was asked for."""
    try:
        return await interrupts.race(follow(client, pipeline, view, offset=offset))
    except Interrupted as interrupt:
        view.close()
        if not stop or interrupt.code == Exit.TIMEOUT:
            detached(view, pipeline, interrupt.code)
            return interrupt.code
        return await _stop(client, pipeline, view, interrupts, interrupt.code)


async def _stop(client: Client, pipeline: str, view: View, interrupts: Interrupts, code: Exit) -> int:
    """Stop pilot and task; a second interrupt stops the waiting, not the stop that the host has begun."""
    view.own("stopping", {"id": pipeline}, f"stopping {pipeline} …")
    order = {"pipeline": pipeline, "stage": None, "services": False, "operator": operator()}
    try:
        report = await interrupts.race(client.call("stop", order))
    except Interrupted as again:
        detached(view, pipeline, again.code)
        return again.code
    view.own("stopped", report, f"stopped {pipeline}; servers keep running (eagle3-console stop --services)")
    return code


def detached(view: View, pipeline: str | None, code: Exit) -> None:
    """Say that the work goes on, and how to see and to stop it. None: the host has not said yet which one it is."""
    why = {Exit.TIMEOUT: "timeout", Exit.TERMINATED: "terminated"}.get(code, "interrupted")
    view.own(
        "detached",
        {"id": pipeline, "why": why, "code": int(code)},
        f"{why}: detached, the work goes on\n"
        f"  follow: eagle3-console attach{f' {pipeline}' if pipeline else ''}\n"
        f"  stop:   eagle3-console stop{f' --pipeline {pipeline}' if pipeline else ''}",
    )


async def _consume(stream: Stream, reader: EventReader, view: View) -> PipelineState:
    """Feed the view until the stream ends; the last state."""
    state = PipelineState()
    chunks = aiter(stream)
    waiting: asyncio.Task[Chunk | None] = asyncio.create_task(_next(chunks))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=QUIET_S)
            if not done:
                view.alive(state)
                continue
            chunk = waiting.result()
            if chunk is None:
                return state
            if chunk.ch == "events":
                for event in reader.feed(chunk.body):
                    state = apply(state, event)
                    view.event(event, state)
            elif chunk.ch == "state":
                view.own("pilot", unpack(chunk.body))
            waiting = asyncio.create_task(_next(chunks))
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _next(chunks: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)
