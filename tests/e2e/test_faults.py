"""What goes wrong on a host: each time a clear message, the documented exit code, and nothing lost."""

from __future__ import annotations

import http.server
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.engine.procfs import tree
from backend.runs.layout import Attempt
from backend.runs.state import state
from backend.store.reader import Store
from tests.e2e.site import Site, interrupt, lines_until

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


class Liar(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything, as a stale or foreign server may."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_a_port_taken_by_something_that_answers_200_is_refused_and_named(site: Site) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", site.port), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = site.auto()
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 6, done.stderr
    assert f"{site.port} is taken by pid {os.getpid()}" in done.stderr
    assert "set [server] port to a free one" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('scheme = "float32"', 'scheme = "float32"\nreserve_gb = 1e9', "kept in reserve"),
        ('device = "cpu"\ngpus = 0', 'device = "cuda"\ngpus = 1', "NVML"),
        ("sources/own.jsonl", "sources/gone.jsonl", "gone.jsonl does not exist"),
    ],
    ids=["disk budget too small", "no GPU", "source missing"],
)
def test_what_can_be_known_before_fails_in_preflight_with_its_fix(site: Site, old: str, new: str, words: str) -> None:
    site.change(old, new)
    done = site.auto()
    assert done.returncode == 6, done.stderr
    assert words in done.stderr and "fix:" in done.stderr
    assert [event.stage for event in site.events() if event.ev == "stage_started"] == ["preflight"]


def test_an_empty_source_fails_in_preflight(site: Site) -> None:
    (site.folder / "sources/own.jsonl").write_bytes(b"")
    done = site.auto()
    assert done.returncode == 6, done.stderr
    assert "own.jsonl is empty" in done.stderr


def test_a_missing_target_is_named_before_anything_starts(site: Site) -> None:
    site.change('model = "model"', 'model = "nowhere"')
    done = site.auto()
    assert done.returncode == 6, done.stderr
    assert "nowhere has no config.json" in done.stderr and "fix:" in done.stderr
    assert not site.home.pipelines()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"messages": [{"role": "user", "content": "hi"}]}\n' * 9, "own"),
        (b'{"messages": [\xff\xfe]}\n' * 9, "own"),
    ],
    ids=["no assistant turn", "invalid UTF-8"],
)
def test_a_source_that_cannot_be_trained_on_stops_the_merge(site: Site, content: bytes, words: str) -> None:
    (site.folder / "sources/own.jsonl").write_bytes(content)
    done = site.auto("--to", "merge")
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert not list((site.folder / "data").glob("*/report.json")), "no half-made merge under its final name"


def test_a_server_that_dies_while_loading_ends_the_gate_with_its_last_error(site: Site) -> None:
    weights = next((site.folder / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    done = site.auto("--from", "patch", "--to", "gate")
    assert done.returncode == 7, done.stderr
    assert "SafetensorError" in done.stderr or "safetensors" in done.stderr.lower()
    assert not any(state(attempt.path).alive for attempt in site.pipeline.attempts("launch"))


def test_kills_and_interrupts_in_mid_extraction_lose_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, records=1800)
    site.change("concurrency = 4", "concurrency = 1")
    try:
        _kill_the_extractor(site)
        _kill_the_scheduler(site)
        _interrupt_and_attach(site)
        _kill_the_pilot(site)
        done = site.auto("--to", "extract")
        assert done.returncode == 0, done.stderr
        with Store.open(Path(site.outputs("extract")["store"])) as store:
            assert len(store) == site.outputs("merge")["records"] == 2400
            assert len(set(store.ids)) == 2400
        starts = len(site.pipeline.attempts("merge"))
        assert starts == 1, "finished stages are not run again"
    finally:
        site.close()


def _running(site: Site, stage: str) -> Attempt:
    attempt = site.pipeline.current(stage)
    assert attempt is not None
    return attempt


def _kill_the_extractor(site: Site) -> None:
    run = site.spawn("--to", "extract")
    list(lines_until(run, "progress", "extract"))
    job = state(_running(site, "extract").path).job
    assert job is not None
    os.kill(job.pid, signal.SIGKILL)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 1, err
    assert "signal 9" in out and "run again" in out


def _kill_the_scheduler(site: Site) -> None:
    run = site.spawn("--to", "extract")
    list(lines_until(run, "progress", "extract"))
    server = state(_running(site, "launch").path)
    assert server.job is not None
    os.kill(tree(server.job.pid)[-1], signal.SIGKILL)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 1, err
    assert "the extraction server ended" in out and "run again to go on" in out


def _interrupt_and_attach(site: Site) -> None:
    run = site.spawn("--to", "extract")
    list(lines_until(run, "progress", "extract"))
    assert interrupt(run) == 130
    assert state(_running(site, "extract").path).alive, "Ctrl-C detaches, the work goes on"


def _kill_the_pilot(site: Site) -> None:
    run = site.spawn("--to", "extract")
    records = list(lines_until(run, "progress", "extract"))
    assert records, "the second run attached to the first one's pipeline"
    pilots = sorted((site.pipeline.path / "pilot/attempts").iterdir(), key=lambda path: int(path.name))
    job = state(pilots[-1]).job
    assert job is not None
    os.kill(job.pid, signal.SIGKILL)
    run.communicate(timeout=120)
    assert run.returncode == 8, "a killed pilot needs a human, who starts again"
    assert state(_running(site, "extract").path).alive, "a stage outlives its pilot"
