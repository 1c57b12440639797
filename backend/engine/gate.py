"""The readiness gate: from a launched process to a verdict that says whether its server can be believed.

Owns the order of the checks, the polling of /health (one probe in flight, the wait ended by the process's death), and
the gathering of evidence. Never raises for a bad server: the verdict says what failed and the fix; what follows from
it is the caller's. Knows nothing of stages, attempts or exit codes.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from backend.engine import gate_checks, procfs
from backend.engine.canary import CanaryResult, CanarySettings, run_canary
from backend.engine.capture import live_markers, plugin_sha
from backend.engine.client import Reply, SGLangClient
from backend.engine.launch import ServerSpec, expected_flags
from backend.engine.parity import weight_bytes
from backend.engine.readiness import GateSettings, ListenerFacts, ServerProcess, Verdict, suspicions, why
from backend.engine.server_log import last_errors, load_progress, lost_hooks
from backend.errors import OperatorError
from backend.report import Check, Reporter
from backend.runs.identity import open_pidfd, see, start_ticks

_PROBE_IDS = (11, 12, 13, 14)
_PROBE_TOKENS = 2
_UNANSWERED = "the HTTP side lives but does not serve: save the log, stop the server, launch again"


def run_gate(
    server: ServerProcess,
    spec: ServerSpec,
    settings: GateSettings,
    canary: CanarySettings | None,
    reporter: Reporter,
) -> Verdict:
    """Judge a launched server; blocks until it is ready, dead, or the attempts or the deadline are over.

    `canary` is given for servers that capture. Every poll and every check goes to the reporter as it is made.
    """
    watch = _Watch(server)
    try:
        with SGLangClient(f"http://{spec.host}:{spec.port}", settings.answer_timeout_s) as client:
            return _Gate(server, spec, settings, canary, reporter, client, watch).judge()
    finally:
        watch.close()


def prove_speculative(client: SGLangClient, prompts: Sequence[Sequence[int]], max_new_tokens: int = 16) -> Check:
    """Whether a server with a draft really speculates, on its own output to real prompts."""
    try:
        return gate_checks.speculation([client.generate(prompt, max_new_tokens=max_new_tokens) for prompt in prompts])
    except OperatorError as error:
        return Check("speculation", False, error.what, {"reason": error.reason}, error.fix)


class _Watch:
    """Waits that end at once when the launched process does. Holds a pidfd, so a reused pid is never taken for it."""

    def __init__(self, server: ServerProcess) -> None:
        self._exit_path = server.exit_path
        seen = see(server.pid)
        self._fd = open_pidfd(seen) if seen is not None and seen.start_ticks == server.start_ticks else None

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether it has ended, or ends within so many seconds."""
        if self._fd is None or self._exit_path.exists():
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, within_s) * 1000))

    def close(self) -> None:
        """Give the pidfd back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Gate:
    """One judgement: runs the steps in order until one fails, keeping what was seen on the way."""

    def __init__(
        self,
        server: ServerProcess,
        spec: ServerSpec,
        settings: GateSettings,
        canary: CanarySettings | None,
        reporter: Reporter,
        client: SGLangClient,
        watch: _Watch,
    ) -> None:
        self.server = server
        self.spec = spec
        self.settings = settings
        self.canary = canary
        self.reporter = reporter
        self.client = client
        self.watch = watch
        self.checks: list[Check] = []
        self.polls = 0
        self.ready_after_s: float | None = None
        self.read_bytes: int | None = None
        self.listener: ListenerFacts | None = None
        self.canary_digest: str | None = None

    def _flags_match(self) -> Check:
        """Against what this server's own version calls them."""
        info = self.client.server_info()
        return gate_checks.flags_match(info, expected_flags(self.spec, str(info["version"])))

    def judge(self) -> Verdict:
        """Every step, each only if all before it passed."""
        steps: list[tuple[str, Callable[[], Check]]] = [
            ("port_closed", self._port_was_closed),
            ("process", self._process_is_alive),
            ("health", self._becomes_healthy),
            ("listener", self._listener_is_ours),
            ("launch_id", lambda: gate_checks.launch_id_matches(self.client.model_info(), self.spec.launch_id)),
            ("flags", self._flags_match),
            ("generates", lambda: gate_checks.generates(self._probe(), self.spec.launch_id)),
        ]
        passed = all(self._passes(*step) for step in steps)
        if passed and self.canary is not None:
            canary = self.canary
            passed = self._passes("capture_live", lambda: self._capture_is_live(canary)) and self._canary_sings(canary)
        if passed:
            self._passes("stability", self._stays_healthy)
        return self._verdict()

    def _passes(self, name: str, step: Callable[[], Check]) -> bool:
        """Make one check; a server that stops answering, or answers nonsense, fails it."""
        try:
            check = step()
        except OperatorError as error:
            check = Check(name, False, error.what, {"reason": error.reason}, error.fix or _UNANSWERED)
        if check.ok is False and self.watch.ended():
            check = self._died()
        self.checks.append(check)
        self.reporter.check(check)
        return check.ok is not False

    def _port_was_closed(self) -> Check:
        return gate_checks.port_was_closed(self.server, self.spec.port, self._who_listens(()))

    def _process_is_alive(self) -> Check:
        if self.watch.ended():
            return self._died()
        started = procfs.started_at(self.server.start_ticks)
        return Check("process", True, f"pid {self.server.pid} runs since {time.time() - started:.0f} s")

    def _becomes_healthy(self) -> Check:
        settings, began = self.settings, time.monotonic()
        deadline, warn_at = began + settings.deadline_s, settings.warn_after_s
        last = "nothing"
        for attempt in range(1, settings.attempts + 1):
            polled = time.monotonic()
            probe = self.client.health(min(settings.probe_timeout_s, max(1.0, deadline - polled)))
            self.polls = attempt
            if probe.code == 200 and not self.watch.ended():
                return self._ready(attempt)
            last = f"HTTP {probe.code}" if probe.code else probe.error
            pause = min(polled + settings.interval_s, deadline) - time.monotonic()
            more = attempt < settings.attempts and time.monotonic() < deadline
            self.reporter.progress(
                attempt,
                settings.attempts,
                "poll",
                code=probe.code or 0,
                answer=last,
                latency_s=round(probe.latency_s, 3),
                next_in_s=round(max(0.0, pause), 3) if more else 0.0,
                elapsed_s=round(time.monotonic() - began, 3),
            )
            if self.watch.ended(pause if more else 0.0):
                return self._died()
            if not more or time.monotonic() >= deadline:
                break
            if warn_at is not None and time.monotonic() - began >= warn_at:
                self.reporter.warning(f"not ready after {warn_at:.0f} s; the log says: {self._loading()}")
                warn_at = None
        return Check(
            "health",
            False,
            f"no 200 from /health in {self.polls} polls over {time.monotonic() - began:.0f} s; last answer: {last}; "
            f"the log says: {self._loading()}",
            {"polls": self.polls},
            "if the log shows progress, raise [gate] attempts and deadline_s; else look for its last error",
        )

    def _ready(self, attempt: int) -> Check:
        self.ready_after_s = time.time() - self.server.started_at
        self.read_bytes = procfs.usage(self.server.pid).read_bytes
        self.reporter.progress(attempt, self.settings.attempts, "poll", code=200, answer="HTTP 200", next_in_s=0.0)
        return Check(
            "health",
            True,
            f"200 at poll {attempt}, {self.ready_after_s:.1f} s after the launch",
            {"polls": attempt, "ready_after_s": self.ready_after_s},
        )

    def _listener_is_ours(self) -> Check:
        tree = procfs.tree(self.server.pid)
        self.listener = self._who_listens(tree)
        return gate_checks.listener_is_ours(self._listeners(), tree, self.listener)

    def _listeners(self) -> list[procfs.Listener]:
        return [
            listener for listener in procfs.listeners(self.spec.port) if procfs.answers_for(listener, self.spec.host)
        ]

    def _who_listens(self, tree: Collection[int]) -> ListenerFacts | None:
        """The process that answers on our address: a foreign one first, since it is the one to be told about."""
        pids = [pid for listener in self._listeners() for pid in listener.pids]
        for pid in sorted(pids, key=lambda pid: pid in tree):
            ticks = start_ticks(pid)
            if ticks is not None:
                started = procfs.started_at(ticks)
                command = " ".join(procfs.argv(pid) or [])[:200]
                return ListenerFacts(pid, started, time.time() - started, command)
        return None

    def _probe(self) -> Reply:
        rid = f"eagle3-probe-{secrets.token_hex(4)}"
        try:
            return self.client.generate(_PROBE_IDS, rid=rid, max_new_tokens=_PROBE_TOKENS)
        finally:
            if self.canary is not None:
                (Path(self.canary.dump_dir) / f"{rid}.safetensors").unlink(missing_ok=True)

    def _capture_is_live(self, canary: CanarySettings) -> Check:
        ticks = {pid: start_ticks(pid) for pid in procfs.tree(self.server.pid)}
        return gate_checks.capture_is_live(
            live_markers(Path(canary.dump_dir)),
            lost_hooks(self.server.log),
            tree={pid: found for pid, found in ticks.items() if found is not None},
            launch_id=self.spec.launch_id,
            layers=canary.layers,
            sha256=plugin_sha(),
        )

    def _canary_sings(self, settings: CanarySettings) -> bool:
        result: CanaryResult = run_canary(
            self.client,
            self.spec.model_path,
            settings,
            launch_id=self.spec.launch_id,
            ranks=self.spec.tp,
            trust_remote_code=self.spec.trust_remote_code,
            reporter=self.reporter,
        )
        self.checks.extend(result.checks)
        self.canary_digest = result.digest
        if not result.ok and self.watch.ended():
            self._passes("process", self._died)
        return result.ok

    def _stays_healthy(self) -> Check:
        before = self.listener
        if self.watch.ended(self.settings.stability_s):
            return self._died()
        probe = self.client.health(self.settings.probe_timeout_s)
        after = self._who_listens(procfs.tree(self.server.pid))
        same = before is not None and after is not None and after.pid == before.pid
        found = self.client.model_info().get("weight_version")
        return Check(
            "stability",
            probe.code == 200 and same and found == self.spec.launch_id,
            f"after {self.settings.stability_s:g} s more: /health {probe.code or probe.error}, launch {found}, "
            f"listener pid {after.pid if after else None}",
            fix="the server changed or failed right after it was ready: see its log",
        )

    def _died(self) -> Check:
        said = " | ".join(last_errors(self.server.log)) or "(the log is empty)"
        end = ""
        with suppress(FileNotFoundError):
            end = f" ({' '.join(self.server.exit_path.read_text().split())[:200]})"
        return Check(
            "process",
            False,
            f"the server process {self.server.pid} has ended{end}; its log ends with: {said}",
            {"log": str(self.server.log)},
            f"read {self.server.log}, change what it names, launch again",
        )

    def _loading(self) -> str:
        lines = load_progress(self.server.log)
        return lines[-1] if lines else "nothing about loading yet"

    def _verdict(self) -> Verdict:
        weights = weight_bytes(Path(self.spec.model_path))
        doubts: tuple[str, ...] = ()
        if self.ready_after_s is not None and self.listener is not None:
            doubts = suspicions(
                ready_after_s=self.ready_after_s,
                listener=self.listener,
                launched_at=self.server.started_at,
                weight_bytes=weights,
                ranks=self.spec.tp,
            )
        return Verdict(
            ok=all(check.ok is not False for check in self.checks),
            launch_id=self.spec.launch_id,
            ready_after_s=self.ready_after_s,
            listener=self.listener or self._who_listens(procfs.tree(self.server.pid)),
            checks=tuple(self.checks),
            suspicions=doubts,
            weight_bytes=weights,
            read_bytes=self.read_bytes,
            polls=self.polls,
            load_lines=tuple(load_progress(self.server.log)),
            why=why(
                ready_after_s=self.ready_after_s,
                ours=any(check.name == "launch_id" and check.ok for check in self.checks),
                weight_bytes=weights,
                read_bytes=self.read_bytes,
                polls=self.polls,
            ),
            canary_digest=self.canary_digest,
        )
