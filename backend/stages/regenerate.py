"""`python -m backend.stages.regenerate FOLDER`: the demo's answers, made anew by the target itself (`make demo-data`).

Starts the real server in mode "regenerate" under the supervisor, asks every prompt that has no answer yet, and stops
the server again. A broken run goes on where it stopped.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from backend.data.chat import ChatFormat
from backend.data.demo.generate import ANSWERS, generate
from backend.errors import OperatorError
from backend.report import Check, Silent
from backend.resolve import load
from backend.runs.layout import Home
from backend.stages.base import StageContext
from backend.stages.gate import judge
from backend.stages.server import REGENERATE, start_server, stopped_after

IN_FLIGHT = 32


class Narrator(Silent):
    """Checks, warnings, and a line every 20 answers, on stderr."""

    def progress(self, done: int, total: int, unit: str, **detail: float | int | str) -> None:
        """Every twentieth step."""
        if unit == "answers" and (done % 20 == 0 or done == total):
            sys.stderr.write(f"{done}/{total} {unit}\n")

    def warning(self, text: str) -> None:
        """As it is."""
        sys.stderr.write(f"{text}\n")

    def check(self, check: Check) -> None:
        """One line a check."""
        sys.stderr.write(f"{check.name}: {check.evidence}\n")


def main(argv: list[str]) -> int:
    """Answer what is missing; returns the exit code."""
    folder = Path(argv[0]).resolve()
    config = load(profile="demo", cwd=folder.parent).config
    server = config.server.model_copy(update={"max_running_requests": IN_FLIGHT})
    config = config.model_copy(update={"server": server})
    home = Home(Path(config.host.home)).create()
    attempts = home.path / REGENERATE / "attempts"
    attempts.mkdir(parents=True, mode=0o700, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix="", dir=attempts))
    ctx = StageContext(config, sys.executable, home, {}, Narrator())
    try:
        record = start_server(ctx, attempt, "regenerate")
        with stopped_after(attempt, ctx.reporter):
            judge(replace(ctx, server=attempt), canary=False)
            chat = ChatFormat.load(ctx.path(config.target.model))
            counts = generate(record.url, chat, ANSWERS, reporter=ctx.reporter)
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.code)
    sys.stdout.write(f"{dict(counts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
