"""The detached parent of one attempt's job: starts it, waits, ends its whole tree, and records the end.

One per attempt: session of its own, double fork, subreaper, flock; no polling (it blocks on signals and pidfds).
Owns `intent.json`, `proc.json`, `exit.json` and the two locks. Runs in a fresh interpreter
(`python -m backend.runs.supervisor ATTEMPT_DIR`), so that a big parent is never forked and nothing of it is inherited.
Knows nothing of what the job does: progress, events and outputs are the job's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import backend
from backend.errors import OperatorError, Refused
from backend.runs import identity, tree
from backend.runs.atomic import Reserved, read_json, write_json
from backend.runs.identity import SUPERVISOR, TAG, WITHIN, ProcessIdentity
from backend.runs.layout import Attempt
from backend.runs.locks import FileLock, Held
from backend.runs.spec import Spec, read_spec, write_spec
from backend.runs.tree import ProcessSet

__all__ = ["Spec", "Started", "start", "supervise", "write_spec"]

PR_SET_CHILD_SUBREAPER = 36
HANDSHAKE_LIMIT_S = 120.0
_NOT_EXECUTED: tuple[int | None, int | None, list[dict[str, Any]]] = (127, None, [])


@dataclass(frozen=True)
class Started:
    """`new` is False where this attempt had been started before (then it runs, or has ended).

    `supervisor` and `job` are None where they are not known: another start is under way, or nothing could be run.
    """

    run_id: str
    attempt: Path
    new: bool
    supervisor: ProcessIdentity | None
    job: ProcessIdentity | None


def start(attempt_dir: Path, *, secrets: Mapping[str, str] | None = None) -> Started:
    """Start the command in the attempt's `spec.json`, detached; returns when `proc.json` is written.

    Idempotent: a second start of the same attempt finds the first. `secrets` go into the job's environment and
    nowhere else. A command that cannot be executed is an attempt that ended with code 127, not an error here.
    Raises Refused: `gpu_lock_held` (names the holder), `stale` (its supervisor died: make a new attempt);
    OperatorError: `no_spec`, `start_failed`.
    """
    attempt = Attempt(attempt_dir)
    spec = read_spec(attempt.path)
    environ = {name: value for name, value in os.environ.items() if name != TAG}
    code_root = str(Path(backend.__file__).parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (code_root, environ.get("PYTHONPATH"))))
    environ[SUPERVISOR] = spec.run_id
    process = subprocess.Popen(
        [sys.executable, "-m", "backend.runs.supervisor", "--detach", str(attempt.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=attempt.path,
        env=environ,
        start_new_session=True,
    )
    order = {"secrets": dict(secrets or {}), "pythonpath": os.environ.get("PYTHONPATH")}
    try:
        out, err = process.communicate(json.dumps(order).encode(), timeout=HANDSHAKE_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise OperatorError(
            f"the supervisor of {attempt.path} did not answer within {HANDSHAKE_LIMIT_S:.0f} s",
            fix="look at the attempt's state: the job may have been started",
            reason="start_failed",
        ) from error
    return _started(attempt, spec, out, err)


def _started(attempt: Attempt, spec: Spec, out: bytes, err: bytes) -> Started:
    try:
        answer = json.loads(out)
    except ValueError as error:
        raise OperatorError(
            f"the supervisor of {attempt.path} failed to start: {err.decode(errors='replace').strip()[-2000:]}",
            fix=f"run it by hand: {sys.executable} -m backend.runs.supervisor {attempt.path}",
            reason="start_failed",
        ) from error
    if "refused" in answer:
        told = OperatorError.from_json(answer["refused"])
        kind = Refused if told.code == Refused.code else OperatorError
        raise kind(told.what, fix=told.fix, reason=told.reason, code=told.code)
    known = {key: ProcessIdentity.from_json(answer[key]) if answer.get(key) else None for key in ("supervisor", "job")}
    return Started(spec.run_id, attempt.path, bool(answer["new"]), known["supervisor"], known["job"])


Announce = Callable[[Mapping[str, Any]], None]


def supervise(
    attempt_dir: Path,
    *,
    secrets: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    announce: Announce | None = None,
) -> int:
    """Run the attempt's job in *this* process's care and return its code (128 + n for signal n).

    The whole process is taken: signal handlers, subreaper, umask. `announce` is called once, when the job runs or the
    start was refused. For a batch system's job, which must stay in the foreground; others call `start`.
    """
    tell: Announce = announce or (lambda answer: None)
    attempt = Attempt(attempt_dir)
    spec = read_spec(attempt.path)
    lock = FileLock(attempt.lock)
    me = ProcessIdentity.of(os.getpid(), _own_tag(os.environ))
    try:
        lock.acquire({"run_id": spec.run_id, "supervisor": me.as_json()})
    except Held:
        tell({"new": False, **_known(attempt)})
        return 0
    try:
        if attempt.exit.exists():
            lock.release()
            tell({"new": False, **_known(attempt)})
            return 0
        if attempt.intent.exists():
            raise Refused(
                f"{attempt.path} was started before and its supervisor died",
                fix="stop what is left of it, then make a new attempt",
                reason="stale",
            )
        gpu = _take_gpu_lock(attempt, spec)
    except Refused:
        lock.release()  # before the answer: whoever gets it may look at the state at once
        raise
    return _Supervisor(attempt, spec, gpu, me).run({**(secrets or {})}, dict(environ or os.environ), tell)


def _known(attempt: Attempt) -> dict[str, Any]:
    proc = read_json(attempt.proc) or {}
    return {"supervisor": proc.get("supervisor"), "job": proc.get("job")}


def _take_gpu_lock(attempt: Attempt, spec: Spec) -> FileLock | None:
    """Take `gpu.lock` for this attempt, or refuse with the attempt that has it.

    The kernel frees a lock when its holder is killed, but the holder's job may live on with the GPUs: a record that
    was left behind is believed until no process of that run is alive.
    """
    if spec.gpu_lock is None:
        return None
    lock = FileLock(Path(spec.gpu_lock))
    try:
        lock.acquire({"run_id": spec.run_id, "attempt": str(attempt.path), "pid": os.getpid()})
    except Held as held:
        raise Refused(
            f"the GPUs are held by {held.holder.get('attempt', 'another attempt')} (run {held.holder.get('run_id')})",
            fix="wait for it or stop it, then start again",
            reason="gpu_lock_held",
        ) from None
    left = lock.previous
    if left and identity.tagged(str(left.get("run_id"))):
        lock.release(leave=left)
        raise Refused(
            f"the GPUs are still used by {left.get('attempt')} (run {left.get('run_id')}), whose supervisor died",
            fix="stop that attempt first",
            reason="gpu_lock_held",
        )
    return lock


class _Supervisor:
    """One run of one job, from intent to exit record."""

    def __init__(self, attempt: Attempt, spec: Spec, gpu: FileLock | None, me: ProcessIdentity) -> None:
        self._attempt = attempt
        self._spec = spec
        self._gpu = gpu
        self._me = me
        self._job_pid: int | None = None
        self._status: int | None = None
        self._stopped = False
        self._stop_asked = 0
        self._give_up = False
        self._wakeup = -1

    def run(self, secrets: Mapping[str, str], environ: dict[str, str], tell: Announce) -> int:
        attempt, spec = self._attempt, self._spec
        self._catch_signals()
        if spec.subreaper and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OperatorError("this kernel has no PR_SET_CHILD_SUBREAPER", reason="start_failed")
        umask = os.umask(0o077)
        t0, mono0 = time.time(), time.monotonic()
        me = self._me
        exit_file = Reserved(attempt.exit)
        log = os.open(attempt.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        write_json(attempt.intent, {"run_id": spec.run_id, "supervisor": me.as_json(), "t": t0})
        error = self._launch(log, {**environ, **spec.env, **secrets, **self._tags(environ)}, umask)
        if self._job_pid is None:
            tell({"new": True, "supervisor": me.as_json()})
            code, number, escaped = _NOT_EXECUTED
        else:
            job = self._job_identity()
            error = self._record_start(job, t0)
            tell({"new": True, "supervisor": me.as_json(), "job": job.as_json()})
            escaped = self._wait()
            code, number = _decode(self._status)
            if self._status is None:
                error = "the job could not be killed: it waits in the kernel"
        record = {
            "run_id": spec.run_id,
            "code": code,
            "signal": number,
            "stopped": self._stopped,
            "t0": t0,
            "t1": time.time(),
            "duration_s": round(time.monotonic() - mono0, 3),
            "log_bytes": os.fstat(log).st_size,
            "escaped": escaped,
            "error": error,
        }
        exit_file.write(record)
        if self._gpu is not None:
            self._gpu.release(leave={"run_id": spec.run_id, "attempt": str(attempt.path)} if escaped else None)
        return code if code is not None else 128 + (number or 0)

    def _catch_signals(self) -> None:
        """Handlers, not SIG_IGN: an ignored signal stays ignored in the job, a handler does not."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._wakeup = read

        def asked(number: int, frame: FrameType | None) -> None:
            self._stop_asked += 1

        def woken(number: int, frame: FrameType | None) -> None:
            """Only wakes the loop."""

        signal.signal(signal.SIGTERM, asked)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, woken)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _tags(self, environ: Mapping[str, str]) -> dict[str, str]:
        within = [run for run in environ.get(WITHIN, "").split(",") if run]
        if self._spec.subreaper:
            within.append(self._spec.run_id)
        return {TAG: self._spec.run_id, WITHIN: ",".join(within), "SPT_NOENV": "1"}

    def _launch(self, log: int, environ: dict[str, str], umask: int) -> str | None:
        """Fork and execute the job; the sentence that says why not, where it cannot be executed."""
        spec = self._spec
        environ.pop(SUPERVISOR, None)
        try:
            process = subprocess.Popen(
                list(spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=spec.cwd,
                env=environ,
                start_new_session=True,
                umask=umask,
            )
        except OSError as error:
            what = f"cannot execute {spec.argv[0]!r} in {spec.cwd}: {error.strerror}"
            if error.filename not in (None, spec.argv[0]):
                what += f" ({error.filename})"
            os.write(log, f"eagle3-console: {what}\n".encode())
            return what
        self._job_pid = process.pid
        process.returncode = 0  # reaped below with all the others; Popen must not wait for it
        return None

    def _job_identity(self) -> ProcessIdentity:
        pid, me = self._job_pid, self._me
        assert pid is not None
        seen = identity.see(pid)  # not yet reaped, so it is there even if it has ended
        ticks = seen.start_ticks if seen else 0
        return ProcessIdentity(pid, ticks, me.boot_id, me.pid1_ticks, me.pid_ns, me.uid, f"{TAG}={self._spec.run_id}")

    def _record_start(self, job: ProcessIdentity, t0: float) -> str | None:
        """Write `proc.json`. A job without a record must not live: on a full disk it is stopped again."""
        record = {
            "run_id": self._spec.run_id,
            "supervisor": self._me.as_json(),
            "job": job.as_json(),
            "argv": list(self._spec.argv),
            "t0": t0,
        }
        try:
            write_json(self._attempt.proc, record)
        except OSError as error:
            self._give_up = True
            return f"proc.json cannot be written: {error.strerror}; the job was stopped"
        return None

    def _reaped(self) -> bool:
        """Take in all signals and dead children (orphans come to us); True once the job itself is among them."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                return self._status is not None
            if pid == self._job_pid:
                self._status = status

    def _wait(self) -> list[dict[str, Any]]:
        """Block until the job and everything that belongs to it is gone; what could not be ended is returned.

        The tree is ended after a normal end too: what a job leaves behind holds GPUs and ports.
        """
        with ProcessSet(self._spec.run_id, root=os.getpid()) as members:
            while not (self._reaped() or self._stop_asked or self._give_up):
                members.wait(None, self._wakeup)
            # A stop that comes from here on finds a job that has ended by itself.
            self._stopped = self._stop_asked > 0
            asked, grace = self._stop_asked, self._grace()

            def grace_now(elapsed: float) -> float:
                nonlocal asked, grace
                if self._stop_asked > asked:
                    # Asked again: this may shorten the grace, never lengthen it.
                    asked, grace = self._stop_asked, min(grace, elapsed + self._grace())
                return grace

            left = tree.end(members, grace_now, before_look=self._reaped, wakeup=self._wakeup)
        return [process.as_json() for process in left]

    def _grace(self) -> float:
        wish = read_json(self._attempt.stop) if self._stop_asked else None
        return float(wish["grace_s"]) if wish and "grace_s" in wish else self._spec.grace_s


def _own_tag(environ: Mapping[str, str]) -> str:
    """The entry of our own start environment that proves who we are."""
    return f"{SUPERVISOR}={environ[SUPERVISOR]}" if SUPERVISOR in environ else ""


def _decode(status: int | None) -> tuple[int | None, int | None]:
    """(exit code, signal) of a wait status; exactly one is set, none where the job was never reaped."""
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def _detach(attempt: Attempt) -> int:
    """Second half of `start`, in the fresh interpreter: take the order, leave the caller's tree, supervise."""
    order = json.load(sys.stdin)
    between = os.getpid()
    if os.fork():
        os._exit(0)
    _await_death(between)
    os.chdir("/")
    environ = dict(os.environ)
    environ.pop("PYTHONPATH", None)
    if order["pythonpath"] is not None:
        environ["PYTHONPATH"] = order["pythonpath"]
    answer_fd = os.dup(1)
    os.set_inheritable(answer_fd, False)
    told = False

    def tell(answer: Mapping[str, Any]) -> None:
        nonlocal told
        told = True
        # The caller may have been killed meanwhile; the job's care must not depend on that.
        with contextlib.suppress(BrokenPipeError):
            os.write(answer_fd, json.dumps(dict(answer)).encode())
        os.close(answer_fd)
        _leave_pipes(attempt)

    try:
        supervise(attempt.path, secrets=order["secrets"], environ=environ, announce=tell)
    except OperatorError as error:
        if told:
            raise
        tell({"refused": error.as_json()})
    except OSError as error:
        if told:
            raise
        what = f"the attempt {attempt.path} cannot be started: {error}"
        tell({"refused": OperatorError(what, reason="start_failed").as_json()})
    return 0


def _await_death(pid: int) -> None:
    """Wait until our parent is gone: only then are we out of the caller's tree, which may be ended at any moment."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    os.close(fd)


def _leave_pipes(attempt: Attempt) -> None:
    """Our own words, if any, go to the job's log from here on; the caller's pipes are closed."""
    null = os.open(os.devnull, os.O_RDWR)
    log = null
    if attempt.log.exists():
        log = os.open(attempt.log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    for fd in {null, log}:
        os.close(fd)


def main(argv: list[str]) -> int:
    """`python -m backend.runs.supervisor [--detach] ATTEMPT_DIR`; without `--detach` in the foreground."""
    detach, words = "--detach" in argv, [word for word in argv if word != "--detach"]
    if len(words) != 1:
        sys.stderr.write("usage: python -m backend.runs.supervisor [--detach] ATTEMPT_DIR\n")
        return 2
    attempt = Attempt(Path(words[0]))
    if detach:
        return _detach(attempt)
    try:
        return supervise(attempt.path)
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
