"""Disk space: what a run still has to write, on which file system, and whether it fits.

Store, checkpoints and merged data may stand on different disks; each file system is judged once, with all that goes
there and the reserve that is never used. Counts what this plan has written already. Knows what trash will give back,
but not what may be purged: that is purge's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backend.agent import host
from backend.agent.host import DiskSpace
from backend.runs.audit import AuditLog
from backend.runs.deletion import pending_trash
from backend.stages.base import StageContext
from backend.stages.extract import identity_of, store_path
from backend.stages.figures import FEW_FILES, GB, Budget, disk_budget, reserve_of
from backend.store.folder import shard_files


@dataclass(frozen=True)
class Volume:
    """One file system and what will be written to it: bytes by the name of the part."""

    dev: int
    space: DiskSpace
    parts: dict[str, int]
    reserve: int
    inodes: int
    trash: int
    """Bytes that come back when the undo window of our trash there is over."""

    @property
    def needed(self) -> int:
        """Bytes still to be written there."""
        return sum(self.parts.values())

    def fits(self, freed: int = 0) -> bool:
        """True if it all fits beside the reserve once `freed` bytes more are free."""
        return self.needed == 0 or self.needed <= self.space.free + freed - self.reserve

    def describe(self) -> str:
        """The sum in words."""
        return " + ".join(f"{name} {size / GB:,.2f}" for name, size in self.parts.items())


def budget(ctx: StageContext) -> Budget:
    """What the run has to write, less what stands in this plan's own store already."""
    return disk_budget(ctx, have=own_bytes(ctx))


def own_bytes(ctx: StageContext) -> int:
    """Bytes in the store that this plan would go on filling; 0 until merge has told which one that is."""
    if "merge" not in ctx.products:
        return 0
    root = store_path(ctx, identity_of(ctx))
    return sum(shard.size for shard in shard_files(root).values()) if root.is_dir() else 0


def volumes(ctx: StageContext) -> list[Volume]:
    """The file systems that will be written to, the store's first."""
    plan, trashed = budget(ctx), pending_trash(AuditLog(ctx.home.audit))
    places = {"store": ctx.config.store.root, "checkpoints": ctx.config.train.out, "data": ctx.config.data.out}
    found: dict[int, Volume] = {}
    for name, place in places.items():
        space = host.disk_space(ctx.path(place))
        dev = host.nearest_existing(ctx.path(place)).stat().st_dev
        part = {name: plan.parts[name]}
        if dev in found:
            found[dev] = replace(found[dev], parts=found[dev].parts | part)
            continue
        inodes = plan.inodes if name == "store" else FEW_FILES
        trash = sum(item.plan.disk_bytes for item in trashed if item.plan.dev == dev)
        found[dev] = Volume(dev, space, part, reserve_of(ctx, space), inodes, trash)
    return list(found.values())
