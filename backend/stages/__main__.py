"""The process around one stage: `python -m backend.stages NAME ATTEMPT_DIR`, started by a supervisor.

Reads `input.json`, runs and verifies the stage, and leaves `outputs.json` (only if every check passed) or
`failure.json` (what, value, fix, reason) before it exits. The exit code is that of the error.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from backend.errors import Exit, OperatorError
from backend.report import Check
from backend.runs.atomic import write_json
from backend.runs.events import AttemptReporter
from backend.stages.base import Stage, StageContext
from backend.stages.handover import read_input, record_outputs
from backend.stages.registry import stage_named


class LoggedReporter(AttemptReporter):
    """Events for the pipeline, and the words among them for whoever reads the attempt's log."""

    def note(self, text: str) -> None:
        """Also a line in the log."""
        print(text, flush=True)
        super().note(text)

    def warning(self, text: str) -> None:
        """Also a line in the log."""
        print(f"warning: {text}", flush=True)
        super().warning(text)

    def check(self, check: Check) -> None:
        """Also a line in the log."""
        print(f"{ {True: 'ok', False: 'FAILED', None: 'n/a'}[check.ok] } {check.name}: {check.evidence}", flush=True)
        super().check(check)


class Stopped(BaseException):
    """SIGTERM arrived: unwind, so that writers close what they hold. Not an Exception: nothing may swallow it.

    An event loop would: raised between two of its steps, it is logged and the step is lost. A stage that runs one takes
    the signal itself (extract), and so does one that must not be cut in mid-write (train).
    """


def main(argv: list[str]) -> int:
    """Run one stage to its end; returns the process exit code."""
    name, attempt = argv[0], Path(argv[1])
    signal.signal(signal.SIGTERM, _stop)
    try:
        with LoggedReporter(attempt) as reporter:
            ctx, fingerprint = read_input(attempt, reporter)
            stage = stage_named(name)
            outputs, checks = execute(stage, ctx)
            record_outputs(attempt, stage, fingerprint, outputs, checks)
    except Stopped:
        return _fail(attempt, OperatorError(f"stage {name} was stopped", reason="stopped", code=Exit.TERMINATED))
    except OperatorError as error:
        return _fail(attempt, error)
    except Exception as error:
        traceback.print_exc()
        crash = OperatorError(
            f"stage {name} crashed: {type(error).__name__}: {error}",
            fix=f"the trace is at the end of {attempt / 'log'}",
            reason="crash",
        )
        return _fail(attempt, crash)
    return Exit.OK


def execute(stage: Stage, ctx: StageContext) -> tuple[dict[str, Any], list[Check]]:
    """Run, then look again.

    Raises:
        OperatorError: from the stage, or `verify_failed` naming the first check that does not hold.
    """
    began = time.monotonic()
    outputs = stage.run(ctx)
    outputs["seconds"] = round(time.monotonic() - began, 3)
    checks = stage.verify(ctx, outputs)
    for check in checks:
        ctx.reporter.check(check)
    for check in checks:
        if check.ok is False:
            raise OperatorError(
                f"stage {stage.name} ran, but its result does not verify: {check.name}: {check.evidence}",
                fix=check.fix or "nothing downstream was started; look at the log",
                reason="verify_failed",
            )
    return outputs, checks


def _stop(signum: int, frame: object) -> None:
    raise Stopped


def _fail(attempt: Path, error: OperatorError) -> int:
    print(error, file=sys.stderr, flush=True)
    write_json(attempt / "failure.json", error.as_json())
    return int(error.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
