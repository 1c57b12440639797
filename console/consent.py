"""Consent: which steps of a plan need agreement, what agrees to them, and how to ask for it on a terminal.

Severity 1 is answered by `--yes` or y; 2 by `--allow NAME` or the typed name; 3 only by `--allow purge=<plan sha>`,
never by a key. The host checks all of it again (the pilot refuses what is not in its frozen plan): this module exists
so that an operator learns it before anything has started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.errors import Refused, UsageError

ACTING = "run"


@dataclass(frozen=True)
class Need:
    """One step that somebody has to agree to. `flags` do it on the command line, all of them: `--allow stop`.

    Without agreement to an `optional` one the pipeline goes on and leaves that step out.
    """

    stage: str
    severity: int
    flags: tuple[str, ...]
    effects: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Consent:
    """What was agreed to, as it is frozen into the plan on the host."""

    yes: bool
    allow: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The form that `start` takes."""
        return {"yes": self.yes, "allow": list(self.allow)}

    def covers(self, need: Need) -> bool:
        """Whether `need` is agreed to. `--allow stop=…` does not stand for `--allow stop`, nor the other way round."""
        if need.severity == 1 and need.stage in self.allow:
            return True
        return all(self.yes if flag == "--yes" else _value(flag) in self.allow for flag in need.flags)


def needs(plan: Mapping[str, Any]) -> list[Need]:
    """Every step of the plan that would act and has effects to agree to."""
    found = []
    for stage in plan["stages"]:
        asked = stage.get("consent")
        if asked and stage["action"] == ACTING and asked["severity"] > 0:
            flags = tuple(str(flag) for flag in asked["flags"])
            effects = tuple(str(effect) for effect in stage.get("effects") or ())
            found.append(Need(stage["name"], int(asked["severity"]), flags, effects, bool(asked.get("optional"))))
    return found


def check_names(plan: Mapping[str, Any], allow: Sequence[str]) -> None:
    """A mistyped `--allow` must not look like consent that was not needed.

    Raises:
        UsageError: a name that is no stage of the plan.
    """
    known = [str(stage["name"]) for stage in plan["stages"]]
    for item in allow:
        if item.partition("=")[0] not in known:
            raise UsageError(f"--allow {item}: there is no stage of that name", fix=f"one of: {', '.join(known)}")


def missing(plan: Mapping[str, Any], consent: Consent) -> list[Need]:
    """What is not agreed to yet, and without which the pipeline cannot start."""
    return [need for need in needs(plan) if not need.optional and not consent.covers(need)]


def refusal(lacking: Sequence[Need]) -> Refused:
    """The error of a run that may not start, with the exact flags to add."""
    listed = "\n".join(f"{need.stage} (severity {need.severity}) needs {' '.join(need.flags)}" for need in lacking)
    return Refused(
        f"confirmation needed, nothing was started\n{listed}",
        fix=f"add {' '.join(flags(lacking))}",
        reason="needs_confirmation",
    )


def flags(lacking: Sequence[Need]) -> list[str]:
    """The flags that agree to all of `lacking`, each once."""
    return list(dict.fromkeys(flag for need in lacking for flag in need.flags))


def _value(flag: str) -> str:
    """`stop` of `--allow stop`."""
    return flag.removeprefix("--allow ")


def ask(lacking: Sequence[Need], given: Consent, read: Callable[[str], str], say: Callable[[str], None]) -> Consent:
    """Ask for what is missing. Anything but the exact answer is a no.

    Raises:
        Refused: the operator said no, or a step loses data and cannot be agreed to with a key.
    """
    yes, allow = given.yes, list(given.allow)
    if final := [need for need in lacking if need.severity >= 3]:
        raise refusal(final)
    for need in lacking:
        if Consent(yes, tuple(allow)).covers(need):
            continue
        for effect in need.effects or (need.stage,):
            say(f"  - {effect}")
        if need.severity == 1:
            agreed = read(f"{need.stage}: go on with all reversible steps? [y/N] ").strip().lower() in ("y", "yes")
            yes = yes or agreed
        else:
            agreed = read(f"{need.stage} is costly to undo; type its name to agree: ").strip() == need.stage
            if agreed:
                allow += [_value(flag) for flag in need.flags]
        if not agreed:
            raise refusal([need])
    return Consent(yes, tuple(allow))
