"""train: the draft, from the store. Frees the GPUs first: our own extraction server is stopped, as the plan says.

Severity 1: writes a folder named by its fingerprint under `[train] out` (checkpoints, exports, TensorBoard events). A
killed run resumes from its newest complete checkpoint, with the same batches.
"""

from __future__ import annotations

import hashlib
import math
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from backend.data.merged import SPLITS, Split, read_split
from backend.eagle3.accept import estimate_accept
from backend.eagle3.export import WEIGHTS, check_export, load_draft
from backend.eagle3.records import RecordTokens, StoreSource
from backend.eagle3.settings import TrainSettings
from backend.eagle3.target import TargetCheckpoint
from backend.eagle3.trainer import train
from backend.errors import Exit, OperatorError
from backend.report import Check
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.figures import BYTES_PER_PARAMETER, GB, target_figures, token_figures
from backend.stages.handover import fingerprint_of
from backend.stages.server import layers_of
from backend.store.reader import Store


class Train(Stage):
    """Store → trained draft in SGLang's format, and an untrained one for comparison."""

    name: ClassVar[str] = "train"
    severity: ClassVar[Severity] = 1
    needs: ClassVar[tuple[str, ...]] = ("merge", "extract")
    identity: ClassVar[tuple[str, ...]] = ("draft_sha",)
    mode: ClassVar[str] = "free"

    def material(self, ctx: StageContext) -> dict[str, Any]:
        """Every setting that changes the weights."""
        pace = {"checkpoint_every_s", "eval_every_s", "expected_tokens_s", "out"}
        return ctx.config.train.model_dump(exclude=pace) | {"device": ctx.config.host.device}

    def plan(self, ctx: StageContext) -> StagePlan:
        """Tokens, time, memory of the optimizer, and what stands in the way."""
        settings = ctx.config.train
        figures, tokens = target_figures(ctx), token_figures(ctx)
        parameters = figures.draft_parameters(settings.draft_vocab_size)
        lines = [
            f"{parameters / 1e6:,.1f} M trainable parameters, TTT {settings.ttt_steps}, draft vocabulary "
            f"{settings.draft_vocab_size:,}; weights, gradients and optimizer {16 * parameters / GB:,.1f} GB",
            "stops our extraction server first, and takes the GPUs",
        ]
        numbers: dict[str, float | int | str] = {
            "parameters": parameters,
            "checkpoint_gb": round(BYTES_PER_PARAMETER * parameters / GB, 2),
        }
        if settings.max_seconds:
            lines.append(f"{settings.max_seconds:,.0f} s of training")
            numbers["hours"] = round(settings.max_seconds / 3600, 2)
        elif settings.expected_tokens_s:
            hours = settings.epochs * tokens.tokens / settings.expected_tokens_s / 3600
            lines.append(
                f"about {hours:,.1f} h for {settings.epochs} epochs at an assumed "
                f"{settings.expected_tokens_s:,.0f} tokens/s"
            )
            numbers |= {"hours": round(hours, 2), "gpu_hours": round(hours * ctx.config.host.gpus, 1)}
        return StagePlan(tuple(lines), (f"writes a new folder under {ctx.path(settings.out)}",), numbers)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Train, or go on training from the newest checkpoint; see backend.eagle3.trainer for errors."""
        out = ctx.path(ctx.config.train.out) / fingerprint_of(ctx)[:12]
        target = TargetCheckpoint(ctx.path(ctx.config.target.model))
        asked = StopFlag()
        with Store.open(Path(ctx.product("extract").outputs["store"])) as store:
            data = {split: StoreSource(store, records_of(ctx, split)) for split in SPLITS}
            result = train(
                settings_of(ctx), data["train"], data["validation"], target, out, ctx.reporter, stop=asked.is_set
            )
            if result.draft_dir is None:
                raise OperatorError(
                    f"training was stopped at step {result.steps:,}",
                    fix="run again: it goes on from the checkpoint that was just written",
                    reason="stopped",
                    code=Exit.TERMINATED,
                )
            walks = {
                name: held_out(folder, target, data["heldout"], ctx)
                for name, folder in (("trained", result.draft_dir), ("untrained", result.untrained_dir))
            }
        return {
            "folder": str(out),
            "draft": str(result.draft_dir),
            "untrained": str(result.untrained_dir),
            "draft_sha": hashlib.sha256((result.draft_dir / WEIGHTS).read_bytes()).hexdigest(),
            "steps": result.steps,
            "epochs": result.epochs_done,
            "tokens_s": round(result.tokens_s, 1),
            "train_seconds": round(result.seconds, 1),
            "loss_first": result.loss_first,
            "loss_last": result.loss_last,
            "heldout": walks,
        }

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """Both exports open with exactly the expected names and shapes, and the loss is a number."""
        target = TargetCheckpoint(ctx.path(ctx.config.target.model))
        finite = math.isfinite(outputs["loss_last"])
        checks = [Check("loss", finite, f"{outputs['loss_first']:.4f} → {outputs['loss_last']:.4f}")]
        for kind in ("draft", "untrained"):
            folder = Path(outputs[kind])
            if not folder.is_dir():
                return [Check(f"{kind} export", False, f"{folder} is gone")]
            checks += [replace(check, name=f"{kind}: {check.name}") for check in check_export(folder, target)]
        return checks


class StopFlag:
    """SIGTERM asks the trainer to write a checkpoint and return, instead of unwinding the process."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def is_set(self) -> bool:
        """True once a stop was asked for."""
        return self._asked

    def _ask(self, signum: int, frame: object) -> None:
        self._asked = True


def settings_of(ctx: StageContext) -> TrainSettings:
    """The config's training section in the trainer's own words."""
    own = ctx.config.train.model_dump(exclude={"out", "expected_tokens_s"})
    return TrainSettings(**own, layers=layers_of(ctx), device=ctx.config.host.device)


def records_of(ctx: StageContext, split: Split) -> list[RecordTokens]:
    """Merged records of one split in the trainer's form."""
    folder = Path(ctx.product("merge").outputs["folder"])
    return [RecordTokens(r.id, r.source, torch.tensor(r.input_ids), r.spans) for r in read_split(folder, split)]


def held_out(folder: Path, target: TargetCheckpoint, source: StoreSource, ctx: StageContext) -> dict[str, float]:
    """The serving walk of an exported draft on held-out records, with the chain length that will be served."""
    device = torch.device(ctx.config.host.device)
    draft = load_draft(folder).to(device)
    frozen = target.frozen().to(device, torch.float32)
    steps, batch = ctx.config.deploy.spec_steps, ctx.config.train.batch_tokens
    estimate, _ = estimate_accept(draft, frozen, source, steps=steps, batch_tokens=batch, device=device)
    walk = estimate.walk
    return {
        "accept_length": walk.accept_length,
        "low": walk.low,
        "high": walk.high,
        "anchor_mean": estimate.anchor_mean,
        "tokens": walk.tokens,
    }
