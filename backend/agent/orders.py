"""The verbs that change something: start a pipeline, stop one. Each is audited before and after.

Owns what makes a start idempotent (the client chooses the id; an unfinished pipeline with the same plan is attached to
or resumed, never doubled), the compare-and-set of a stop, and the lease in the pipeline's name. What a pilot does is
its own business; how processes are started and ended is `backend.runs`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from backend.agent import child, pilots
from backend.errors import Exit, OperatorError, Refused, UsageError
from backend.runs import lease, supervisor
from backend.runs.atomic import read_json, write_json
from backend.runs.audit import AuditLog
from backend.runs.layout import Attempt, Home, Pipeline
from backend.runs.locks import exclusive
from backend.runs.spec import write_spec
from backend.runs.state import state
from backend.runs.stop import stop as stop_attempt

PILOT_GRACE_S = 30.0
ORDER_VARIABLE = "EAGLE3_ORDER"
LEASE_VARIABLE = "EAGLE3_LEASE"
_LIVE = ("running", "ready")


def start(home: Home, args: Mapping[str, Any]) -> dict[str, Any]:
    """Freeze a plan and start its pilot, or find the pipeline that already does it.

    `args`: `pipeline_id` (a ULID), `plan`, `consent` {yes, allow}, `operator` {who, host}. The answer: `id`, `how`
    ("started", "resumed", "attached"), `attached`, the pilot's `attempt`, and the `offset` in the pipeline's events
    from which this pilot's begin.

    Raises:
        OperatorError: another operator has control (exit 5, names the holder); the pilot cannot be started.
    """
    plan, operator = _object(args, "plan"), _operator(args)
    wanted = home.create().pipeline(str(args.get("pipeline_id") or ""))
    with exclusive(home.locks / "start.lock"):
        if pilots.pilot_attempts(wanted) and pilots.pilot_state(wanted)["state"] != "pending":
            return _attached(wanted)
        pipeline = pilots.to_resume(home, str(plan["key"])) or wanted
        pilot = pilots.pilot_state(pipeline)
        if pilot["state"] in _LIVE:
            return _attached(pipeline)
        if pilot.get("job_alive"):
            raise OperatorError(
                f"the pilot of {pipeline.id} lost its supervisor and lives on (pid {pilot['pid']})",
                fix=f"eagle3-console stop --pipeline {pipeline.id}, then start again",
                reason="stale",
                code=Exit.NEEDS_HUMAN,
            )
        with _audited(home, "start", operator["who"], pipeline=pipeline.id, key=plan["key"], consent=args["consent"]):
            return _start(home, pipeline, plan, _object(args, "consent"), operator)


def _start(
    home: Home, pipeline: Pipeline, plan: dict[str, Any], consent: dict[str, Any], operator: dict[str, str]
) -> dict[str, Any]:
    _refuse_beside(home, pipeline)
    held = _take_control(home, pipeline, operator)
    try:
        order = {**plan, "pipeline_id": pipeline.id, "consent": consent, "operator": operator, "created": time.time()}
        pipeline.create()
        resumed = pipeline.plan.exists()
        if not resumed:
            write_json(pipeline.plan, order)
        attempt = _new_pilot(pipeline)
        write_json(attempt.path / "order.json", order)
        environ = {
            "PYTHONPATH": child.code_path(),
            ORDER_VARIABLE: str(attempt.path / "order.json"),
            LEASE_VARIABLE: held.id,
        }
        argv = [str(plan["python"]), "-m", "backend.pilot", "run", str(pipeline.path)]
        write_spec(attempt.path, argv=argv, env=environ, cwd=pipeline.path, grace_s=PILOT_GRACE_S, subreaper=False)
        offset = pipeline.events.stat().st_size if pipeline.events.exists() else 0
        supervisor.start(attempt.path)
    except BaseException:
        lease.release(home.operator, held.id)
        raise
    how = "resumed" if resumed else "started"
    return {"id": pipeline.id, "how": how, "attached": False, "attempt": attempt.number, "offset": offset}


def _new_pilot(pipeline: Pipeline) -> Attempt:
    """The next pilot's folder; only one start at a time comes here."""
    number = max((attempt.number for attempt in pilots.pilot_attempts(pipeline)), default=0) + 1
    return Attempt(pilots.pilot_folder(pipeline) / str(number)).create()


def _attached(pipeline: Pipeline) -> dict[str, Any]:
    attempt = pilots.pilot_attempts(pipeline)[-1].number
    return {"id": pipeline.id, "how": "attached", "attached": True, "attempt": attempt, "offset": 0}


def _refuse_beside(home: Home, pipeline: Pipeline) -> None:
    """A pilot or a task that lives has control, whatever became of leases: two would fight over servers and GPUs.

    Services do not count: the new pipeline's stop stage ends those.
    """
    for other in home.pipelines():
        if other == pipeline:
            continue
        pilot = pilots.pilot_state(other)
        by = (read_json(other.plan) or {}).get("operator") or {}
        whose = f"pipeline {other.id} of {by.get('who')} (on {by.get('host')})"
        if pilot["state"] in _LIVE or pilot.get("job_alive"):
            raise OperatorError(
                f"{whose} has control: it is running",
                fix=f"follow it with `eagle3-console attach {other.id}`, or stop it first",
                reason="lease_held",
                code=Exit.CONTROL_HELD,
            )
        if running := [stage for stage, _ in _stages(other, None, services=False)]:
            raise OperatorError(
                f"stage {running[0]} of {whose} runs on, though its pilot has ended",
                fix=f"`eagle3-console stop --pipeline {other.id}` ends it; or start that plan again to take it over",
                reason="stage_running",
                code=Exit.CONTROL_HELD,
            )


def _take_control(home: Home, pipeline: Pipeline, operator: dict[str, str]) -> lease.Lease:
    """The operator lease in the pipeline's name. A lease whose pilot has ended stands in nobody's way."""
    who = f"{operator['who']} (pipeline {pipeline.id})"
    now = lease.current(home.operator)
    if now is not None and _is_left_over(home, now):
        return lease.takeover(home.operator, now.id, who, operator["host"], os.getpid())
    return lease.acquire(home.operator, who, operator["host"], os.getpid())


def _pipeline_of(home: Home, held: lease.Lease) -> Pipeline | None:
    """The pipeline in whose name a lease is held, None for a person's."""
    match = re.search(r"\(pipeline (\w+)\)$", held.who)
    return home.pipeline(match[1]) if match else None


def _is_left_over(home: Home, held: lease.Lease) -> bool:
    holder = _pipeline_of(home, held)
    if holder is None:
        return False
    pilot = pilots.pilot_state(holder)
    return bool(pilot["ended"]) and not pilot.get("job_alive")


def stop(home: Home, args: Mapping[str, Any]) -> dict[str, Any]:
    """Stop the pilot and the running tasks of a pipeline, with `services` its servers too; or only `stage`.

    `expect` lists {stage, attempt, state} as the operator saw them; if one of them is different now, nothing is done.
    The pilot goes first, so that it does not start the next stage while the last one ends.

    Raises:
        Refused: something changed since it was looked at (reason ``changed``).
        OperatorError: another operator has control (exit 5); something cannot be ended (exit 8).
    """
    pipeline = pilots.existing(home, args)
    stage, services = args.get("stage"), bool(args.get("services"))
    held = lease.current(home.operator)
    if held is not None and _pipeline_of(home, held) != pipeline and not _is_left_over(home, held):
        raise OperatorError(
            f"{held.who} (on {held.host}) has control",
            fix="wait, or ask them to stop it",
            reason="lease_held",
            code=Exit.CONTROL_HELD,
        )
    _check_expected(pipeline, args.get("expect") or [])
    stopped: list[dict[str, Any]] = []
    with _audited(home, "stop", _operator(args)["who"], pipeline=pipeline.id, stage=stage, services=services):
        if stage in (None, pilots.PILOT):
            stopped += [
                _stop_one(pilots.PILOT, attempt) for attempt in pilots.pilot_attempts(pipeline)[-1:] if _lives(attempt)
            ]
            if held is not None and _pipeline_of(home, held) == pipeline:
                lease.release(home.operator, held.id)
        if stage != pilots.PILOT:
            stopped += [_stop_one(name, attempt) for name, attempt in _stages(pipeline, stage, services=services)]
    if stuck := [part for part in stopped if part["stuck"]]:
        raise OperatorError(
            f"could not be ended: {', '.join(part['stage'] for part in stuck)} ({stuck[0]['stuck']})",
            fix="`eagle3-console status` names the processes; they wait in the kernel or belong to somebody else",
            reason="unkillable",
            code=Exit.NEEDS_HUMAN,
        )
    return {"stopped": stopped}


def _check_expected(pipeline: Pipeline, expected: list[dict[str, Any]]) -> None:
    for seen in expected:
        attempt = pilots.attempt(pipeline, str(seen["stage"]))
        now = state(attempt.path).state
        if (attempt.number, now) != (seen["attempt"], seen["state"]):
            raise Refused(
                f"{seen['stage']} is {now} in attempt {attempt.number} now, "
                f"not {seen['state']} in attempt {seen['attempt']}; nothing was stopped",
                fix="look again and decide again",
                reason="changed",
            )


def _stages(pipeline: Pipeline, stage: str | None, *, services: bool) -> list[tuple[str, Attempt]]:
    """The live attempts that are meant, in pipeline order."""
    if stage is not None:
        attempt = pilots.attempt(pipeline, stage)
        return [(stage, part) for part in _parts(attempt, server=True) if _lives(part)]
    plan = read_json(pipeline.plan) or {}
    serving = {str(item["name"]) for item in plan.get("stages", []) if item.get("kind") == "service"}
    found = []
    for _, name, _ in pipeline.stages():
        current = pipeline.current(name)
        if current is not None:
            server = services or name not in serving
            found += [(name, part) for part in _parts(current, server=server) if _lives(part)]
    return found


def _parts(attempt: Attempt, *, server: bool) -> list[Attempt]:
    """What of an attempt is meant: the task that proves a server is work, the server itself only with `server`."""
    task = pilots.task_of(attempt)
    return ([task] if task != attempt else []) + ([attempt] if server else [])


def _lives(attempt: Attempt) -> bool:
    now = state(attempt.path)
    return now.state in _LIVE or now.job_alive


def _stop_one(name: str, attempt: Attempt) -> dict[str, Any]:
    report = stop_attempt(attempt.path)
    number = attempt.number or Attempt(attempt.path.parent).number  # a proof stands inside its server's attempt
    return {
        "stage": name,
        "attempt": number,
        "state": report.state.state,
        "how": report.how,
        "seconds": report.seconds,
        "stuck": report.reason,
    }


@contextmanager
def _audited(home: Home, action: str, who: str, **facts: Any) -> Iterator[None]:
    audit = AuditLog(home.audit)
    audit.append(action, "before", who=who, **facts)
    try:
        yield
    except OperatorError as error:
        audit.append(action, "refused", who=who, **facts, reason=error.reason, what=error.what)
        raise
    audit.append(action, "after", who=who, **facts)


def _object(args: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = args.get(name)
    if not isinstance(value, dict):
        raise UsageError(f"{name!r} is missing", fix="it is a JSON object", reason="bad_request")
    return value


def _operator(args: Mapping[str, Any]) -> dict[str, str]:
    operator = args.get("operator") or {}
    return {"who": str(operator.get("who") or "unknown"), "host": str(operator.get("host") or "unknown")}
