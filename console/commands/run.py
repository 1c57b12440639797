"""`--auto` and `demo`: plan → show → agree → start → follow.

Two connections: one to plan, one to start and follow. Between them nothing is held open while an operator thinks about
a question. What runs afterwards is the host's pilot, with the plan and the consent frozen into it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from backend.errors import Exit, OperatorError, Refused, UsageError
from console import auto, consent, session
from console.commands.plan import make_plan, selection
from console.consent import Consent
from console.interrupt import Interrupted, interrupts
from console.render_plan import print_needs, print_plan
from console.session import Site
from console.summary import screen
from console.views import View

_PLAN_KEYS = {"key", "config", "selection", "stages", "host", "home", "python"}


def run(args: argparse.Namespace) -> int:
    """Carry out `--auto` or `demo`; the pilot's exit code, or why it was not followed to the end."""
    if args.command == "demo":
        args.profile, args.yes = "demo", True
        args.allow = [*args.allow, "stop", "deploy"]
    began = time.monotonic()
    saved = _read_plan(Path(args.plan_file)) if args.plan_file else None
    where = session.site(args, needs_config=True)
    if args.command == "demo":
        _prepare_demo(where)
    view = auto.view_for(args.output, where.host)
    try:
        plan = asyncio.run(_plan(args, where, saved, _left(args, began)))
        if args.output == "text":
            print_plan(plan, screen(sys.stderr))
        view.own("plan", plan)
        agreed = Consent(args.yes, tuple(args.allow))
        consent.check_names(plan, agreed.allow)
        if args.dry_run:
            return _dry_run(args, plan, agreed, view)
        if plan["nothing_to_do"]:
            view.own("nothing_to_do", {}, "nothing was started")
            return Exit.OK
        agreed = _agree(args, plan, agreed, view)
        return asyncio.run(_execute(args, where, plan, agreed, view, _left(args, began)))
    except Interrupted as interrupt:
        view.own("detached", {"id": None, "why": "interrupted", "code": int(interrupt.code)}, "nothing was started")
        return interrupt.code
    finally:
        view.close()


def _prepare_demo(where: Site) -> None:
    """Make the demo's target and sources, with the interpreter that has the packages they come from.

    Raises:
        OperatorError: that interpreter cannot; its own words were printed.
    """
    assert where.config is not None
    folder = where.config.config.host.work
    session.to_stderr(f"the demo's model and data in {folder} (made once, half a minute)")
    done = subprocess.run([where.python, "-m", "backend.data.demo", folder], check=False)
    if done.returncode != 0:
        raise OperatorError(
            f"the demo's model and data could not be made in {folder}",
            fix=f"`make demo` installs what {where.python} needs for it",
            reason="demo_not_prepared",
            code=Exit.PREFLIGHT_FAILED,
        )


async def _plan(args: argparse.Namespace, where: Site, saved: dict[str, Any] | None, left: float | None) -> Any:
    with interrupts(left) as taken:
        chosen = saved["selection"] if saved else selection(args)
        config = saved["config"] if saved else None
        plan = await taken.race(make_plan(where, chosen, config=config))
    if saved is not None:
        _check_fresh(saved, {**plan, "home": str(where.home)})
    return plan


async def _execute(
    args: argparse.Namespace, where: Site, plan: dict[str, Any], agreed: Consent, view: View, left: float | None
) -> int:
    """Start the plan and follow it."""
    from backend.runs.layout import new_ulid

    order = {"pipeline_id": new_ulid(), "plan": plan, "consent": agreed.as_json(), "operator": session.operator()}
    with interrupts(left) as taken:
        async with session.connect(where) as client:
            try:
                accepted = await taken.race(client.call("start", order))
            except Interrupted as interrupt:  # the host carries the order out, perhaps by resuming another pipeline
                auto.detached(view, None, interrupt.code)
                return interrupt.code
            pipeline = str(accepted["id"])
            view.own("accepted", accepted, _accepted(accepted))
            if args.detach:
                if args.output == "text":
                    print(pipeline)
                return Exit.OK
            offset = int(accepted["offset"])
            return await auto.follow_or_detach(
                client, pipeline, view, taken, offset=offset, stop=args.stop_on_interrupt
            )


def _accepted(accepted: dict[str, Any]) -> str:
    how = {"started": "started", "resumed": "resumed", "attached": "already running, attached to"}[accepted["how"]]
    return f"{how} {accepted['id']}; it goes on without this terminal (eagle3-console attach {accepted['id']})"


def _dry_run(args: argparse.Namespace, plan: dict[str, Any], agreed: Consent, view: View) -> int:
    lacking = consent.missing(plan, agreed)
    if args.output == "text":
        print_needs(lacking, screen(sys.stderr))
    view.own("dry_run", {"missing": consent.flags(lacking)}, "dry run: nothing was started")
    return Exit.OK


def _agree(args: argparse.Namespace, plan: dict[str, Any], agreed: Consent, view: View) -> Consent:
    """The consent that the plan needs, asked for where somebody can answer."""
    lacking = consent.missing(plan, agreed)
    if not lacking:
        return agreed
    if args.output == "text" and sys.stdin.isatty() and sys.stderr.isatty() and not args.no_input and not args.yes:
        return consent.ask(lacking, agreed, _read_answer, session.to_stderr)
    view.own("needs_confirmation", {"missing": [vars(need) for need in lacking], "flags": consent.flags(lacking)})
    raise consent.refusal(lacking)


def _read_answer(question: str) -> str:
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline()


def _left(args: argparse.Namespace, began: float) -> float | None:
    """Seconds of `--timeout` that are left."""
    return None if args.timeout is None else args.timeout - (time.monotonic() - began)


def _read_plan(path: Path) -> dict[str, Any]:
    """A plan saved by `plan --output json`."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"plan {path} cannot be read: {error.strerror}", fix="check --plan") from error
    except ValueError as error:
        raise UsageError(f"plan {path} is not JSON: {error}", fix="save one with `plan --output json`") from error
    if not isinstance(plan, dict) or plan.get("v") != 1 or not plan.keys() >= _PLAN_KEYS:
        raise UsageError(f"{path} is not a plan of this version", fix="save one with `plan --output json`")
    return plan


def _check_fresh(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """A saved plan is run only while it still says what would happen.

    Raises:
        Refused: something changed since it was saved (reason ``plan_stale``); the message names what.
    """
    changed = [key for key in ("key", "host", "home", "python") if saved.get(key) != now.get(key)]
    before = {stage["name"]: stage["action"] for stage in saved["stages"]}
    changed += [
        f"{stage['name']} ({before.get(stage['name'])} → {stage['action']})"
        for stage in now["stages"]
        if before.get(stage["name"]) != stage["action"]
    ]
    shas = [{item["sha"] for item in plan.get("destructive") or []} for plan in (saved, now)]
    if shas[0] != shas[1]:
        changed.append("what would be deleted")
    if changed:
        raise Refused(
            f"the saved plan is stale; changed since: {', '.join(changed)}",
            fix="look at a new one with `eagle3-console plan`, and save it again",
            reason="plan_stale",
        )
