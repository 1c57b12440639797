"""Servers of the pipeline: from config to a supervised SGLang attempt, and back to nothing left behind.

Owns `server.json` in a server's attempt directory: mode, launch id, port, dump folder, and what was true just before
the launch (port closed, segments in `/dev/shm`). Launch, deploy and bench start through here; stop, train and the
pilot stop through here. What a server that died by itself left is cleared by the next start. Knows nothing of
readiness: that is the gate's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.config import EngineConfig
from backend.engine.capture import plugin_dir
from backend.engine.launch import ServerMode, ServerSpec, argv, engine_defaults, environment
from backend.engine.procfs import argv as process_argv
from backend.engine.procfs import environ, listeners
from backend.engine.readiness import ServerProcess
from backend.engine.server_log import last_errors
from backend.errors import Exit, OperatorError, Refused
from backend.report import Check, Reporter
from backend.runs import identity, shm
from backend.runs.atomic import read_json, write_json
from backend.runs.layout import Home
from backend.runs.shm import Segment
from backend.runs.spec import write_spec
from backend.runs.state import state as state_of
from backend.runs.stop import StopReport, stop
from backend.runs.supervisor import start
from backend.stages.base import Launch, StageContext
from backend.stages.figures import target_figures

SERVER = "server.json"
VERDICT = "verdict.json"
SEGMENTS = "segments.json"
GRACE_S = 30.0
REGENERATE = "regenerate"
"""Folder of the home whose `attempts` are servers outside a pipeline."""
_PLACES = (
    "pipelines/*/stages/*/attempts/*",
    "pipelines/*/stages/*/attempts/*/servers/*",
    f"{REGENERATE}/attempts/*",
)


@dataclass(frozen=True)
class ServerRecord:
    """What a launch recorded about itself."""

    mode: ServerMode
    launch_id: str
    host: str
    port: int
    dump_dir: str
    draft_path: str
    started_at: float
    port_was_closed: bool
    shm_before: tuple[Segment, ...]

    @property
    def draft(self) -> Path | None:
        """Folder of the draft model that it serves with."""
        return Path(self.draft_path) if self.draft_path else None

    @property
    def url(self) -> str:
        """Base URL for clients on this host."""
        return f"http://{self.host}:{self.port}"

    @classmethod
    def read(cls, attempt: Path) -> ServerRecord:
        """The record in an attempt directory.

        Raises:
            OperatorError: this attempt is no server.
        """
        data = read_json(attempt / SERVER)
        if data is None:
            raise OperatorError(f"{attempt} holds no {SERVER}: it is not a server's attempt", reason="no_server")
        return cls(**{**data, "shm_before": tuple(Segment.from_json(item) for item in data["shm_before"])})


def layers_of(ctx: StageContext) -> tuple[int, ...]:
    """The captured layers, canonical: configured, or EAGLE-3's default for this depth."""
    return tuple(ctx.config.capture.layers) or target_figures(ctx).default_layers()


def spec_of(ctx: StageContext, mode: ServerMode, launch_id: str, draft: Path | None = None) -> ServerSpec:
    """The launch of one mode. Extraction takes `[server]`, serving takes `[deploy]`; both serve on `[server] port`."""
    server, deploy = ctx.config.server, ctx.config.deploy
    engine: EngineConfig = server if mode in ("extract", "regenerate") else deploy
    return ServerSpec(
        mode=mode,
        model_path=str(ctx.path(ctx.config.target.model)),
        host=server.host,
        port=server.port,
        tp=server.tp,
        device=ctx.config.host.device,
        dtype=engine.dtype,
        attention_backend=engine.attention_backend,
        mem_fraction=engine.mem_fraction,
        max_total_tokens=engine.max_total_tokens,
        max_running_requests=engine.max_running_requests,
        chunked_prefill=engine.chunked_prefill,
        context_length=engine.context_length,
        trust_remote_code=ctx.config.target.trust_remote_code,
        launch_id=launch_id,
        dump_dir=str(ctx.path(ctx.config.capture.dump_dir) / launch_id) if mode == "extract" else None,
        layers=layers_of(ctx) if mode == "extract" else (),
        draft_path=str(draft) if draft else None,
        spec_steps=deploy.spec_steps,
        spec_topk=deploy.spec_topk,
        spec_draft_tokens=deploy.spec_draft_tokens,
        extra_args=tuple(engine.extra_args),
        env={**server.env, **engine.env},
    )


def show(ctx: StageContext, mode: ServerMode, draft: Path | None = None) -> Launch:
    """The launch as `plan` prints it, with a placeholder for the random launch id."""
    spec = spec_of(ctx, mode, "<launch-id>", draft)
    return Launch(tuple(argv(ctx.python, spec)), server_env(ctx, spec), engine_defaults(spec))


def server_env(ctx: StageContext, spec: ServerSpec) -> dict[str, str]:
    """Environment of the server process; the plugin's folder stands on its PYTHONPATH in extract mode."""
    unpack = ctx.home.path / "unpacked"
    return environment(spec, plugin_dir(unpack), unpack)


def start_server(ctx: StageContext, attempt: Path, mode: ServerMode, draft: Path | None = None) -> ServerRecord:
    """Start a supervised server in a new attempt directory, after clearing what ended ones of this home left.

    Raises:
        OperatorError: the port is taken, or the GPUs are (`gpu.lock`), naming the holder.
    """
    launch_id = f"e3-{secrets.token_hex(8)}"
    spec = spec_of(ctx, mode, launch_id, draft)
    taken = listeners(spec.port)
    if taken:
        pids = sorted({pid for listener in taken for pid in listener.pids})
        raise OperatorError(
            f"port {spec.port} is taken by {', '.join(f'pid {pid}' for pid in pids) or 'another user'}",
            fix="let the stop stage end it if it is ours, else end it yourself or set [server] port",
            reason="port_taken",
        )
    clear_ended(ctx.home)
    record = ServerRecord(
        mode=mode,
        launch_id=launch_id,
        host=spec.host,
        port=spec.port,
        dump_dir=spec.dump_dir or "",
        draft_path=spec.draft_path or "",
        started_at=time.time(),
        port_was_closed=not listeners(spec.port),
        shm_before=shm.snapshot(),
    )
    if spec.dump_dir:
        Path(spec.dump_dir).mkdir(parents=True, mode=0o700)
    write_json(attempt / SERVER, asdict(record))
    write_spec(
        attempt,
        argv=argv(ctx.python, spec),
        env=server_env(ctx, spec),
        cwd=ctx.config.host.work,
        grace_s=GRACE_S,
        gpu_lock=ctx.home.gpu_lock,
        service=True,
        launch_id=launch_id,
    )
    try:
        start(attempt)
    except Refused:  # the GPUs are taken: nothing was started
        _clear(attempt)
        raise
    return record


def server_process(attempt: Path) -> ServerProcess:
    """The process of a started server, for the gate."""
    proc = read_json(attempt / "proc.json")
    if proc is None:
        raise OperatorError(f"{attempt} has not been started", reason="no_server")
    record = ServerRecord.read(attempt)
    return ServerProcess(
        pid=proc["supervisor"]["pid"],
        start_ticks=proc["supervisor"]["start_ticks"],
        log=attempt / "log",
        started_at=record.started_at,
        exit_path=attempt / "exit.json",
        port_was_closed=record.port_was_closed,
    )


def stop_server(attempt: Path) -> StopReport:
    """Stop a server's whole tree, then clear what its launch left: dump folder and its own `/dev/shm` segments.

    Raises:
        OperatorError: code 8, a process cannot be ended (`unkillable`) or the port is still open (`port_open`);
            nothing is cleared then.
    """
    record = ServerRecord.read(attempt)
    report = stop(attempt, grace_s=GRACE_S, port=record.port)
    if not report.ok:
        raise _not_gone(record, report)
    _clear(attempt)
    return report


def _not_gone(record: ServerRecord, report: StopReport) -> OperatorError:
    if report.left:
        left = ", ".join(f"pid {seen.pid} (state {seen.state}, waits in {seen.wchan or '?'})" for seen in report.left)
        what = f"server {record.launch_id} could not be ended: {left}"
        fix = "a process in uninterruptible sleep (D) needs its device or the host to be reset"
    else:
        pids = ", ".join(map(str, report.port_holders)) or "of another user"
        what = f"server {record.launch_id} is gone, but its port {record.port} is open still: held by pid {pids}"
        fix = "end that process yourself, it is none of ours, or set [server] port to a free one"
    return OperatorError(what, fix=fix, reason=report.reason, code=Exit.NEEDS_HUMAN)


@contextmanager
def stopped_after(attempt: Path, reporter: Reporter) -> Iterator[None]:
    """Stop a server after the block. An error of the block stays the error: a stop that fails too is a warning then."""
    try:
        yield
    except BaseException:
        try:
            stop_server(attempt)
        except OperatorError as error:
            reporter.warning(str(error))
        raise
    stop_server(attempt)


def clear_ended(home: Home) -> None:
    """Clear what the ended servers of this home left."""
    for attempt in _servers(home):
        clear_leftovers(attempt)


def clear_leftovers(attempt: Path) -> None:
    """Clear what an ended server left, once: a second call, or one for a server that lives, changes nothing."""
    record = ServerRecord.read(attempt)
    if not (record.dump_dir and Path(record.dump_dir).is_dir()) and not recorded_segments(attempt):
        return
    now = state_of(attempt)
    if now.ended and not now.job_alive and not identity.tagged(now.run_id):
        _clear(attempt)


def _clear(attempt: Path) -> None:
    record, segments = ServerRecord.read(attempt), recorded_segments(attempt)
    if record.dump_dir:
        _clear_dump(Path(record.dump_dir))
    if segments:
        report = shm.scrub(segments)
        # Asked once, right after the end: what others use then is theirs, and stays theirs when they let go of it.
        removed = [segment.as_json() for segment in report.removed]
        kept = [{**segment.as_json(), "why": why} for segment, why in report.kept]
        write_json(attempt / SEGMENTS, {"new": [], "removed": removed, "kept": kept})


def record_segments(attempt: Path) -> None:
    """Note which `/dev/shm` segments of ours appeared since the launch: the only ones that `stop_server` may remove."""
    record = ServerRecord.read(attempt)
    write_json(attempt / SEGMENTS, {"new": [segment.as_json() for segment in shm.new_since(record.shm_before)]})


def recorded_segments(attempt: Path) -> list[Segment]:
    """The segments that `record_segments` noted and nobody cleared yet."""
    return [Segment.from_json(item) for item in (read_json(attempt / SEGMENTS) or {"new": []})["new"]]


def required_server(ctx: StageContext) -> Path:
    """The attempt of the server that this stage works with.

    Raises:
        OperatorError: there is none.
    """
    if ctx.server is None:
        raise OperatorError(
            "this stage needs a running server, and none of this pipeline runs",
            fix="include the stage that starts it: --from launch for extract, --from deploy for bench",
            reason="no_server",
        )
    return ctx.server


def require_alive(attempt: Path) -> None:
    """The server's process lives.

    Raises:
        OperatorError: code 7, it has ended; the message has the last errors of its log.
    """
    now = state_of(attempt)
    if now.alive and now.job is not None and now.job.alive():
        return
    record_segments(attempt)
    state = "its process is gone" if now.alive else now.describe()
    said = " | ".join(last_errors(attempt / "log")) or "(the log is empty)"
    raise OperatorError(
        f"the server did not stay up: {state}; its log ends with: {said}",
        fix=f"read {attempt / 'log'}, change what it names, launch again",
        reason="server_ended",
        code=Exit.NEVER_READY,
    )


def check_process(attempt: Path) -> list[Check]:
    """Alive, in a session of its own, started with the command and the environment that were asked for.

    Raises:
        OperatorError: code 7, it has ended.
    """
    require_alive(attempt)
    spec, proc = read_json(attempt / "spec.json") or {}, read_json(attempt / "proc.json") or {}
    pid = int(proc["job"]["pid"])
    seen = environ(pid) or {}
    wrong = sorted(name for name, value in spec["env"].items() if seen.get(name) != value)
    command = process_argv(pid)
    return [
        Check("server process", True, f"pid {pid}, alive"),
        Check("detached", os.getsid(pid) == pid, f"session {os.getsid(pid)} of its own"),
        Check("command", command == spec["argv"], " ".join(spec["argv"][:4]) + " …", fix=f"found {command}"),
        Check("environment", not wrong, f"{len(spec['env'])} variables as asked" if not wrong else f"differs: {wrong}"),
    ]


def _servers(home: Home) -> Iterator[Path]:
    """Attempt directories of all servers that this home ever started, those nested in a bench included."""
    for place in _PLACES:
        for found in sorted(home.path.glob(f"{place}/{SERVER}")):
            yield found.parent


def live_servers(home: Home) -> Iterator[Path]:
    """Attempt directories of servers of this home that run now, be it without their supervisor."""
    for attempt in _servers(home):
        now = state_of(attempt)
        if now.alive or now.job_alive:
            yield attempt


def owner_of(home: Home, pid: int) -> Path | None:
    """The live server attempt that `pid` belongs to, by the run tag in its environment; None = not ours."""
    tag = (environ(pid) or {}).get("EAGLE3_RUN_ID")
    for attempt in live_servers(home):
        if tag and (read_json(attempt / "spec.json") or {}).get("run_id") == tag:
            return attempt
    return None


def _clear_dump(folder: Path) -> None:
    """Remove the dump folder of an ended launch. It was made by `start_server` for this launch id alone."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        entry.unlink(missing_ok=True)
    folder.rmdir()
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # made by us too, unless another launch still dumps there


def facts(attempt: Path) -> dict[str, Any]:
    """Mode, launch id and address, for outputs and events."""
    record = ServerRecord.read(attempt)
    return {"attempt": str(attempt), "mode": record.mode, "launch_id": record.launch_id, "url": record.url}
