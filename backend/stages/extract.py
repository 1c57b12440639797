"""extract: the hidden states of every merged record, from the gated server into the store.

Severity 1. The store's folder is named by its identity (target, layers, engine, merged data …): the same plan resumes
in it, another plan gets another folder, and purge tells the two apart.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import signal
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, ClassVar

from backend.data.merged import SPLITS, MergedRecord, read_split
from backend.engine.client import AsyncSGLangClient
from backend.engine.extractor import Extraction, Extractor
from backend.engine.server_log import last_errors
from backend.errors import Exit, OperatorError
from backend.report import Check, Silent
from backend.runs.atomic import read_json, write_json
from backend.runs.fingerprint import digest
from backend.runs.state import state as state_of
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.figures import (
    GB,
    chat_hashes,
    reserve_bytes,
    scheme_bytes,
    target_figures,
    target_identity,
    token_figures,
)
from backend.stages.handover import OPENED
from backend.stages.server import VERDICT, ServerRecord, layers_of, required_server
from backend.store.format import SCHEMES, StoreIdentity
from backend.store.reader import Store
from backend.store.repair import repair
from backend.store.verify import verify
from backend.store.writer import StoreWriter


class Extract(Stage):
    """Merged records → hidden-state store."""

    name: ClassVar[str] = "extract"
    severity: ClassVar[Severity] = 1
    needs: ClassVar[tuple[str, ...]] = ("merge",)
    identity: ClassVar[tuple[str, ...]] = ("identity", "records", "tokens")
    mode: ClassVar[str] = "extract"

    def material(self, ctx: StageContext) -> dict[str, Any]:
        """What the numbers in the store depend on."""
        return {
            "target": target_identity(ctx),
            "layers": list(layers_of(ctx)),
            "scheme": ctx.config.store.scheme,
            "engine": engine_version(),
            **numerics(ctx),
        }

    def plan(self, ctx: StageContext) -> StagePlan:
        """Bytes under each scheme, and hours at the assumed rate."""
        figures, tokens, scheme = target_figures(ctx), token_figures(ctx), ctx.config.store.scheme
        sizes = {name: tokens.tokens * scheme_bytes(figures, name) for name in SCHEMES}
        # Every state in fp8 with a scale per (token, layer): shown for the budget, not offered by the store.
        sizes["fp8 (not offered yet)"] = tokens.tokens * 4 * (figures.hidden_size + 4)
        lines = [
            f"{tokens.tokens:,} tokens {tokens.source}",
            "store: "
            + ", ".join(
                f"{name} {size / GB:,.2f} GB{' (chosen)' if name == scheme else ''}" for name, size in sizes.items()
            ),
        ]
        numbers: dict[str, float | int | str] = {"tokens": tokens.tokens, "gb": round(sizes[scheme] / GB, 2)}
        if rate := ctx.config.extract.expected_tokens_s:
            hours = tokens.tokens / rate / 3600
            lines.append(
                f"about {hours:,.2f} h at an assumed {rate:,.0f} tokens/s, "
                f"{ctx.config.extract.concurrency} requests in flight"
            )
            numbers |= {"hours": round(hours, 2), "gpu_hours": round(hours * ctx.config.host.gpus, 1)}
        return StagePlan(tuple(lines), (f"fills a store under {ctx.path(ctx.config.store.root)}",), numbers)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Extract what the store does not hold yet.

        Raises:
            OperatorError: server gone, disk full, foreign store, stopped, or records that failed twice; what is stored
                stays.
        """
        server = required_server(ctx)
        launch, identity = ServerRecord.read(server), identity_of(ctx)
        root = store_path(ctx, identity)
        began = time.monotonic()
        assert ctx.attempt is not None
        write_json(ctx.attempt / OPENED, {"store": str(root)})
        extraction = until_stopped(self._fill(ctx, server, launch, root, identity))
        with Store.open(root) as store:
            return {
                "store": str(root),
                "identity": identity.sha(),
                "records": len(store),
                "tokens": store.tokens,
                "bytes": store.nbytes,
                "new_tokens": extraction.tokens,
                "tokens_s": round(extraction.tokens / (time.monotonic() - began), 1),
            }

    async def _fill(
        self, ctx: StageContext, server: Path, launch: ServerRecord, root: Path, identity: StoreIdentity
    ) -> Extraction:
        verdict = read_json(server / VERDICT) or {}
        with open_writer(ctx, root, identity, launch.launch_id, verdict.get("canary_digest")) as writer:
            extraction = await self._extract(ctx, server, launch, writer)
            if extraction.failed:
                record, why = next(iter(extraction.failed.items()))
                raise OperatorError(
                    f"{len(extraction.failed)} of {extraction.total} records failed twice, first {record}: {why}",
                    fix="the others are stored; look at the server's log, then run again",
                    reason="records_failed",
                )
            writer.seal()
        return extraction

    async def _extract(self, ctx: StageContext, server: Path, launch: ServerRecord, writer: StoreWriter) -> Extraction:
        def server_error() -> OperatorError | None:
            state = state_of(server)
            if state.alive:
                return None
            last = "; ".join(last_errors(server / "log"))
            fix = f"what was extracted is stored; run again to go on. The server's last words: {last}"
            return OperatorError(f"the extraction server ended: {state.describe()}", fix=fix, reason="server_gone")

        async with AsyncSGLangClient(launch.url) as client:
            extractor = Extractor(client, writer, Path(launch.dump_dir), launch.launch_id, ctx.reporter, server_error)
            return await extractor.run(merged_records(ctx), ctx.config.extract.concurrency)

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """Every merged record is there with its own tokens; checksums of a sample; nothing foreign."""
        root = Path(outputs["store"])
        if not root.is_dir():
            return [Check("store", False, f"{root} is gone")]
        report = verify(root, full=False, reporter=Silent())
        checks = [
            Check(
                "store",
                report.ok,
                report.describe(),
                fix="run again: extract repairs the store and fills in what is missing",
            )
        ]
        with Store.open(root) as store:
            wanted = {record.id: len(record.input_ids) for record in merged_records(ctx)}
            short = [rid for rid, tokens in wanted.items() if rid not in store or store.rows(rid) != tokens]
        evidence = f"{len(wanted):,} records wanted, {len(short)} missing or short"
        return [*checks, Check("records", not short, evidence + (f", first {short[0]}" if short else ""))]


def until_stopped(work: Coroutine[Any, Any, Extraction]) -> Extraction:
    """Run `work` in a loop of its own. SIGTERM cancels it where it waits, never in the middle of a write to the store.

    Raises:
        OperatorError: `stopped`, after every context manager of `work` has closed; or what `work` raises.
    """

    async def watched() -> Extraction:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise OperatorError(
            "the extraction was stopped",
            fix="run again: it goes on after the last record that was stored",
            reason="stopped",
            code=Exit.TERMINATED,
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)  # the loop leaves the default handler behind


def open_writer(
    ctx: StageContext, root: Path, identity: StoreIdentity, launch_id: str, canary_digest: str | None
) -> StoreWriter:
    """The store's writer; a damaged store is repaired first: bad records go to quarantine and are extracted again."""

    def opened() -> StoreWriter:
        return StoreWriter.open(
            root,
            identity,
            shard_bytes=int(ctx.config.store.shard_gb * GB),
            reserve_bytes=reserve_bytes(ctx),
            canary_digest=canary_digest,
            run_id=launch_id,
        )

    try:
        return opened()
    except OperatorError as error:
        if error.reason != "store_damaged":
            raise
        ctx.reporter.warning(f"{error.what}: repairing it, what is bad goes to {root / 'quarantine'}")
        repair(root, ctx.reporter)
        return opened()


def merged_records(ctx: StageContext) -> list[MergedRecord]:
    """Every record of the merge: training, validation and held-out."""
    folder = Path(ctx.product("merge").outputs["folder"])
    return [record for split in SPLITS for record in read_split(folder, split)]


def identity_of(ctx: StageContext) -> StoreIdentity:
    """What makes a store this plan's store. Known before anything is extracted: purge compares by it."""
    target = target_identity(ctx)
    chat = chat_hashes(ctx)
    return StoreIdentity(
        target=target["name"],
        revision=f"{target['config']}-{target['weights']}",
        engine=engine_identity(engine_version(), numerics(ctx)),
        route=ctx.config.capture.route,
        layers=layers_of(ctx),
        post_norm=True,
        hidden_size=target_figures(ctx).hidden_size,
        tokenizer_hash=chat["tokenizer"],
        template_hash=chat["template"],
        max_tokens=ctx.config.data.max_tokens,
        scheme=ctx.config.store.scheme,
        data_digest=ctx.product("merge").outputs["digest"],
    )


def store_path(ctx: StageContext, identity: StoreIdentity) -> Path:
    """The folder of a store: its target's name and its identity."""
    return ctx.path(ctx.config.store.root) / f"{identity.target}-{identity.sha()[:12]}"


def engine_version() -> str:
    """Name and version of the engine of this interpreter."""
    return f"sglang {importlib.metadata.version('sglang')}"


def numerics(ctx: StageContext) -> dict[str, Any]:
    """Settings of the extraction server that change the numbers it captures. NCCL's say only how ranks talk."""
    server = ctx.config.server
    return {
        "dtype": server.dtype,
        "device": ctx.config.host.device,
        "extra_args": list(server.extra_args),
        "env": {name: value for name, value in sorted(server.env.items()) if not name.startswith("NCCL_")},
    }


def engine_identity(version: str, settings: Mapping[str, Any]) -> str:
    """The engine as a store's identity names it: "sglang 0.5.14 cpu bfloat16", "+" and a digest of free settings."""
    free = {name: settings[name] for name in ("extra_args", "env") if settings[name]}
    return f"{version} {settings['device']} {settings['dtype'] or 'auto'}" + (f"+{digest(free)[:8]}" if free else "")
