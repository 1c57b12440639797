"""deploy: the target served with the new draft, proven live: gate again, then real speculation on real output.

Severity 2: takes the port and the GPUs, and stays (`[deploy] keep`). A draft whose names are all wrong starts healthy
and accepts nothing, so health proves nothing here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from backend.data.merged import read_split
from backend.engine.client import SGLangClient
from backend.engine.gate import prove_speculative
from backend.errors import OperatorError
from backend.stages.base import Service, Severity, StageContext, StagePlan
from backend.stages.gate import judge
from backend.stages.server import ServerRecord, facts, required_server, show, start_server

PROOF_PROMPTS = 2


class Deploy(Service):
    """The speculative server."""

    name: ClassVar[str] = "deploy"
    severity: ClassVar[Severity] = 2
    needs: ClassVar[tuple[str, ...]] = ("merge", "train")
    serves: ClassVar[tuple[str, ...]] = ("bench",)
    mode: ClassVar[str] = "serve+draft"

    def plan(self, ctx: StageContext) -> StagePlan:
        """The exact command, with the draft where it is known."""
        deploy, server = ctx.config.deploy, ctx.config.server
        trained = ctx.products.get("train")
        draft = Path(str(trained.outputs["draft"])) if trained else Path("<the draft that train makes>")
        after = "stays running" if deploy.keep else "is stopped after bench"
        lines = (
            f"{deploy.spec_steps} steps, top-k {deploy.spec_topk}, {deploy.spec_draft_tokens} draft tokens",
            f"the server {after}",
            f"loading is expected to take {server.expected_load_s:,.0f} s",
        )
        effects = (f"starts a speculative server on port {server.port}",)
        return StagePlan(lines, effects, {"keep": int(deploy.keep)}, show(ctx, "serve+draft", draft))

    def start(self, ctx: StageContext, attempt: Path) -> None:
        """Start it; see `start_server` for errors."""
        start_server(ctx, attempt, "serve+draft", Path(str(ctx.product("train").outputs["draft"])))

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Prove it.

        Raises:
            OperatorError: code 7 from the gate; `no_speculation` when no draft token is ever verified.
        """
        verdict = judge(ctx, canary=False)
        record = ServerRecord.read(required_server(ctx))
        folder = Path(str(ctx.product("merge").outputs["folder"]))
        prompts = [
            list(r.prompt_ids) for r, _ in zip(read_split(folder, "heldout"), range(PROOF_PROMPTS), strict=False)
        ]
        with SGLangClient(record.url) as client:
            check = prove_speculative(client, prompts)
        ctx.reporter.check(check)
        if check.ok is False:
            raise OperatorError(f"the draft is not used: {check.evidence}", fix=check.fix, reason="no_speculation")
        return {**facts(required_server(ctx)), "verdict": verdict.as_json(), "speculation": check.as_json()}
