"""Consent: what an operator has agreed to, and what is still missing, said as the flag that would give it.

Severity 1 is answered by `--yes` (or by name), 2 by name only, 3 by `purge=<plan sha>`, which binds the consent to the
content that was shown: another tree, another sha. There is no answer that allows everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backend.errors import Refused
from backend.stages.base import Stage, StagePlan


@dataclass(frozen=True)
class Consent:
    """The operator's answers, frozen into the pipeline's plan."""

    yes: bool = False
    allow: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Consent:
        """Read the wire form ``{"yes": …, "allow": […]}``."""
        return cls(bool(data.get("yes")), frozenset(data.get("allow") or ()))

    def missing(self, stage: Stage, plan: StagePlan) -> list[str]:
        """The flags that are still needed before `stage` may do what `plan` says; empty = go."""
        if not plan.effects:
            return []
        if stage.severity == 3:
            wanted = [f"{stage.name}={item['sha']}" for item in plan.destructive]
        elif stage.severity == 2:
            wanted = [stage.name]
        else:
            return [] if self.yes or stage.name in self.allow else ["--yes"]
        return [f"--allow {name}" for name in wanted if name not in self.allow]

    def require(self, stage: Stage, plan: StagePlan) -> None:
        """Stop before anything is changed.

        Raises:
            Refused: naming the effects and the flags that would allow them (exit code 4).
        """
        flags = self.missing(stage, plan)
        if flags:
            raise Refused(
                f"stage {stage.name} needs your consent: {'; '.join(plan.effects)}",
                fix=f"look at `eagle3-console plan`, then add {' '.join(flags)}",
                reason="needs_confirmation",
            )


def effective_severity(stage: Stage, plan: StagePlan) -> int:
    """Severity of what would really happen: a plan without effects has none."""
    return stage.severity if plan.effects else 0
