"""merge: the configured sources become one set of token records with loss spans, split and counted.

Severity 1: writes a new folder named by its fingerprint under `[data] out`; an older merge stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from backend.data.merge import MergeSettings, merge
from backend.data.merged import data_digest, verify_merged
from backend.data.sources import Source, SourceSpec
from backend.report import Check
from backend.runs.fingerprint import ContentHashes
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.figures import GB, chat_hashes, token_figures
from backend.stages.handover import fingerprint_of


class Merge(Stage):
    """Sources → train, validation and held-out records."""

    name: ClassVar[str] = "merge"
    severity: ClassVar[Severity] = 1
    identity: ClassVar[tuple[str, ...]] = ("digest",)

    def material(self, ctx: StageContext) -> dict[str, Any]:
        """Content of every source file, settings, tokenizer and template."""
        data, hashes = ctx.config.data, ContentHashes(ctx.home.hashes)
        sources = [
            source.model_dump(exclude={"paths"}) | {"files": [hashes.sha256(path) for path in Source(spec).files]}
            for source, spec in zip(data.sources, specs(ctx), strict=True)
        ]
        hashes.save()
        return {
            "sources": sources,
            "settings": data.model_dump(
                include={"max_tokens", "overlength", "heldout_share", "validation_share", "seed"}
            ),
            "chat": chat_hashes(ctx),
        }

    def plan(self, ctx: StageContext) -> StagePlan:
        """Sources and their bytes."""
        tokens = token_figures(ctx)
        names = ", ".join(source.name for source in ctx.config.data.sources)
        lines = (f"{len(ctx.config.data.sources)} sources: {names}", f"{tokens.tokens:,} tokens {tokens.source}")
        numbers = {"tokens": tokens.tokens, "gb": round(tokens.tokens * 8 / GB, 3)}
        return StagePlan(lines, (f"writes a new folder under {ctx.path(ctx.config.data.out)}",), numbers)

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Read, normalise, dedup, tokenise, split; see backend.data.merge for errors."""
        data = ctx.config.data
        out = ctx.path(data.out) / fingerprint_of(ctx)[:12]
        settings = MergeSettings(
            model=ctx.path(ctx.config.target.model),
            trust_remote_code=ctx.config.target.trust_remote_code,
            max_tokens=data.max_tokens,
            overlength=data.overlength,
            heldout_share=data.heldout_share,
            validation_share=data.validation_share,
            seed=data.seed,
        )
        report = merge(specs(ctx), settings, out, ctx.reporter)
        return {
            "folder": str(out),
            "digest": data_digest(out),
            **asdict(report.totals),
            "sources": [
                {
                    "name": source.name,
                    "read": source.read,
                    "kept": source.kept,
                    "dropped": source.dropped,
                    "tokens": sum(totals.tokens for totals in source.written.values()),
                    "supervised": sum(totals.supervised for totals in source.written.values()),
                }
                for source in report.sources
            ],
            "splits": {name: split.totals.records for name, split in report.splits.items()},
        }

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """Counts add up, ids are unique, spans lie within their records, and enough is held out."""
        folder = Path(outputs["folder"])
        if not folder.is_dir():
            return [Check("merged data", False, f"{folder} is gone")]
        return [*verify_merged(folder), _heldout(ctx, int(outputs["splits"]["heldout"]))]


def _heldout(ctx: StageContext, there: int) -> Check:
    """Enough held-out prompts for train's evaluation and bench, which otherwise would fail hours later."""
    wanted = ctx.config.bench.prompts
    fix = (
        f"raise [data] heldout_share ({ctx.config.data.heldout_share}), set on_policy = true for sources that the "
        "target answered itself (only those are held out), or lower [bench] prompts"
    )
    return Check("held-out prompts", there >= wanted, f"{there} held out, [bench] prompts wants {wanted}", fix=fix)


def specs(ctx: StageContext) -> list[SourceSpec]:
    """The configured sources with absolute paths."""
    return [
        SourceSpec(
            name=source.name,
            paths=tuple(str(ctx.path(path)) for path in source.paths),
            format=source.format,
            on_policy=source.on_policy,
            max_records=source.max_records,
            max_bad=source.max_bad,
        )
        for source in ctx.config.data.sources
    ]
