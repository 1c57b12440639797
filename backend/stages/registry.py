"""The stages, in order. A new stage is one module and one line here."""

from __future__ import annotations

from backend.errors import UsageError
from backend.stages.base import Stage
from backend.stages.bench import Bench
from backend.stages.deploy import Deploy
from backend.stages.extract import Extract
from backend.stages.gate import Gate
from backend.stages.launch import LaunchServer
from backend.stages.merge import Merge
from backend.stages.patch import Patch
from backend.stages.preflight import Preflight
from backend.stages.purge import Purge
from backend.stages.stop import StopOldServer
from backend.stages.train import Train

STAGES: tuple[Stage, ...] = (
    Preflight(),
    Merge(),
    Purge(),
    Patch(),
    StopOldServer(),
    LaunchServer(),
    Gate(),
    Extract(),
    Train(),
    Deploy(),
    Bench(),
)


def stage_names() -> list[str]:
    """Names in order."""
    return [stage.name for stage in STAGES]


def stage_named(name: str) -> Stage:
    """The stage of that name.

    Raises:
        UsageError: there is none.
    """
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise UsageError(f"there is no stage {name!r}", fix=f"stages, in order: {', '.join(stage_names())}")
