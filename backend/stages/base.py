"""The interface of a stage: plan → run → verify, and what the stages hand to each other.

A stage is one module with one class and one line in `registry.py`. Its *material* is what its result depends on; the
fingerprint of material and upstream products decides whether an earlier result may be used again. Stages without
material (preflight, purge, stop …) keep no memory: they look at the host each time. Knows nothing of processes or
events: the pilot runs stages, `__main__` is the process around one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from backend.config import Config
from backend.report import Check, Reporter
from backend.runs.layout import Home

Kind = Literal["task", "service"]
Severity = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Product:
    """The verified result of a stage. `attempt` is the directory that holds its `outputs.json`.

    `identity` is what downstream fingerprints depend on: what came out, not how long it took or where it stands.
    """

    stage: str
    fingerprint: str
    outputs: Mapping[str, Any]
    identity: Mapping[str, Any]
    attempt: Path


@dataclass(frozen=True)
class StageContext:
    """What a stage may know: the config, the interpreter, where state lives, and the products of earlier stages."""

    config: Config
    python: str
    home: Home
    products: Mapping[str, Product]
    reporter: Reporter
    attempt: Path | None = None
    server: Path | None = None
    pipeline: Path | None = None
    """Folder of the pipeline that this belongs to, or that the same wish would resume."""
    consented: tuple[Mapping[str, Any], ...] = ()
    """The destructive plans that the operator's consent named, exactly as they were shown."""
    frozen_at: float | None = None
    """When that consent was given, epoch seconds; it holds for 24 h."""

    def path(self, relative: str) -> Path:
        """A configured path: absolute as given, else under `[host] work`."""
        return Path(self.config.host.work) / Path(relative).expanduser()

    def product(self, stage: str) -> Product:
        """The product of an upstream stage; the pilot never starts a stage without what it needs."""
        return self.products[stage]


@dataclass(frozen=True)
class Launch:
    """A server start as `plan` shows it: the exact command, its environment, and what is left to the engine."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    defaults: tuple[str, ...]


@dataclass(frozen=True)
class StagePlan:
    """What a stage would do. No `effects` = nothing on the host changes: severity 0, skipped as nothing to do."""

    lines: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    numbers: Mapping[str, float | int | str] = field(default_factory=dict)
    launch: Launch | None = None
    destructive: tuple[Mapping[str, Any], ...] = ()
    optional: bool = False
    """True where the pipeline may go on without it (a purge that the disk does not need)."""


class Stage(ABC):
    """One step of the pipeline."""

    name: ClassVar[str]
    severity: ClassVar[Severity]
    kind: ClassVar[Kind] = "task"
    needs: ClassVar[tuple[str, ...]] = ()
    """Stages whose products this one reads."""
    serves: ClassVar[tuple[str, ...]] = ()
    """Run only while one of these is unfinished; empty = the product itself is wanted."""
    identity: ClassVar[tuple[str, ...]] = ()
    """Keys of its outputs that say what was made: made again equal, nothing downstream is made again."""
    mode: ClassVar[str | None] = None
    """Server mode that must be up ("extract", "serve+draft"), "free" = no server of ours, None = either."""

    def material(self, ctx: StageContext) -> dict[str, Any] | None:
        """What the result depends on, beside upstream products; None for stages without memory."""
        return None

    @abstractmethod
    def plan(self, ctx: StageContext) -> StagePlan:
        """What `run` would do now, with numbers. Changes nothing."""

    @abstractmethod
    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Do it; the returned outputs are JSON. Raises OperatorError with everything done so far intact.

        A service's `run` is the proof of the server that stands at `ctx.server`.
        """

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """Look again at what `run` left, believing nothing it said."""
        return []


class Service(Stage):
    """A stage whose attempt is a server: `start` leaves it running, `run` proves it."""

    kind: ClassVar[Kind] = "service"

    @abstractmethod
    def start(self, ctx: StageContext, attempt: Path) -> None:
        """Start the supervised server in a fresh attempt directory. Raises OperatorError: port or GPUs are taken."""
