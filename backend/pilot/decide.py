"""What must run, and why: fingerprints against history, needs against products, the selection against both.

One function answers for `plan`, for the running pilot and for `explain`, so that the three never disagree. It looks
(files, verification of earlier outputs), it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from backend.errors import OperatorError, UsageError
from backend.pilot.history import History
from backend.runs.fingerprint import digest
from backend.stages.base import Product, Stage, StageContext
from backend.stages.registry import STAGES, stage_names

Action = Literal["run", "skip", "not_needed", "outside"]


@dataclass(frozen=True)
class Selection:
    """Which stages the operator asked for: `from`/`to` as a range, or `only` these."""

    first: str | None = None
    last: str | None = None
    only: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Selection:
        """Read the wire form ``{"from": …, "to": …, "only": […]}``.

        Raises:
            UsageError: a stage that does not exist, or a range that runs backwards.
        """
        selection = cls(data.get("from"), data.get("to"), tuple(data.get("only") or ()))
        names = stage_names()
        for name in (selection.first, selection.last, *selection.only):
            if name is not None and name not in names:
                raise UsageError(f"there is no stage {name!r}", fix=f"stages, in order: {', '.join(names)}")
        if selection.first and selection.last and names.index(selection.first) > names.index(selection.last):
            raise UsageError(
                f"--from {selection.first} comes after --to {selection.last}", fix=f"the order is {', '.join(names)}"
            )
        return selection

    def holds(self, name: str) -> bool:
        """True if the operator wants this stage looked at."""
        if self.only:
            return name in self.only
        names = stage_names()
        low = names.index(self.first) if self.first else 0
        high = names.index(self.last) if self.last else len(names) - 1
        return low <= names.index(name) <= high

    def as_json(self) -> dict[str, Any]:
        """The wire form, inverse of `from_json`."""
        return {"from": self.first, "to": self.last, "only": list(self.only)}


@dataclass(frozen=True)
class Decision:
    """What happens with one stage. `material` and `fingerprint` are set where all its inputs are known already."""

    stage: str
    action: Action
    why: str
    material: dict[str, Any] | None = None
    fingerprint: str | None = None
    product: Product | None = None


def decide(ctx: StageContext, selection: Selection, history: History) -> list[Decision]:
    """Decide for every stage, in order, as things stand now.

    Raises:
        UsageError: the selection leaves out a stage whose result is needed and does not exist.
    """
    products: dict[str, Product] = {}
    decisions: dict[str, Decision] = {}
    for stage in STAGES:
        if not stage.serves:
            decision = _decide_product(stage, replace(ctx, products=products), history, decisions)
            if decision.product is not None:
                products[stage.name] = decision.product
            elif not selection.holds(stage.name):
                decision = replace(decision, action="outside", why="outside --from/--to/--only")
            decisions[stage.name] = decision
    for stage in STAGES:
        if stage.serves:
            decisions[stage.name] = _decide_support(stage, selection, decisions)
    _refuse_holes(selection, decisions)
    return [decisions[stage.name] for stage in STAGES]


def material_of(stage: Stage, ctx: StageContext) -> dict[str, Any]:
    """The full material of a stage: its own, and the identity of each upstream product."""
    upstream = {name: dict(ctx.product(name).identity) for name in stage.needs}
    return {"stage": stage.name, "own": stage.material(ctx), "upstream": upstream}


def _decide_product(stage: Stage, ctx: StageContext, history: History, decisions: dict[str, Decision]) -> Decision:
    waiting = [name for name in stage.needs if name not in ctx.products]
    if waiting:
        return Decision(stage.name, "run", f"{' and '.join(waiting)} must run first")
    try:
        material = material_of(stage, ctx)
    except OperatorError as error:
        return Decision(stage.name, "run", f"its inputs cannot be read yet: {error.what}")
    sha = digest(material)
    product, doubt = history.verified(stage, ctx, sha)
    if product is not None:
        return Decision(
            stage.name, "skip", f"done before, outputs verified ({history.label(product)})", material, sha, product
        )
    return Decision(stage.name, "run", doubt or history.why_changed(stage.name, material), material, sha)


def _decide_support(stage: Stage, selection: Selection, decisions: dict[str, Decision]) -> Decision:
    if not selection.holds(stage.name):
        return Decision(stage.name, "outside", "outside --from/--to/--only")
    waiting = [name for name in stage.serves if decisions[name].product is None]
    if waiting:
        return Decision(stage.name, "run", f"needed for {', '.join(waiting)}")
    if stage.name in selection.only and stage.kind == "service":
        return Decision(stage.name, "run", "asked for by --only")
    return Decision(stage.name, "not_needed", f"nothing needs it: {', '.join(stage.serves)} done")


def _refuse_holes(selection: Selection, decisions: dict[str, Decision]) -> None:
    """A selected stage whose inputs are neither made before nor selected can only fail: say so first."""
    for stage in STAGES:
        if decisions[stage.name].action != "run":
            continue
        for need in stage.needs:
            if decisions[need].action == "outside":
                raise UsageError(
                    f"stage {stage.name} needs the result of {need}, which does not exist for this config",
                    fix=f"run with --from {need}, or without --from/--to/--only",
                    reason="missing_input",
                )
