"""launch: the SGLang server in extraction mode, detached and supervised. Severity 1.

A service: its attempt lives as long as the server. That it can be believed is the next stage's proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from backend.report import Check
from backend.stages.base import Service, Severity, StageContext, StagePlan
from backend.stages.figures import GB, target_figures
from backend.stages.server import (
    check_process,
    facts,
    layers_of,
    require_alive,
    required_server,
    show,
    start_server,
)


class LaunchServer(Service):
    """The extraction server."""

    name: ClassVar[str] = "launch"
    severity: ClassVar[Severity] = 1
    serves: ClassVar[tuple[str, ...]] = ("extract",)
    mode: ClassVar[str] = "extract"

    def plan(self, ctx: StageContext) -> StagePlan:
        """The exact command and environment, and what loading costs."""
        figures, server = target_figures(ctx), ctx.config.server
        weights = (
            f"{figures.weight_bytes / GB:,.1f} GB of weights" if figures.weight_bytes else "weights of unknown size"
        )
        lines = (
            f"captures the inputs of layers {list(layers_of(ctx))} and the last hidden state (post-norm)",
            f"{weights} ({figures.source}); loading is expected to take {server.expected_load_s:,.0f} s",
        )
        return StagePlan(lines, (f"starts a server on port {server.port}",), {"tp": server.tp}, show(ctx, "extract"))

    def start(self, ctx: StageContext, attempt: Path) -> None:
        """Start it; see `start_server` for errors."""
        start_server(ctx, attempt, "extract")

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Where the server is; the proof that it can be believed is the gate's.

        Raises:
            OperatorError: code 7, it has ended already.
        """
        server = required_server(ctx)
        require_alive(server)
        return facts(server)

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """Our process is alive, detached from whoever started it, with the environment and the command asked for."""
        return check_process(required_server(ctx))
