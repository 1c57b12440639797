"""`python -m backend.pilot plan | explain | run PIPELINE_DIR`: the pilot's verbs, called by the agent.

plan and explain read one JSON object from stdin and write one to stdout; run drives a frozen pipeline. Errors leave as
JSON on stdout (plan, explain) or in the pipeline's events (run), and always as the exit code.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from backend.config import Config
from backend.errors import Exit, OperatorError, UsageError
from backend.pilot.decide import Selection
from backend.pilot.drive import Pilot
from backend.pilot.explain import explain
from backend.pilot.plan import make_plan
from backend.report import Silent
from backend.runs.layout import Home, Pipeline
from backend.stages.base import StageContext


def main(argv: list[str]) -> int:
    """Dispatch one verb; returns the exit code."""
    try:
        if argv[:1] == ["run"] and len(argv) == 2:
            return Pilot(Pipeline(Path(argv[1]))).run()
        if argv in (["plan"], ["explain"]):
            return _answer(argv[0])
        raise UsageError(f"unknown verb {argv}", fix="plan, explain, or run PIPELINE_DIR")
    except OperatorError as error:
        print(error, file=sys.stderr)
        return int(error.code)


def _answer(verb: str) -> int:
    try:
        asked = json.load(sys.stdin)
        ctx = _context(asked)
        selection = Selection.from_json(asked.get("selection") or {})
        answer = (
            make_plan(ctx, asked.get("name", ""), selection)
            if verb == "plan"
            else explain(ctx, selection, str(asked["stage"]))
        )
    except OperatorError as error:
        json.dump({"error": error.as_json()}, sys.stdout)
        return int(error.code)
    except Exception as error:
        traceback.print_exc()
        crash = OperatorError(f"{verb} crashed: {type(error).__name__}: {error}", reason="crash")
        json.dump({"error": crash.as_json()}, sys.stdout)
        return int(Exit.STAGE_FAILED)
    json.dump(answer, sys.stdout)
    return 0


def _context(asked: dict[str, Any]) -> StageContext:
    config = Config.model_validate(asked["config"])
    return StageContext(
        config, config.host.python or sys.executable, Home(Path(config.host.home)).create(), {}, Silent()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
