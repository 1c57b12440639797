"""A pipeline site for end-to-end tests: a tiny target, real sources, a config, and the command line as a process.

Nothing stands in for anything: SGLang serves the target, the draft is trained, the console is the installed script.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.runs.allow import add_root
from backend.runs.events import Event, read_events
from backend.runs.layout import Home, Pipeline
from backend.runs.state import state
from backend.runs.stop import stop
from backend.stages.server import live_servers, stop_server
from tests.servers import free_port
from tests.sglang_models import tiny_llama

CLI = str(Path(sys.executable).parent / "eagle3-console")
CONSENT = ("--yes", "--allow", "stop", "--allow", "deploy")
LIMIT_S = 600
WORDS = tuple(
    re.findall(r"\w+", "the quick brown fox jumps over the lazy dog and the target verifies all drafted tokens")
)

CONFIG = """\
[host]
work = "."
home = "state"
device = "cpu"
gpus = 0

[target]
name = "tiny-llama"
model = "model"

[data]
max_tokens = 256
heldout_share = 0.2
validation_share = 0.1

[[data.sources]]
name = "own"
paths = ["sources/own.jsonl"]
on_policy = true

[[data.sources]]
name = "human"
paths = ["sources/human.json"]

[capture]
dump_dir = "dump"

[store]
scheme = "float32"

[server]
port = {port}
dtype = "float32"
mem_fraction = 0.1
max_total_tokens = 8192
max_running_requests = 8
chunked_prefill = 128
expected_load_s = 20

[gate]
interval_s = 1.0
deadline_s = 300.0
attempts = 300
stability_s = 1.0
hf_parity = true

[extract]
concurrency = 4

[train]
ttt_steps = 2
batch_tokens = 256
lr = 1e-3
schedule = "cosine_steps"
epochs = 2
draft_vocab_size = 256
init = "layer"

[deploy]
dtype = "float32"
mem_fraction = 0.1
max_total_tokens = 8192
max_running_requests = 4
chunked_prefill = 128
spec_steps = 2
spec_draft_tokens = 3
keep = false

[bench]
prompts = 4
max_new_tokens = 8
concurrency = [2]
baselines = ["none", "untrained"]
"""


class Site:
    """One folder with everything that a run needs."""

    def __init__(self, folder: Path, records: int = 60) -> None:
        self.folder = folder
        self.port = free_port()
        tiny_llama(folder / "model")
        (folder / "sources").mkdir()
        self.write_sources(records)
        (folder / "store").mkdir()
        add_root(self.home.create().allow, folder / "store")
        self.config = folder / "eagle3.toml"
        self.config.write_text(CONFIG.format(port=self.port))

    def write_sources(self, records: int) -> None:
        """`records` own answers (OpenAI messages) and a third as many human dialogues (ShareGPT)."""
        own, human = self.folder / "sources/own.jsonl", self.folder / "sources/human.json"
        lines = []
        for i in range(records):
            answer = " ".join(WORDS[(i * 3 + j) % len(WORDS)] for j in range(8 + i % 7))
            turns = [{"role": "user", "content": f"question number {i}?"}, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": turns}))
        own.write_text("\n".join(lines) + "\n")
        dialogues = [
            {
                "conversations": [
                    {"from": "human", "value": f"hello {i}, how are you?"},
                    {"from": "gpt", "value": f"fine, and you? {WORDS[i % len(WORDS)]}"},
                ]
            }
            for i in range(records // 3)
        ]
        human.write_text(json.dumps(dialogues))

    def change(self, old: str, new: str) -> None:
        """Edit the config; fails if the text is not there."""
        text = self.config.read_text()
        assert old in text, old
        self.config.write_text(text.replace(old, new))

    def run(self, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """The console to its end, without input."""
        return subprocess.run(
            [CLI, "--config", str(self.config), *args],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            timeout=LIMIT_S,
            check=False,
        )

    def auto(self, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`--auto` with the consents that a run needs."""
        return self.run("--auto", *CONSENT, *args, env=env)

    def spawn(self, *args: str) -> subprocess.Popen[str]:
        """`--auto` with JSON lines on a pipe, in a session of its own, to be watched and interrupted."""
        return subprocess.Popen(
            [CLI, "--config", str(self.config), "--auto", *CONSENT, "--output", "jsonl", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    @property
    def home(self) -> Home:
        """The state folder."""
        return Home(self.folder / "state")

    @property
    def pipeline(self) -> Pipeline:
        """The newest pipeline."""
        return self.home.pipelines()[-1]

    def events(self) -> list[Event]:
        """Every event of the newest pipeline."""
        found, offset = [], 0
        while True:
            events, after = read_events(self.pipeline.events, offset)
            if after == offset:
                return found
            found, offset = found + events, after

    def outputs(self, stage: str) -> dict[str, Any]:
        """What a stage's newest attempt recorded."""
        attempt = self.pipeline.attempts(stage)[-1].path
        path = attempt / "proof" / "outputs.json" if (attempt / "proof").is_dir() else attempt / "outputs.json"
        outputs: dict[str, Any] = json.loads(path.read_text())["outputs"]
        return outputs

    def close(self) -> None:
        """End whatever of this site still runs."""
        if not self.home.path.is_dir():
            return
        for pipeline in self.home.pipelines():
            for attempt in (pipeline.path / "pilot" / "attempts").glob("*"):
                if state(attempt).alive:
                    stop(attempt)
            for name in ("preflight", "merge", "purge", "patch", "stop", "gate", "extract", "train", "bench"):
                for attempt in pipeline.attempts(name):
                    if state(attempt.path).alive or state(attempt.path).job_alive:
                        stop(attempt.path)
        for job in (self.home.path / "trash" / "attempts").glob("*"):
            if state(job).alive:
                stop(job)
        for server in list(live_servers(self.home)):
            stop_server(server)


def lines_until(process: subprocess.Popen[str], wanted: str, stage: str = "") -> Iterator[dict[str, Any]]:
    """JSON lines of a followed run, up to and including the first `wanted` event (of `stage`, if given)."""
    assert process.stdout is not None
    for line in process.stdout:
        record = json.loads(line)
        yield record
        if record.get("ev", record.get("event")) == wanted and stage in ("", record.get("stage")):
            return
    raise AssertionError(f"the run ended without {wanted} {stage}: {process.stderr.read() if process.stderr else ''}")


def interrupt(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> int:
    """Send a signal to the console alone and return its exit code."""
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode
