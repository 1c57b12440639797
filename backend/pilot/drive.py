"""The pilot: one pipeline from its frozen plan to its end, stage by stage, on the host, whoever is watching.

Holds the pipeline's lock and is the only writer of its events. Decides anew before every stage (so a pilot that was
killed, or started twice, goes on from what the files say), asks consent of the frozen plan, starts attempts through the
supervisor and follows them. A signal to the pilot never touches a stage: stopping is the agent's `stop`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.config import Config
from backend.errors import Exit, OperatorError, Refused
from backend.pilot.consent import Consent
from backend.pilot.decide import Decision, Selection, decide, material_of
from backend.pilot.follow import Follower, forwarded_until
from backend.pilot.history import History
from backend.pilot.keeper import LeaseKeeper
from backend.pilot.summary import summarise
from backend.report import Silent
from backend.runs.atomic import read_json, write_json
from backend.runs.events import EventLog
from backend.runs.fingerprint import digest
from backend.runs.layout import Attempt, Home, Pipeline
from backend.runs.locks import FileLock, Held
from backend.runs.spec import write_spec
from backend.runs.state import AttemptState
from backend.runs.state import state as state_of
from backend.runs.stop import stop
from backend.runs.supervisor import start
from backend.runs.trash import ensure_job
from backend.stages.base import Product, Service, Stage, StageContext, StagePlan
from backend.stages.handover import OUTPUTS, read_failure, read_product, write_input
from backend.stages.registry import STAGES, stage_named, stage_names
from backend.stages.server import SERVER, clear_leftovers, stop_server

ORDER_VARIABLE, LEASE_VARIABLE = "EAGLE3_ORDER", "EAGLE3_LEASE"
_WORK_GOES_ON = (Exit.TIMEOUT, Exit.INTERRUPTED, Exit.TERMINATED)


class Interrupted(BaseException):
    """SIGTERM or SIGINT reached the pilot: it leaves, the stages stay."""

    def __init__(self, code: Exit) -> None:
        self.code = code


class Pilot:
    """One run of one pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        plan = read_json(pipeline.plan)
        if plan is None:
            raise OperatorError(f"{pipeline.plan} is missing", fix="start pipelines with `eagle3-console --auto`")
        self.pipeline = pipeline
        self.name = str(plan["name"])
        self.selection = Selection.from_json(plan["selection"])
        # A resumed pipeline keeps its plan; consent is what the operator said with this start.
        named = os.environ.get(ORDER_VARIABLE)
        order = (read_json(Path(named)) if named else None) or plan
        self.consent = Consent.from_json(order["consent"])
        self.shown = {str(item["sha"]): item for item in order.get("destructive") or ()}
        self.consented_at = order.get("created")
        home = Home(pipeline.path.parents[1])
        self.ctx = StageContext(
            Config.model_validate(plan["config"]), plan["python"], home, {}, Silent(), pipeline=pipeline.path
        )
        self.history = History(home)
        self.results: dict[str, dict[str, Any]] = {}
        self.found: dict[str, Product] = {}

    def run(self) -> int:
        """Drive to the end; returns the exit code that `--auto` shall have."""
        lock = FileLock(self.pipeline.lock)
        try:
            lock.acquire({"what": "pilot"})
        except Held as held:
            raise OperatorError(
                f"pipeline {self.pipeline.id} is driven already: {held.holder}", reason="held", code=Exit.CONTROL_HELD
            ) from None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _interrupt)
        began, order = time.monotonic(), os.environ.get(ORDER_VARIABLE)
        self.log = EventLog(self.pipeline.events, pipe=self.pipeline.id)
        self.log.emit("pipeline_started", {"name": self.name, "stages": stage_names()})
        try:
            with LeaseKeeper(self.ctx.home.operator, os.environ.get(LEASE_VARIABLE)) as self.lease:
                self._stages()
            code = Exit.OK
        except Interrupted as leave:
            return int(leave.code)
        except OperatorError as error:
            code = error.code
            if error.reason == "needs_confirmation":
                self.log.emit("needs_confirmation", error.as_json())
            elif not any("error" in result for result in self.results.values()):
                self.log.emit("warning", {"text": str(error)})  # no stage failed: the pilot itself could not go on
                print(error, file=sys.stderr, flush=True)
        except Exception as error:
            traceback.print_exc()
            code = Exit.STAGE_FAILED
            self.log.emit("warning", {"text": f"the pilot crashed: {type(error).__name__}: {error}"})
        summary = summarise(self.ctx, self.results)
        if order:
            # An event's line is cut at 4 KB; the whole summary stands beside the pilot's other files.
            write_json(Path(order).parent / OUTPUTS, {"summary": summary})
        self.log.emit(
            "pipeline_ended", {"code": int(code), "seconds": round(time.monotonic() - began, 1), "summary": summary}
        )
        return int(code)

    def _stages(self) -> None:
        ensure_job(self.ctx.home, self.ctx.python)
        for order, stage in enumerate(STAGES, 1):
            decision = self._decide(stage)
            if decision.action == "run":
                self._run(stage, order, decision)
            else:
                if decision.product is not None:
                    self._keep(stage.name, decision.product, "skipped")
                self._skip(stage, "skip" if decision.action == "skip" else "not_needed", decision.why)
        self._leave()

    def _leave(self) -> None:
        """What stays at the end: servers whose client has not run yet, and the deployed one if it is to be kept."""
        if "extract" in self.ctx.products and "launch" not in self.selection.only:
            self._stop_service("launch", "nothing is left to extract")
        if not self.ctx.config.deploy.keep:
            if "bench" in self.ctx.products and "deploy" not in self.selection.only:
                self._stop_service("deploy", "the pipeline has ended and [deploy] keep = false")
            return
        current = self.pipeline.current("deploy")
        if "bench" in self.results and current is not None and not state_of(current.path).alive:
            deploy = stage_named("deploy")
            self.log.emit("note", {"text": "bench took the deployed server's place: starting it again"}, stage="deploy")
            self._run(deploy, stage_names().index("deploy") + 1, Decision("deploy", "run", "[deploy] keep = true"))

    def _decide(self, stage: Stage) -> Decision:
        decisions = decide(replace(self.ctx, products={}), self.selection, self.history)
        self.found = {decision.stage: decision.product for decision in decisions if decision.product is not None}
        return next(decision for decision in decisions if decision.stage == stage.name)

    def _run(self, stage: Stage, order: int, decision: Decision) -> None:
        ctx = self._context(stage)
        current = self.pipeline.current(stage.name)
        if current is not None and isinstance(stage, Service) and self._unproven(current):
            self._stop_service(stage.name, "its proof did not end well: it is started again")
        if current is not None and state_of(current.path).alive:
            self.log.emit("stage_started", self._where(current, "goes on"), stage=stage.name, att=current.number)
        else:
            plan = stage.plan(ctx)
            if stage.severity and stage.severity >= 2 and not plan.effects:
                self._skip(stage, "skip", "nothing to do")
                return
            missing = self.consent.missing(stage, plan)
            if missing and plan.optional:
                why = f"optional, and not consented: {'; '.join(plan.effects)} (add {' '.join(missing)})"
                self._skip(stage, "skip", why)
                return
            self.consent.require(stage, plan)
            self.lease.require()
            if stage.mode == "free":
                self._free()
            if current is not None:
                self._clear(stage, current)
            ctx = replace(ctx, consented=self._as_shown(plan), frozen_at=self.consented_at)
            current = self._start(stage, order, ctx)
        self._follow(stage, current, ctx, decision.material or material_of(stage, ctx))

    def _as_shown(self, plan: StagePlan) -> tuple[dict[str, Any], ...]:
        """The destructive plans that were on the operator's screen, for those that `plan` finds again now.

        Raises:
            Refused: one was never shown (the plan was made before merge told what the store will be).
        """
        unseen = [item for item in plan.destructive if item["sha"] not in self.shown]
        if unseen:
            raise Refused(
                f"{unseen[0]['path']} was not part of the plan that was agreed to",
                fix="look at `eagle3-console plan purge` again, then agree to what it shows now",
                reason="needs_confirmation",
            )
        return tuple(self.shown[item["sha"]] for item in plan.destructive)

    def _skip(self, stage: Stage, action: str, why: str) -> None:
        self.log.emit("stage_skipped" if action == "skip" else "stage_not_needed", {"why": why}, stage=stage.name)
        known = read_json(self.pipeline.skipped) or {}
        write_json(self.pipeline.skipped, {**known, stage.name: {"action": action, "why": why}})

    def _unproven(self, server: Attempt) -> bool:
        """True if the process that had to prove a living server was stopped, killed or failed."""
        proof = state_of(server.path / "proof")
        return state_of(server.path).alive and proof.ended and proof.state != "succeeded"

    def _clear(self, stage: Stage, attempt: Attempt) -> None:
        """A supervisor that was killed may have left its job alive: end that before the next attempt."""
        state = state_of(attempt.path)
        if state.job_alive:
            self.log.emit(
                "warning",
                {"text": f"attempt {attempt.number} lost its supervisor: ending what it left"},
                stage=stage.name,
            )
            (stop_server if (attempt.path / SERVER).exists() else stop)(attempt.path)

    def _start(self, stage: Stage, order: int, ctx: StageContext) -> Attempt:
        """A new attempt; of a service, its server too. Its task is started by `_follow`."""
        attempt = self.pipeline.new_attempt(stage.name, order)
        self.log.emit("stage_started", self._where(attempt, "starts"), stage=stage.name, att=attempt.number)
        if isinstance(stage, Service):
            try:
                stage.start(ctx, attempt.path)
            except OperatorError as error:
                self._failed(stage, attempt, "failed", 0.0, error)
                raise
        return attempt

    def _spawn(self, name: str, task: Attempt, ctx: StageContext, material: dict[str, Any]) -> None:
        write_input(task.path, ctx, digest(material), material)
        write_spec(
            task.path,
            argv=[self.ctx.python, "-m", "backend.stages", name, str(task.path)],
            cwd=self.ctx.config.host.work,
            gpu_lock=self.ctx.home.gpu_lock if name == "train" else None,
        )
        start(task.path)

    def _follow(self, stage: Stage, attempt: Attempt, ctx: StageContext, material: dict[str, Any]) -> None:
        """Start the attempt's task, unless the pilot before us did, and forward what it says until it has ended."""
        task = attempt
        if isinstance(stage, Service):
            task, ctx = Attempt(attempt.path / "proof").create(), replace(ctx, server=attempt.path)
        if not task.exit.exists() and not task.proc.exists():
            self._spawn(stage.name, task, ctx, material)
        seen = forwarded_until(self.pipeline.events, stage.name, attempt.number)
        state = Follower(task, stage.name, attempt.number, self.log, seen).until_end()
        self._ended(stage, attempt, task, state)

    def _ended(self, stage: Stage, attempt: Attempt, task: Attempt, state: AttemptState) -> None:
        product = read_product(task.path, stage.name)
        seconds = round(state.seconds or 0.0, 1)
        if stage.name == "purge":
            ensure_job(self.ctx.home, self.ctx.python)
        if state.state == "succeeded" and product is not None:
            self._keep(stage.name, product, "ran", seconds)
            if stage.name == "bench" and self.ctx.config.bench.baselines:
                self.log.emit("service_stopped", {"why": "bench measured its baselines in its place"}, stage="deploy")
            ended = {"state": "succeeded", "seconds": seconds}
            self.log.emit("stage_ended", ended, stage=stage.name, att=attempt.number)
            if "verdict" in product.outputs:
                self._ready(stage, product.outputs["verdict"], attempt)
            return
        error = read_failure(task.path) or OperatorError(
            f"stage {stage.name} {state.describe()}",
            fix=f"`eagle3-console logs {stage.name}` shows its end; run again to go on from what is done",
            reason=state.reason or "killed",
        )
        if error.code in _WORK_GOES_ON:  # of a stage that was stopped, the pipeline's end says: it does not
            error = OperatorError(error.what, fix=error.fix, reason=error.reason)
        self._failed(stage, attempt, state.state, seconds, error)
        if stage.name == "gate" or isinstance(stage, Service):
            self._stop_unproven("launch" if stage.name == "gate" else stage.name)
        raise error

    def _failed(self, stage: Stage, attempt: Attempt, state: str, seconds: float, error: OperatorError) -> None:
        self.results[stage.name] = {"state": state, "seconds": seconds, "error": error.what}
        data = {"state": state, "seconds": seconds, **error.as_json()}
        self.log.emit("stage_ended", data, stage=stage.name, att=attempt.number)
        print(f"stage {stage.name} {state}: {error}", file=sys.stderr, flush=True)

    def _stop_unproven(self, name: str) -> None:
        """Stop a server that failed its proof; that it cannot be stopped must not hide why it failed."""
        try:
            self._stop_service(name, "it could not be proven")
        except OperatorError as error:
            self.log.emit("warning", {"text": str(error)}, stage=name)

    def _ready(self, stage: Stage, verdict: dict[str, Any], proof: Attempt) -> None:
        """Tell that a server can be used, with the verdict in short, in the name of the service itself."""
        name = "launch" if stage.name == "gate" else stage.name
        server = self.pipeline.current(name) or proof
        facts = {key: verdict[key] for key in ("launch_id", "word", "ready_after_s", "why")}
        text = f"{verdict['word']} after {verdict['ready_after_s']:.1f} s: {verdict['why']}"
        self.log.emit("service_ready", {**facts, "text": text}, stage=name, att=server.number)

    def _keep(self, name: str, product: Product, how: str, seconds: float | None = None) -> None:
        self.ctx = replace(self.ctx, products={**self.ctx.products, name: product})
        self.results[name] = {"state": how, "seconds": seconds, "outputs": product.outputs}

    def _context(self, stage: Stage) -> StageContext:
        """The context for one stage: what is made already (by later stages too: budgets ask), and its server."""
        serving = {"extract": "launch", "serve+draft": "deploy"}.get(stage.mode or "extract")
        current = self.pipeline.current(serving) if serving else None
        alive = current is not None and state_of(current.path).alive
        return replace(
            self.ctx,
            products={**self.found, **self.ctx.products},
            server=current.path if current is not None and alive else None,
        )

    def _free(self) -> None:
        """Stop our own servers before a stage that needs the GPUs."""
        for name in ("launch", "deploy"):
            self._stop_service(name, "the next stage needs its GPUs")

    def _stop_service(self, name: str, why: str) -> None:
        current = self.pipeline.current(name)
        if current is None or not (current.path / SERVER).exists():
            return
        state = state_of(current.path)
        if not (state.alive or state.job_alive):
            clear_leftovers(current.path)  # it ended by itself: what it left must not weigh on the next stage
            return
        report = stop_server(current.path)
        self.log.emit("service_stopped", {"why": why, "report": report.as_json()}, stage=name, att=current.number)

    def _where(self, attempt: Attempt, action: str) -> dict[str, Any]:
        return {"attempt": attempt.number, "log": str(attempt.log), "action": action}


def _interrupt(signum: int, frame: object) -> None:
    raise Interrupted(Exit.TERMINATED if signum == signal.SIGTERM else Exit.INTERRUPTED)
