"""A small site for tests of the command line: a config, a home, and an interpreter that stands in for the host's.

Everything of the product is real: the CLI as a process, the zipapp, the agent, the supervisor, run directories, the
events. Only `[host] python` is a short script that answers `-m backend.pilot plan` from a file and, as `run`, writes a
few events and ends with the code that the test chose; the real pilot needs a model, and is tested with one elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from backend.runs.layout import Home
from backend.runs.state import AttemptState, state
from backend.runs.stop import stop

STAND_IN = """#!{python}
import hashlib, json, os, sys
from pathlib import Path

from backend.runs.events import EventLog

here = Path(__file__).parent
assert sys.argv[1:3] == ["-m", "backend.pilot"], sys.argv
if sys.argv[3] == "plan":
    asked = json.load(sys.stdin)
    plan = json.loads((here / "plan.json").read_text())
    wish = json.dumps([asked["config"], asked["selection"], plan["name"]], sort_keys=True)
    plan |= {{"key": hashlib.sha256(wish.encode()).hexdigest(), "config": asked["config"]}}
    plan |= {{"selection": asked["selection"], "python": asked["python"], "home": asked["config"]["host"]["home"]}}
    print(json.dumps(plan))
elif sys.argv[3] == "explain":
    print("one line of narration", file=sys.stderr)
    print(json.dumps({{"error": {{"what": "no such stage", "fix": "merge", "reason": "no_stage", "code": 2}}}}))
    sys.exit(2)
else:
    pipeline = Path(sys.argv[4])
    scenario = json.loads((here / "scenario.json").read_text())
    print("pilot speaks \\x1b[31mred\\x1b[0m", flush=True)
    with EventLog(pipeline / "events.jsonl", pipe=pipeline.name) as log:
        log.emit("pipeline_started", {{"name": "tiny", "stages": ["merge", "extract"]}})
        log.emit("stage_skipped", {{"why": "done before \\x1b]0;owned\\x07"}}, stage="merge")
        log.emit("stage_started", {{"log": "/x", "action": "starts"}}, stage="extract", att=1)
        for done in (0, 5, 10):
            d = {{"done": done, "total": 10, "unit": "records", "rate": 2.5, "eta_s": 4, "eta_hi_s": 8}}
            log.emit("progress", d, stage="extract", att=1)
        log.emit("metric", {{"step": 1, "loss": 1.83}}, stage="extract", att=1)
        log.emit("check", {{"name": "rows", "ok": True, "evidence": "10 of 10"}}, stage="extract", att=1)
        log.emit("warning", {{"text": "disk at 80 %"}}, stage="extract")
        if scenario["waits"]:
            open(here / "gate").read()  # blocks until the test opens the other end
        code = scenario["code"]
        ended = {{"state": "failed" if code else "succeeded", "seconds": 2.0}}
        if code:
            ended |= {{"reason": "disk_full", "what": "the disk is full", "fix": "free 10 GB", "code": code}}
        log.emit("stage_ended", ended, stage="extract", att=1)
        sections = [{{"title": "stages", "columns": ["stage", "rows"], "rows": [["extract", 12345]]}}]
        summary = {{"sections": sections, "lines": ["10 records"]}}
        log.emit("pipeline_ended", {{"code": code, "seconds": 2.5, "summary": summary}})
    sys.exit(code)
"""
CONFIG = """
[host]
home = "home"
python = "{python}"

[target]
name = "tiny"
model = "model"

[[data.sources]]
name = "own"
paths = ["own.jsonl"]
"""
STAGES: list[dict[str, Any]] = [
    {"name": "merge", "kind": "task", "action": "skip", "why": "done before", "consent": None},
    {
        "name": "extract",
        "kind": "task",
        "action": "run",
        "why": "never run for this config",
        "lines": ["10 records through the server"],
        "effects": [],
        "numbers": {"hours": 0.5, "store_bytes": 2_000_000_000},
        "launch": {
            "argv": ["python", "-m", "sglang", "--tp", "8"],
            "env": {"NCCL_ALGO": "Ring"},
            "defaults": ["dtype"],
        },
        "consent": None,
    },
]


class Site:
    """One folder with config, stand-in and home; `run` runs the command line in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home")
        self.config = folder / "eagle3.toml"
        self.config.write_text(CONFIG.format(python=folder / "interpreter"))
        script = folder / "interpreter"
        script.write_text(STAND_IN.format(python=sys.executable))
        script.chmod(0o755)
        os.mkfifo(folder / "gate")
        self.plan()
        self.scenario()

    def plan(self, stages: list[dict[str, Any]] | None = None, **more: Any) -> None:
        """What the next `plan` answers."""
        base = {"v": 1, "name": "tiny", "host": "local", "switches": [], "destructive": [], "totals": {"tokens": 10}}
        plan = {**base, "nothing_to_do": False, "stages": STAGES if stages is None else stages, **more}
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def scenario(self, *, code: int = 0, waits: bool = False) -> None:
        """How the next pilot ends, and whether it waits for `release` before."""
        (self.folder / "scenario.json").write_text(json.dumps({"code": code, "waits": waits}))

    def release(self) -> None:
        """Let the waiting pilot go on; returns when it took notice."""
        with open(self.folder / "gate", "w") as gate:
            gate.write("go")

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE3_")}
        return {**kept, "EAGLE3_CONFIG": str(self.config), "PYTHONUNBUFFERED": "1"}

    def run(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """One command line to its end, without a terminal."""
        return subprocess.run(
            [sys.executable, "-m", "console.cli", *words],
            cwd=self.folder,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command line while it runs; killed at the end if it still does."""
        process = subprocess.Popen(
            [sys.executable, "-m", "console.cli", *words],
            cwd=self.folder,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()

    def pilot(self, number: int = 1, pipeline: int = -1) -> AttemptState:
        """The state of a pilot on disk."""
        return state(self.home.pipelines()[pipeline].path / "pilot/attempts" / str(number))

    def close(self) -> None:
        """End every pilot that still lives."""
        for pipeline in self.home.pipelines():
            for attempt in (pipeline.path / "pilot/attempts").iterdir():
                if (attempt / "spec.json").exists():
                    stop(attempt, 0.5)


def wait_for(stream: IO[str] | None, text: str) -> list[str]:
    """Read lines until one holds `text`; all that were read."""
    assert stream is not None
    lines: list[str] = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} never came; got:\n{''.join(lines)}")
