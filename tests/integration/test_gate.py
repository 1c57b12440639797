"""The readiness gate against real SGLang servers on the CPU, and against what only looks like one.

Each test is a way in which a green health check was believed wrongly: an old server, a liar on the port, a dead hook,
layers off by one, states before the final norm, a scheduler that hangs, a server that died while loading.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from backend.engine import procfs
from backend.engine.canary import CanaryResult, CanarySettings, run_canary
from backend.engine.capture import plugin_dir
from backend.engine.client import SGLangClient
from backend.engine.gate import prove_speculative, run_gate
from backend.engine.launch import ServerSpec, argv, environment
from backend.engine.readiness import GateSettings, ServerProcess, Verdict
from backend.report import Check, Silent
from backend.runs.identity import start_ticks
from tests.servers import free_port
from tests.sglang_models import LAYERS, prompt, tiny_draft, tiny_llama

pytestmark = pytest.mark.slow

CAPTURED = (2, LAYERS // 2, LAYERS - 3)
PATIENT = GateSettings(attempts=400, interval_s=1.0, deadline_s=400.0, stability_s=1.0)
BRIEF = GateSettings(attempts=3, interval_s=0.05, deadline_s=30.0, probe_timeout_s=5.0, stability_s=0.1)
UP_AND_IDLE = "import sys; print('up', flush=True); sys.stdin.read()"
LIAR = """
import http.server, sys
class Liar(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"ok")
    do_POST = do_GET
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Liar)
print("up", flush=True)
server.serve_forever()
"""


@dataclass
class Told(Silent):
    """A reporter that keeps what it was told, and may act on a check as it is made."""

    polls: list[dict[str, object]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    act: Callable[[Check], None] = lambda check: None

    def progress(self, done: int, total: int, unit: str, **detail: float | int | str) -> None:
        self.polls.append({"done": done, "total": total, "unit": unit, **detail})

    def check(self, check: Check) -> None:
        self.checks.append(check)
        self.act(check)


def spec_for(model: Path, folder: Path, **changes: object) -> ServerSpec:
    """A small extraction server; its launch id is unique to its folder."""
    spec = ServerSpec(
        mode="extract",
        model_path=str(model),
        host="127.0.0.1",
        port=free_port(),
        launch_id=f"gate-{os.urandom(6).hex()}",
        device="cpu",
        dtype="float32",
        mem_fraction=0.1,
        max_total_tokens=4096,
        max_running_requests=4,
        chunked_prefill=512,
        dump_dir=str(folder / "dumps"),
        layers=CAPTURED,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


@contextmanager
def running(command: list[str], log: Path, port: int, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A process group as a launcher would record it; ended by its own group id."""
    was_closed = not procfs.listeners(port)
    launched = time.time()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        yield ServerProcess(process.pid, ticks, log, launched, log.with_name("exit.json"), was_closed)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def launched(spec: ServerSpec, folder: Path, plugin: Path | None = None) -> Iterator[ServerProcess]:
    """A real server, just started; with another plugin folder where one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    if spec.dump_dir:
        Path(spec.dump_dir).mkdir()
    env = {**os.environ, **environment(spec, plugin or plugin_dir(folder), folder), "SPT_NOENV": "1"}
    with running(argv(sys.executable, spec), folder / "log", spec.port, env) as server:
        yield server


@contextmanager
def idle(folder: Path, port: int) -> Iterator[ServerProcess]:
    """Our process, alive and without a server: as one that is still loading."""
    with running([sys.executable, "-c", UP_AND_IDLE], folder / "log", port) as server:
        yield server


def broken_plugin(folder: Path, **replaced: tuple[str, str]) -> Path:
    """A copy of the capture plugin with some text replaced; each must stand there exactly once."""
    copy = folder / "broken-plugin"
    shutil.copytree(plugin_dir(folder), copy)
    module = copy / "eagle3_capture.py"
    text = module.read_text()
    for name, (old, new) in replaced.items():
        assert text.count(old) == 1, f"{name}: the plugin changed, the fault no longer applies"
        text = text.replace(old, new)
    module.write_text(text)
    return copy


def canary_of(spec: ServerSpec) -> CanarySettings:
    assert spec.dump_dir is not None
    return CanarySettings(dump_dir=spec.dump_dir, layers=spec.layers)


def sing(spec: ServerSpec) -> CanaryResult:
    with SGLangClient(f"http://127.0.0.1:{spec.port}") as client:
        return run_canary(
            client,
            spec.model_path,
            canary_of(spec),
            launch_id=spec.launch_id,
            ranks=1,
            trust_remote_code=False,
            reporter=Silent(),
        )


def outcome(checks: tuple[Check, ...]) -> dict[str, bool | None]:
    return {check.name: check.ok for check in checks}


def failed(verdict: Verdict) -> Check:
    assert not verdict.ok and verdict.failed is not None, verdict.text()
    return verdict.failed


# --- what only looks like a server -----------------------------------------------------------------------------------


def test_a_liar_on_the_port_is_not_our_server(tmp_path: Path) -> None:
    """Ten lines of HTTP that say 200 to everything, beside our process that still loads."""
    port = free_port()
    spec = spec_for(tmp_path, tmp_path, port=port)
    with idle(tmp_path, port) as server, lying(tmp_path / "liar", port) as liar:
        verdict = run_gate(server, spec, BRIEF, None, Silent())
    check = failed(verdict)
    assert check.name == "listener" and f"pid {liar.pid}" in check.evidence
    assert verdict.listener is not None and verdict.listener.pid == liar.pid
    assert verdict.suspect, "ready faster than Python can import SGLang"


def test_a_liar_that_we_started_ourselves_is_not_sglang(tmp_path: Path) -> None:
    port = free_port()
    with lying(tmp_path, port) as liar:
        verdict = run_gate(
            replace(liar, port_was_closed=True), spec_for(tmp_path, tmp_path, port=port), BRIEF, None, Silent()
        )
    assert failed(verdict).name == "launch_id" and verdict.suspect


@contextmanager
def lying(folder: Path, port: int) -> Iterator[ServerProcess]:
    folder.mkdir(exist_ok=True)
    with running([sys.executable, "-c", LIAR, str(port)], folder / "log", port) as liar:
        while not procfs.listeners(port):
            assert start_ticks(liar.pid), (folder / "log").read_text()
            os.sched_yield()
        yield liar


def test_every_poll_is_reported_and_the_attempts_end(tmp_path: Path) -> None:
    told, port = Told(), free_port()
    with idle(tmp_path, port) as server:
        verdict = run_gate(server, spec_for(tmp_path, tmp_path, port=port), BRIEF, None, told)
    check = failed(verdict)
    assert check.name == "health" and "3 polls" in check.evidence and "refused" in check.evidence
    assert [poll["done"] for poll in told.polls] == [1, 2, 3] and verdict.polls == 3
    assert all({"code", "latency_s", "next_in_s"} <= poll.keys() for poll in told.polls)
    assert told.polls[-1]["next_in_s"] == 0.0
    assert [check.name for check in told.checks] == ["port_closed", "process", "health"]
    assert verdict.ready_after_s is None and verdict.listener is None


def test_a_deadline_ends_the_gate_before_its_attempts_do(tmp_path: Path) -> None:
    port = free_port()
    settings = GateSettings(attempts=10_000, interval_s=0.02, deadline_s=0.3)
    with idle(tmp_path, port) as server:
        verdict = run_gate(server, spec_for(tmp_path, tmp_path, port=port), settings, None, Silent())
    assert failed(verdict).name == "health" and verdict.polls < 100


def test_a_slow_start_warns_once_and_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    told, port = Told(), free_port()
    told.warning = warnings.append  # type: ignore[method-assign]
    settings = replace(BRIEF, attempts=6, warn_after_s=0.01)
    with idle(tmp_path, port) as server:
        verdict = run_gate(server, spec_for(tmp_path, tmp_path, port=port), settings, None, told)
    assert verdict.polls == 6 and len(warnings) == 1


def test_a_process_that_is_already_gone_ends_the_gate_before_any_poll(tmp_path: Path) -> None:
    port = free_port()
    with running([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log", port) as server:
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        verdict = run_gate(server, spec_for(tmp_path, tmp_path, port=port), PATIENT, None, Silent())
    check = failed(verdict)
    assert check.name == "process" and "no such model" in check.evidence and verdict.polls == 0


def test_an_exit_record_ends_the_gate_although_the_supervisor_lives(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "exit.json").write_text(json.dumps({"code": 3}))
    with idle(tmp_path, port) as server:
        verdict = run_gate(server, spec_for(tmp_path, tmp_path, port=port), PATIENT, None, Silent())
    assert failed(verdict).name == "process" and '"code": 3' in failed(verdict).evidence


# --- one good server, seen from every side ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Good:
    spec: ServerSpec
    server: ServerProcess
    verdict: Verdict
    told: Told


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def good(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Good]:
    folder = tmp_path_factory.mktemp("good")
    spec, told = spec_for(model, folder), Told()
    with launched(spec, folder) as server:
        yield Good(spec, server, run_gate(server, spec, PATIENT, canary_of(spec), told), told)


@pytest.mark.sglang
def test_a_good_server_passes_every_check_in_order(good: Good) -> None:
    assert good.verdict.ok and not good.verdict.suspect, good.verdict.text()
    assert outcome(good.verdict.checks) == {
        "port_closed": True,
        "process": True,
        "health": True,
        "listener": True,
        "launch_id": True,
        "flags": True,
        "generates": True,
        "capture_live": True,
        "canary.capture": True,
        "canary.last_hidden": True,
        "canary.embedding": True,
        "canary.layers": True,
        "canary.ranks": None,
        "canary.parity": True,
        "stability": True,
    }
    assert tuple(good.told.checks) == good.verdict.checks
    assert good.told.polls[-1]["code"] == 200


@pytest.mark.sglang
def test_the_verdict_says_who_listens_since_when_and_why_it_took_so_long(good: Good, model: Path) -> None:
    verdict = good.verdict
    assert verdict.listener is not None and verdict.listener.pid == good.server.pid
    assert abs(verdict.listener.started_at - good.server.started_at) < 5
    assert verdict.weight_bytes == (model / "model.safetensors").stat().st_size
    assert verdict.read_bytes is not None and "from disk" in verdict.why
    assert any("Load weight end" in line for line in verdict.load_lines)
    assert Verdict.from_json(json.loads(json.dumps(verdict.as_json()))) == verdict


@pytest.mark.sglang
def test_the_canary_leaves_no_dump_behind_and_its_digest_is_the_same_next_time(good: Good) -> None:
    again = sing(good.spec)
    assert again.ok and again.digest is not None and again.digest == good.verdict.canary_digest
    left = {path.name for path in Path(good.spec.dump_dir or "").iterdir()}
    assert all(name.startswith("_live.") for name in left), left


@pytest.mark.sglang
def test_layers_that_were_not_asked_for_fail_at_the_live_marker(good: Good) -> None:
    wanted = replace(canary_of(good.spec), layers=(3, 5, 6))
    check = failed(run_gate(good.server, good.spec, BRIEF, wanted, Silent()))
    assert check.name == "capture_live" and "[2, 4, 5], asked [3, 5, 6]" in check.evidence


@pytest.mark.sglang
def test_a_flag_that_the_server_does_not_have_fails(good: Good) -> None:
    check = failed(run_gate(good.server, replace(good.spec, chunked_prefill=4096), BRIEF, None, Silent()))
    assert check.name == "flags" and "chunked_prefill_size is 512, asked 4096" in check.evidence


@pytest.mark.sglang
def test_an_old_server_on_the_port_fails_before_anything_is_asked_of_it(good: Good, tmp_path: Path) -> None:
    """The reference run's ten seconds: the new server is not up, the old one answers."""
    ours = replace(good.spec, launch_id="gate-new")
    with idle(tmp_path, ours.port) as server:
        assert not server.port_was_closed
        verdict = run_gate(server, ours, BRIEF, canary_of(ours), Silent())
    check = failed(verdict)
    assert check.name == "port_closed" and f"pid {good.server.pid}" in check.evidence and "s ago" in check.evidence


@pytest.mark.sglang
def test_an_old_server_that_took_the_port_meanwhile_fails_by_owner_and_age(good: Good, tmp_path: Path) -> None:
    ours = replace(good.spec, launch_id="gate-new")
    with idle(tmp_path, ours.port) as server:
        verdict = run_gate(replace(server, port_was_closed=True), ours, BRIEF, canary_of(ours), Silent())
    check = failed(verdict)
    assert check.name == "listener" and f"pid {good.server.pid}" in check.evidence and "s ago" in check.evidence
    assert any("before our launch" in reason for reason in verdict.suspicions)


@pytest.mark.sglang
def test_an_older_launch_in_our_own_tree_fails_by_its_launch_id(good: Good) -> None:
    check = failed(run_gate(good.server, replace(good.spec, launch_id="gate-new"), BRIEF, None, Silent()))
    assert check.name == "launch_id" and good.spec.launch_id in check.evidence


@pytest.mark.sglang
def test_a_server_without_a_draft_does_not_pass_for_a_speculative_one(good: Good) -> None:
    with SGLangClient(f"http://127.0.0.1:{good.spec.port}") as client:
        check = prove_speculative(client, [prompt(12, 1), prompt(9, 2)])
    assert check.ok is False and "2 of 2 answers" in check.evidence


@pytest.mark.sglang
def test_a_server_that_is_healthy_and_does_not_generate_is_caught(good: Good) -> None:
    """The scheduler hangs after the last health check: stopped in that very moment."""
    schedulers = [
        pid for pid in procfs.tree(good.server.pid) if (procfs.argv(pid) or [""])[0].startswith("sglang::scheduler")
    ]
    assert len(schedulers) == 1

    def stop_after_flags(check: Check) -> None:
        if check.name == "flags":
            os.kill(schedulers[0], signal.SIGSTOP)

    try:
        settings = replace(BRIEF, answer_timeout_s=3.0)
        check = failed(run_gate(good.server, good.spec, settings, canary_of(good.spec), Told(act=stop_after_flags)))
    finally:
        os.kill(schedulers[0], signal.SIGCONT)
    assert check.name == "generates" and "does not answer" in check.evidence and check.fix


# --- servers that are broken in one way each -------------------------------------------------------------------------


@pytest.mark.sglang
def test_layers_off_by_one_and_a_missing_final_norm_are_heard_by_the_canary(model: Path, tmp_path: Path) -> None:
    """A plugin that says [2, 4, 5], captures [3, 5, 6], and takes the last states before the final norm."""
    plugin = broken_plugin(
        tmp_path,
        at_load=(
            "model.model.layers_to_capture = list(layers)",
            "model.model.layers_to_capture = _wrong(model, layers)",
        ),
        after_canary=(
            "self.body.layers_to_capture = list(self.layers)",
            "self.body.layers_to_capture = _shifted(self.layers)",
        ),
        before_norm=(
            "chunk = (batch.input_ids[rows], aux_TC[rows], last_TH[rows])",
            "chunk = (batch.input_ids[rows], aux_TC[rows], _before[0][rows])",
        ),
        helpers=("class _Capture:", WRONG_HELPERS + "class _Capture:"),
    )
    spec = spec_for(model, tmp_path)
    with launched(spec, tmp_path / "server", plugin) as server:
        verdict = run_gate(server, spec, PATIENT, canary_of(spec), Silent())
        heard = sing(spec)
    assert failed(verdict).name == "capture_live" and "sha256" in failed(verdict).evidence
    found = outcome(heard.checks)
    assert found["canary.capture"] is True and found["canary.embedding"] is True
    assert found["canary.last_hidden"] is False and found["canary.layers"] is False
    assert found["canary.parity"] is False and heard.digest is None
    layers = next(check for check in heard.checks if check.name == "canary.layers")
    assert [layers.detail[str(c)]["nearest"] for c in CAPTURED] == [c + 1 for c in CAPTURED]


WRONG_HELPERS = """_before = [None]


def _shifted(layers):
    return [layer + 1 for layer in layers]


def _wrong(model, layers):
    def keep(module, args):
        _before[0] = args[0] + args[1] if len(args) > 1 and args[1] is not None else args[0]

    model.model.norm.register_forward_pre_hook(keep)
    return _shifted(layers)


"""


@pytest.mark.sglang
def test_a_plugin_whose_hook_point_is_gone_fails_although_the_server_is_healthy(model: Path, tmp_path: Path) -> None:
    """What an SGLang upgrade does: the hook is only logged, the marker of the load is written, nothing is captured."""
    plugin = broken_plugin(tmp_path, gone=("LogitsProcessor.forward", "LogitsProcessor.forward_of_old"))
    spec = spec_for(model, tmp_path)
    with launched(spec, tmp_path / "server", plugin) as server:
        verdict = run_gate(server, spec, PATIENT, canary_of(spec), Silent())
        heard = sing(spec)
    check = failed(verdict)
    assert outcome(verdict.checks)["health"] is True and outcome(verdict.checks)["generates"] is True
    assert check.name == "capture_live" and "Failed to apply hooks to" in check.evidence
    assert "no forward pass has gone through the sink" in check.evidence
    assert outcome(heard.checks) == {"canary.capture": False} and "left no" in heard.checks[0].evidence


@pytest.mark.sglang
def test_a_server_that_dies_while_loading_ends_the_gate_at_once_with_its_last_error(
    model: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    weights = damaged / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    spec = spec_for(damaged, tmp_path)
    # A gate that only sleeps between polls would come back for a second one.
    rarely = replace(PATIENT, interval_s=400.0)
    with launched(spec, tmp_path / "server") as server:
        verdict = run_gate(server, spec, rarely, canary_of(spec), Silent())
    check = failed(verdict)
    assert check.name == "process" and verdict.polls == 1
    assert "Safetensor" in check.evidence and check.fix


@pytest.mark.sglang
def test_a_speculative_server_passes_the_gate_and_proves_its_draft(model: Path, tmp_path: Path) -> None:
    draft = tiny_draft(tmp_path / "draft")
    spec = spec_for(model, tmp_path, mode="serve+draft", draft_path=str(draft), dump_dir=None, layers=())
    with launched(spec, tmp_path / "server") as server:
        verdict = run_gate(server, spec, PATIENT, None, Silent())
        with SGLangClient(f"http://127.0.0.1:{spec.port}") as client:
            check = prove_speculative(client, [prompt(12, 1), prompt(9, 2)], max_new_tokens=8)
    assert verdict.ok, verdict.text()
    assert check.ok is True and check.detail["accept_length"] >= 1.0 and check.detail["tokens"] == 16
