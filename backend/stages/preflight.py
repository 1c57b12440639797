"""preflight: everything that can be known to be wrong before hours are spent, each with its fix.

Severity 0: looks, changes nothing. Every check is a function that returns `Check`s; a check with ok=None could not be
made here and says why. Fails with exit code 6 after *all* checks were made, so that one round shows every problem.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import os
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from backend.agent import gpu, host
from backend.data.sources import Source, SourceSpec
from backend.engine.layers import validate_layers
from backend.engine.procfs import argv, listeners, start_ticks, started_at
from backend.errors import Exit, OperatorError
from backend.report import Check
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.disk import Volume, volumes
from backend.stages.figures import GB, disk_budget, target_figures, token_figures
from backend.stages.merge import specs
from backend.stages.purge import deletions, kept
from backend.stages.server import layers_of, owner_of

SGLANG_PLUGINS_SINCE = (0, 5, 11)
SHM_WANTED = 1 * GB
OPEN_FILES_WANTED = 4096
PLACES = {"store": "[store] root", "checkpoints": "[train] out", "data": "[data] out"}


class Preflight(Stage):
    """Looks at interpreter, GPUs, disk, shared memory, memory limit, port, locks and limits of the host."""

    name: ClassVar[str] = "preflight"
    severity: ClassVar[Severity] = 0
    serves: ClassVar[tuple[str, ...]] = ("merge", "extract", "train", "bench")

    def plan(self, ctx: StageContext) -> StagePlan:
        """Nothing to show but that it looks."""
        return StagePlan(lines=("looks at the host, changes nothing",))

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Make every check.

        Raises:
            OperatorError: code 6, listing each failed check with its fix.
        """
        checks = [check for group in CHECKS for check in group(ctx)]
        for check in checks:
            ctx.reporter.check(check)
        failed = [check for check in checks if check.ok is False]
        if failed:
            raise OperatorError(
                f"preflight: {len(failed)} of {len(checks)} checks failed: "
                + "; ".join(f"{check.name}: {check.evidence}" for check in failed),
                fix="; ".join(check.fix for check in failed if check.fix),
                reason=failed[0].name.replace(" ", "_"),
                code=Exit.PREFLIGHT_FAILED,
            )
        return {"checks": [check.as_json() for check in checks]}


def check_interpreter(ctx: StageContext) -> list[Check]:
    """The configured interpreter has torch and an SGLang whose plugins can capture."""
    checks = [Check("interpreter", True, f"{sys.executable}, Python {sys.version.split()[0]}, prefix {sys.prefix}")]
    for package in ("torch", "sglang", "transformers"):
        try:
            checks.append(Check(package, True, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            fix = f"install {package} for {sys.executable}, or set [host] python to the interpreter that has it"
            checks.append(Check(package, False, f"not installed for {sys.executable}", fix=fix))
    version = next((check.evidence for check in checks if check.name == "sglang" and check.ok), "")
    if version and _release(version) < SGLANG_PLUGINS_SINCE:
        wanted = ".".join(map(str, SGLANG_PLUGINS_SINCE))
        fix = f"install sglang {wanted} or newer: older servers load no plugins"
        checks.append(Check("capture by plugin", False, f"sglang {version} is older than {wanted}", fix=fix))
    return checks


def check_target(ctx: StageContext) -> list[Check]:
    """The checkpoint is there, and the config's planning figures are its own."""
    folder, section = ctx.path(ctx.config.target.model), ctx.config.target
    if not (folder / "config.json").is_file():
        fix = "set [target] model to the checkpoint's folder on this host"
        return [Check("target", False, f"{folder} has no config.json", fix=fix)]
    try:
        found = target_figures(ctx)
    except OperatorError as error:
        return [Check("target", False, error.what, fix=error.fix)]
    evidence = (
        f"{folder.name}: {found.num_layers} layers × {found.hidden_size}, {found.weight_bytes / GB:,.2f} GB of weights"
    )
    try:
        validate_layers(layers_of(ctx), found.num_layers)
    except OperatorError as error:
        return [Check("capture layers", False, error.what, fix=error.fix)]
    checks = [
        Check("target", found.weight_bytes > 0, evidence, fix=f"{folder} holds no *.safetensors: finish its download")
    ]
    for name in ("hidden_size", "num_layers", "vocab_size"):
        wanted, real = getattr(section, name), getattr(found, name)
        if wanted is not None and wanted != real:
            fix = f"the plan was made with wrong figures: set [target] {name} = {real}"
            checks.append(Check(f"target {name}", False, f"config says {wanted}, the checkpoint {real}", fix=fix))
    return checks


def check_gpus(ctx: StageContext) -> list[Check]:
    """As many GPUs as the server will use, by NVML; none wanted in the CPU mode."""
    wanted = ctx.config.server.tp if ctx.config.host.device == "cuda" else 0
    report = gpu.sample()
    if wanted == 0:
        return [Check("gpus", True, f"none wanted (CPU mode); {len(report.gpus)} seen{_because(report.reason)}")]
    if len(report.gpus) < wanted:
        fix = 'start the container with its GPUs, lower [server] tp, or set [host] device = "cpu"'
        return [Check("gpus", False, f"{wanted} wanted, {len(report.gpus)} seen{_because(report.reason)}", fix=fix)]
    names = ", ".join(sorted({sample.name for sample in report.gpus}))
    hidden = [pid for sample in report.gpus for pid in sample.owners if not Path(f"/proc/{pid}").exists()]
    checks = [Check("gpus", True, f"{len(report.gpus)} × {names}, driver {report.driver}")]
    if hidden:
        evidence = f"NVML shows host pids ({hidden[:4]} …): processes on the GPUs cannot be named from in here"
        checks.append(Check("gpu owners", None, evidence))
    return checks


def check_disk(ctx: StageContext) -> list[Check]:
    """Every product fits, with the reserve that is never used, before the first byte is written: per file system."""
    tokens, checks = token_figures(ctx), []
    for volume in volumes(ctx):
        space = volume.space
        evidence = (
            f"{volume.needed / GB:,.1f} GB needed ({volume.describe()}; {tokens.tokens:,} tokens {tokens.source}), "
            f"{space.free / GB:,.1f} GB free on {space.path} ({space.kind}), "
            f"{volume.reserve / GB:,.1f} GB kept in reserve"
        )
        checks.append(_check_space(ctx, volume, evidence))
        if space.inodes_free >= 0:
            fix = f"free inodes on {space.path}, or use another file system"
            told = f"{space.inodes_free:,} free on {space.path}, {volume.inodes:,} needed"
            checks.append(Check("inodes", volume.inodes <= space.inodes_free, told, fix=fix))
        if space.kind == "overlay":
            checks.append(Check("container disk", None, f"{space.path} is an overlay: it is lost with the container"))
    return checks


def _check_space(ctx: StageContext, volume: Volume, evidence: str) -> Check:
    """Fits now; or (ok=None) only with the space of trash or of older stores, which the purge stage asks for."""
    data = {"needed": volume.needed, "free": volume.space.free}
    name = "disk" if "store" in volume.parts else f"disk for {' and '.join(volume.parts)}"
    fixes = ["free space, or set " + " and ".join(PLACES[part] for part in volume.parts) + " to a larger disk"]
    if volume.fits():
        return Check(name, True, evidence, data)
    if volume.fits(volume.trash):
        told = f"fits once the trash is freed ({volume.trash / GB:,.1f} GB, 15 minutes after it was purged)"
        return Check(name, None, f"{told}; {evidence}", data)
    if "store" in volume.parts:
        plans, refusals = deletions(ctx)
        size = sum(plan.disk_bytes for plan in plans)
        if volume.fits(volume.trash + size):
            known = "merge" in ctx.products
            flags = " ".join(f"--allow purge={plan.sha}" for plan in plans) if known else "its sha is known after merge"
            told = f"fits only after the purge ({size / GB:,.1f} GB): {flags}"
            return Check(name, None, f"{told}; {evidence}", data)
        fixes += ['[store] scheme = "aux8" makes it smaller', *refusals, *kept(ctx)]
    return Check(name, False, evidence, data, "; ".join(fixes))


def check_shared_memory(ctx: StageContext) -> list[Check]:
    """`/dev/shm` can hold the requests in flight: containers get 64 MB by default."""
    dump = ctx.path(ctx.config.capture.dump_dir)
    space = host.disk_space(dump)
    wanted = max(SHM_WANTED, disk_budget(ctx).in_flight)
    evidence = f"{space.free / GB:,.1f} GB free on {space.path} ({space.kind}), {wanted / GB:,.1f} GB wanted"
    fix = f"start the container with --shm-size={2 * wanted // GB}g, or set [capture] dump_dir to a disk"
    return [Check("shared memory", space.free >= wanted, evidence, fix=fix)]


def check_memory(ctx: StageContext) -> list[Check]:
    """The memory limit of the cgroup, since `/dev/shm` counts against it."""
    limit, source = host.memory_limit()
    evidence = f"{limit / GB:,.1f} GB ({source}), {host.available_memory() / GB:,.1f} GB available now"
    kind = host.container()
    return [Check("memory", True, evidence + (f"; container: {kind}" if kind else ""))]


def check_port(ctx: StageContext) -> list[Check]:
    """The server port is free, or held by a server of ours that the stop stage will end."""
    port = ctx.config.server.port
    holders = listeners(port)
    if not holders:
        return [Check("port", True, f"{port} is free")]
    checks = []
    for pid in sorted({pid for holder in holders for pid in holder.pids}) or [0]:
        if pid and owner_of(ctx.home, pid) is not None:
            checks.append(Check("port", True, f"{port} is held by our own server, pid {pid}: stop will end it"))
            continue
        fix = f"end pid {pid} yourself if it is no longer wanted, or set [server] port to a free one"
        checks.append(Check("port", False, f"{port} is taken by {_describe(pid)}, which is not ours", fix=fix))
    return checks


def check_locks(ctx: StageContext) -> list[Check]:
    """flock works where the run directories live (it does not on every network file system)."""
    with tempfile.NamedTemporaryFile(dir=ctx.home.path, prefix=".flock-") as first, open(first.name, "rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return [Check("flock", True, f"excludes on {ctx.home.path}")]
    fix = "set [host] home (or EAGLE3_HOME) to a local disk"
    return [Check("flock", False, f"does not exclude on {ctx.home.path}", fix=fix)]


def check_limits(ctx: StageContext) -> list[Check]:
    """Enough open files for the server's sockets and shards."""
    soft, hard = host.open_file_limit()
    enough = soft >= OPEN_FILES_WANTED
    fix = f"ulimit -n {OPEN_FILES_WANTED}" + (
        "" if hard >= OPEN_FILES_WANTED else " (the hard limit needs an administrator)"
    )
    return [Check("open files", enough or None, f"soft limit {soft:,}, hard {hard:,}", fix="" if enough else fix)]


def check_sources(ctx: StageContext) -> list[Check]:
    """Every data source has files, and none of them is empty or closed to us."""
    return [_check_source(spec) for spec in specs(ctx)]


def _check_source(spec: SourceSpec) -> Check:
    name, fix = f"source {spec.name}", f"mend paths of [[data.sources]] {spec.name}, or fill the file"
    try:
        source = Source(spec)
    except OperatorError as error:
        return Check(name, False, error.what, fix=error.fix or fix)
    for path in source.files:
        if path.stat().st_size == 0:
            return Check(name, False, f"{path} is empty", fix=fix)
        if not os.access(path, os.R_OK):
            return Check(name, False, f"{path} cannot be read", fix=f"chmod +r {path}")
    return Check(name, True, f"{len(source.files)} files, {source.size:,} bytes, {source.files[0]}")


def check_folders(ctx: StageContext) -> list[Check]:
    """State, store, data, training and dumps stand apart: a purge or a clean-up of one must never meet another."""
    config = ctx.config
    folders = {
        "[host] home": ctx.home.path,
        "[store] root": ctx.path(config.store.root),
        "[data] out": ctx.path(config.data.out),
        "[train] out": ctx.path(config.train.out),
        "[capture] dump_dir": ctx.path(config.capture.dump_dir),
    }
    for (one, a), (other, b) in itertools.combinations(folders.items(), 2):
        if a == b or a.is_relative_to(b) or b.is_relative_to(a):
            return [
                Check("folders", False, f"{one} {a} and {other} {b} overlap", fix=f"give {other} a folder of its own")
            ]
    return [Check("folders", True, f"{len(folders)} folders, none inside another")]


CHECKS = (
    check_folders,
    check_interpreter,
    check_target,
    check_sources,
    check_gpus,
    check_disk,
    check_shared_memory,
    check_memory,
    check_port,
    check_locks,
    check_limits,
)


def _describe(pid: int) -> str:
    ticks = start_ticks(pid) if pid else None
    if ticks is None:
        return "a process of another user or namespace"
    command = " ".join((argv(pid) or ["?"])[:4])
    return f"pid {pid} ({command}), running since {datetime.fromtimestamp(started_at(ticks)).isoformat(' ', 'seconds')}"


def _release(version: str) -> tuple[int, ...]:
    digits = [part for part in version.split("+")[0].split(".") if part.isdigit()]
    return tuple(int(part) for part in digits)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
