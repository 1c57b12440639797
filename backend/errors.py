"""What goes wrong, said to an operator: one exception type that names the thing, its value and the fix.

Standard library only: the agent and the run directory raise these too. Exit codes are those of the command line
(`docs/exit-codes.md`); nothing else in the project writes such a number down.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Stable exit codes of `eagle3-console`, of the pilot and of every stage process."""

    OK = 0
    STAGE_FAILED = 1
    USAGE = 2
    CONNECTION_LOST = 3
    CONFIRMATION_NEEDED = 4
    CONTROL_HELD = 5
    PREFLIGHT_FAILED = 6
    NEVER_READY = 7
    NEEDS_HUMAN = 8
    TIMEOUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


class OperatorError(Exception):
    """An error that an operator can act on.

    `what` is one sentence that names the thing and its value; `fix` says what to do about it; `reason` is a stable
    machine word (``disk_full``, ``port_taken`` …) that policies, JSON output and tests match on.
    """

    code = Exit.STAGE_FAILED

    def __init__(self, what: str, *, fix: str = "", reason: str = "failed", code: Exit | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.reason = reason
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}" if self.fix else self.what

    def as_json(self) -> dict[str, object]:
        """The form in which an error crosses a process boundary; `from_json` is its inverse."""
        return {"what": self.what, "fix": self.fix, "reason": self.reason, "code": int(self.code)}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> OperatorError:
        """Rebuild an error that another process wrote with `as_json`."""
        return OperatorError(
            str(data.get("what", "unknown error")),
            fix=str(data.get("fix", "")),
            reason=str(data.get("reason", "failed")),
            code=Exit(int(str(data.get("code", int(Exit.STAGE_FAILED))))),
        )


class UsageError(OperatorError):
    """Wrong command line or config: nothing was started."""

    code = Exit.USAGE


class Refused(OperatorError):
    """A safety rule said no, or consent is missing: nothing was changed."""

    code = Exit.CONFIRMATION_NEEDED
