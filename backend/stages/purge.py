"""purge: hidden-state stores of other plans make room for this one's.

Severity 3, the only stage that loses data. It plans stores under `[store] root` that carry our marker and another
identity and that no unfinished run refers to; never the plan's own. Consent is the plan's sha, which binds to content;
what is deleted is the plan that was consented to, not a fresh look. A purge is a rename to trash first: undo for 15
minutes, then the bytes go. Where the disk holds the new store beside the old ones, the purge is optional: without
consent the old ones stay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from backend.errors import Refused
from backend.report import Check
from backend.runs import allow
from backend.runs.audit import AuditLog
from backend.runs.deletion import UNDO_WINDOW_S, DeletePlan, apply_delete, plan_delete
from backend.runs.marker import read_marker
from backend.runs.target import TRASH_PREFIX
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.disk import volumes
from backend.stages.extract import identity_of, store_path
from backend.stages.figures import GB
from backend.stages.references import stores_in_use
from backend.store.format import STORE_KIND


class Purge(Stage):
    """Older stores of ours, into trash."""

    name: ClassVar[str] = "purge"
    severity: ClassVar[Severity] = 3
    serves: ClassVar[tuple[str, ...]] = ("extract",)

    def plan(self, ctx: StageContext) -> StagePlan:
        """Each store that would go, with bytes, files, age and the sha that consent must name."""
        found = stores(ctx)
        if "merge" not in ctx.products:
            return StagePlan(lines=(f"decided after merge; {len(found)} stores of ours are there now",))
        plans, refusals = deletions(ctx)
        return StagePlan(
            lines=(*(describe(plan) for plan in plans), *refusals, *kept(ctx)) or ("no older store",),
            effects=tuple(f"deletes {plan.path} ({plan.bytes / GB:,.2f} GB)" for plan in plans),
            numbers={"gb": round(sum(plan.bytes for plan in plans) / GB, 3)},
            destructive=tuple({**plan.as_json(), "path": str(plan.path), "phrase": plan.phrase} for plan in plans),
            optional=fits(ctx),
        )

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Rename each store of the consented plans to trash; refuses one that changed since it was shown."""
        assert ctx.attempt is not None
        allowed, audit = allow.load(ctx.home.allow), AuditLog(ctx.home.audit)
        who, moved = f"pipeline {ctx.attempt.parents[3].name}", []
        for item in ctx.consented:
            plan = DeletePlan.from_json(item)
            used = _used(ctx).get(str(plan.path), [])
            trashed = apply_delete(
                plan, str(item["sha"]), allowed, references=used, audit=audit, who=who, frozen_at=ctx.frozen_at
            )
            ctx.reporter.note(
                f"{plan.path} is in trash; undo within {UNDO_WINDOW_S / 60:.0f} min: eagle3-console undo {plan.sha}"
            )
            moved.append({"path": str(plan.path), "trash": str(trashed.path), "bytes": plan.bytes, "sha": plan.sha})
        return {"purged": moved}

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """The planned trees are gone, nothing else is."""
        return [
            Check("purged", not Path(item["path"]).exists(), f"{item['path']} → {item['trash']}")
            for item in outputs["purged"]
        ]


def describe(plan: DeletePlan) -> str:
    """One line of facts for the person who consents."""
    newest = datetime.fromtimestamp(plan.newest_mtime_ns / 1e9, UTC).isoformat(timespec="seconds")
    return f"{plan.path}: {plan.bytes / GB:,.2f} GB in {plan.files:,} files, newest {newest}, sha {plan.sha}"


def stores(ctx: StageContext) -> list[Path]:
    """Folders under the store root that carry our marker of a store; trash carries it too, and is deleted already."""
    root = ctx.path(ctx.config.store.root)
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return [folder for folder in folders if not folder.name.startswith(TRASH_PREFIX) and _is_store(folder)]


def _is_store(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return read_marker(fd, str(folder)).kind == STORE_KIND
    except Refused:
        return False
    finally:
        os.close(fd)


def deletions(ctx: StageContext) -> tuple[list[DeletePlan], list[str]]:
    """What would be deleted (ours, of another identity, and not in use), and a line for each that is refused.

    Until merge has told this plan's own identity, its store counts as one of the others.
    """
    plans: list[DeletePlan] = []
    refusals: list[str] = []
    root, used = ctx.path(ctx.config.store.root), _used(ctx)
    for folder in _others(ctx):
        if str(folder) in used:
            continue
        try:
            allowed = allow.load(ctx.home.allow)
            plans.append(plan_delete(root, folder.name, allowed, references=(), kind=STORE_KIND))
        except Refused as refused:
            refusals.append(f"cannot be deleted: {folder}: {refused.what}" + (refused.fix and f"; fix: {refused.fix}"))
    return plans, refusals


def _others(ctx: StageContext) -> list[Path]:
    own = store_path(ctx, identity_of(ctx)) if "merge" in ctx.products else None
    return [folder for folder in stores(ctx) if folder != own]


def _used(ctx: StageContext) -> dict[str, list[str]]:
    """Stores that other pipelines need; what this one made from other data before, it will not open again."""
    return stores_in_use(ctx.home, beside=ctx.pipeline)


def kept(ctx: StageContext) -> tuple[str, ...]:
    """One line for each older store that an unfinished run keeps from being purged."""
    used = _used(ctx)
    advice = "finish that run, or remove its pipeline's folder"
    return tuple(
        f"kept {folder}: {used[str(folder)][0]} has not finished with it; {advice}"
        for folder in _others(ctx)
        if str(folder) in used
    )


def fits(ctx: StageContext) -> bool:
    """True if the new store fits beside the old ones, what is in trash not counted as one of them."""
    volume = volumes(ctx)[0]
    return volume.fits(volume.trash)
