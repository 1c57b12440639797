"""The command line as real processes: exit codes, detaching, re-attaching, stopping, and what goes to which stream."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from backend.errors import Exit
from backend.runs import identity
from backend.runs.audit import AuditLog
from backend.runs.layout import Attempt
from backend.runs.spec import write_spec
from backend.runs.state import state
from backend.runs.supervisor import start
from console import session
from tests.integration.cli_site import STAGES, Site, wait_for

pytestmark = pytest.mark.slow
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/events-v1.json").read_text())
ANSI = re.compile(r"[\x1b\x9b]")
CAUTIOUS = {**STAGES[1], "effects": ["stops pid 4711"], "consent": {"severity": 2, "flags": ["--allow extract"]}}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def checked(lines: list[str]) -> list[dict[str, object]]:
    """JSON lines that all fit the published schema."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    records = [json.loads(line) for line in lines]
    for record in records:
        validator.validate(record)
    return records


def test_auto_runs_to_the_end_with_data_on_stdout_and_narration_on_stderr(site: Site) -> None:
    done = site.run("--auto", "--yes")
    assert done.returncode == 0, done.stderr
    assert "12,345" in done.stdout and "10 records" in done.stdout
    assert "extract" in done.stderr and "10/10 records 100 %" in done.stderr and "disk at 80 %" in done.stderr
    assert "python -m sglang --tp 8" in done.stderr and "engine default: dtype" in done.stderr
    assert not ANSI.search(done.stdout + done.stderr), "a host's escape sequences must not reach the terminal"
    assert site.pilot().state == "succeeded"


@pytest.mark.parametrize("code", [Exit.STAGE_FAILED, Exit.CONFIRMATION_NEEDED, Exit.PREFLIGHT_FAILED, Exit.NEVER_READY])
def test_the_code_of_the_pilot_is_the_code_of_auto(site: Site, code: Exit) -> None:
    site.scenario(code=code)
    done = site.run("--auto", "--yes")
    assert done.returncode == code
    assert "the disk is full" in done.stderr and "free 10 GB" in done.stderr


def test_jsonl_is_what_the_schema_says_and_nothing_else_is_on_stdout(site: Site) -> None:
    done = site.run("--auto", "--yes", "--output", "jsonl")
    records = checked(done.stdout.splitlines())
    kinds = [record["event"] for record in records]
    assert kinds[0] == "plan" and kinds[1] == "accepted" and kinds[-1] == "ended"
    assert [r["seq"] for r in records if r["seq"] is not None] == list(range(11))
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_jsonl_reports_an_error_as_a_line_too(site: Site) -> None:
    site.plan([STAGES[0], CAUTIOUS])
    done = site.run("--auto", "--yes", "--output", "jsonl")
    records = checked(done.stdout.splitlines())
    assert [r["event"] for r in records] == ["plan", "needs_confirmation", "error"]
    assert done.returncode == Exit.CONFIRMATION_NEEDED


def test_quiet_says_nothing_when_all_is_well(site: Site) -> None:
    done = site.run("--auto", "--yes", "--output", "quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_detaches_and_the_work_goes_on_to_its_end(site: Site) -> None:
    site.scenario(waits=True)
    with site.running("--auto", "--yes") as auto:
        wait_for(auto.stderr, "disk at 80 %")
        auto.send_signal(signal.SIGINT)
        _, err = auto.communicate(timeout=30)
        assert auto.returncode == Exit.INTERRUPTED
    assert "eagle3-console attach" in err and "eagle3-console stop" in err
    assert site.pilot().state == "running"
    with site.running("attach") as attached:
        wait_for(attached.stderr, "disk at 80 %")
        site.release()
        out, _ = attached.communicate(timeout=30)
        assert attached.returncode == 0
    assert "12,345" in out
    assert site.pilot().state == "succeeded"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_terminated_follower_leaves_the_work_alone(site: Site, number: signal.Signals, code: int) -> None:
    site.scenario(waits=True)
    with site.running("--auto", "--yes") as auto:
        wait_for(auto.stderr, "disk at 80 %")
        auto.send_signal(number)
        auto.communicate(timeout=30)
        assert auto.returncode == code
    assert site.pilot().state == "running"


def test_stop_on_interrupt_stops_the_work(site: Site) -> None:
    site.scenario(waits=True)
    with site.running("--auto", "--yes", "--stop-on-interrupt") as auto:
        wait_for(auto.stderr, "disk at 80 %")
        auto.send_signal(signal.SIGINT)
        auto.communicate(timeout=60)
        assert auto.returncode == Exit.INTERRUPTED
    assert site.pilot().state == "cancelled"
    assert AuditLog(site.home.audit).entries()[-1].who == session.operator()["who"]


def test_a_timeout_ends_the_following_and_not_the_work(site: Site) -> None:
    site.scenario(waits=True)
    site.run("--auto", "--yes", "--detach")
    done = site.run("attach", "--timeout", "1s")
    assert done.returncode == Exit.TIMEOUT
    assert "timeout: detached, the work goes on" in done.stderr
    assert site.pilot().state == "running"


def test_a_dead_agent_is_a_lost_connection_and_the_work_goes_on(site: Site) -> None:
    site.scenario(waits=True)
    with site.running("--auto", "--yes") as auto:
        wait_for(auto.stderr, "disk at 80 %")
        agents = [seen.pid for seen in identity.all_processes().values() if seen.ppid == auto.pid]
        assert len(agents) == 1
        os.kill(agents[0], signal.SIGKILL)
        _, err = auto.communicate(timeout=60)
        assert auto.returncode == Exit.CONNECTION_LOST, err
    assert site.pilot().state == "running"


def test_the_same_plan_is_attached_to_not_started_twice(site: Site) -> None:
    site.scenario(waits=True)
    first = site.run("--auto", "--yes", "--detach")
    assert first.returncode == 0
    assert first.stdout.split() == [site.home.pipelines()[0].id]
    with site.running("--auto", "--yes") as second:
        wait_for(second.stderr, "already running")
        site.release()
        second.communicate(timeout=30)
        assert second.returncode == 0
    assert len(site.home.pipelines()) == 1


def test_another_plan_is_refused_while_a_pilot_has_control(site: Site) -> None:
    site.scenario(waits=True)
    site.run("--auto", "--yes", "--detach")
    other = site.run("--auto", "--yes", "--only", "extract")
    assert other.returncode == Exit.CONTROL_HELD
    assert site.home.pipelines()[0].id in other.stderr
    assert len(site.home.pipelines()) == 1


def test_a_failed_pipeline_is_resumed_by_a_new_pilot_in_the_same_folder(site: Site) -> None:
    site.scenario(code=1)
    assert site.run("--auto", "--yes").returncode == 1
    site.scenario(code=0)
    again = site.run("--auto", "--yes", "--allow", "extract", "--output", "jsonl")
    assert again.returncode == 0
    records = checked(again.stdout.splitlines())
    assert records[1]["data"]["how"] == "resumed"  # type: ignore[index]
    assert [r["event"] for r in records].count("pipeline_started") == 1, "the history of the first pilot is not news"
    assert len(site.home.pipelines()) == 1
    assert site.pilot(2).state == "succeeded"
    order = json.loads((site.home.pipelines()[0].path / "pilot/attempts/2/order.json").read_text())
    assert order["consent"] == {"yes": True, "allow": ["extract"]}, "what was agreed to now, not at the first start"


def test_a_killed_pilot_does_not_hold_control_for_another_minute(site: Site) -> None:
    site.scenario(waits=True)
    site.run("--auto", "--yes", "--detach")
    job = site.pilot().job
    assert job is not None
    os.kill(job.pid, signal.SIGKILL)
    attached = site.run("attach")
    assert attached.returncode == Exit.NEEDS_HUMAN, "the work needs somebody who starts again"
    assert "the pilot was killed (signal 9); the running stage goes on" in attached.stderr
    site.scenario()
    assert site.run("--auto", "--yes", "--only", "extract").returncode == 0


def test_missing_consent_starts_nothing_and_names_the_flags(site: Site) -> None:
    site.plan([STAGES[0], CAUTIOUS])
    refused = site.run("--auto", "--yes")
    assert refused.returncode == Exit.CONFIRMATION_NEEDED
    assert "--allow extract" in refused.stderr
    assert site.home.pipelines() == ()
    assert site.run("--auto", "--yes", "--allow", "extract").returncode == 0


def test_a_mistyped_allow_is_an_error_although_nothing_needed_it(site: Site) -> None:
    done = site.run("--auto", "--yes", "--allow", "extarct")
    assert done.returncode == Exit.USAGE
    assert "extarct" in done.stderr


def test_dry_run_and_nothing_to_do_start_nothing(site: Site) -> None:
    assert site.run("--auto", "--dry-run").returncode == 0
    site.plan(nothing_to_do=True)
    done = site.run("--auto", "--yes")
    assert done.returncode == 0 and "Nothing to do" in done.stderr
    assert site.home.pipelines() == ()


def test_a_saved_plan_runs_while_it_is_true_and_is_refused_when_stale(site: Site) -> None:
    saved = site.folder / "saved.json"
    saved.write_text(site.run("plan", "--output", "json").stdout)
    site.plan([{**STAGES[0], "action": "run"}, STAGES[1]])
    stale = site.run("--auto", "--yes", "--plan", str(saved))
    assert stale.returncode == Exit.CONFIRMATION_NEEDED
    assert "merge (skip → run)" in stale.stderr
    assert site.home.pipelines() == ()
    site.plan()
    assert site.run("--auto", "--yes", "--plan", str(saved)).returncode == 0


def test_stop_ends_the_pilot_only_with_consent_and_leaves_an_audit_trail(site: Site) -> None:
    site.scenario(waits=True)
    site.run("--auto", "--yes", "--detach")
    assert site.run("status", "--idle").returncode == Exit.CONFIRMATION_NEEDED
    assert site.run("stop").returncode == Exit.CONFIRMATION_NEEDED
    assert site.pilot().state == "running"
    assert site.run("stop", "--yes").returncode == 0
    assert site.pilot().state == "cancelled"
    assert site.run("status", "--idle").returncode == 0
    assert site.run("attach").returncode == Exit.STAGE_FAILED
    trail = [(entry.action, entry.phase) for entry in AuditLog(site.home.audit).entries()]
    assert trail == [("start", "before"), ("start", "after"), ("stop", "before"), ("stop", "after")]


def test_status_and_logs_show_what_is_there_clean(site: Site) -> None:
    site.run("--auto", "--yes")
    status = site.run("status")
    assert "pilot ✓ done" in status.stdout
    assert json.loads(site.run("status", "--output", "json").stdout)["pipelines"][0]["pilot"]["code"] == 0
    log = site.run("logs", "pilot")
    assert log.stdout == "pilot speaks red\n"
    wrong = site.run("logs", "merge")
    assert wrong.returncode == Exit.USAGE and "was not attempted" in wrong.stderr


def hand_made(site: Site, script: str) -> Attempt:
    """A pipeline whose pilot is a supervised shell."""
    pipeline = site.home.create().pipeline("HANDMADE").create()
    attempt = Attempt(pipeline.path / "pilot/attempts/1").create()
    write_spec(attempt.path, argv=["/bin/sh", "-c", script], cwd=site.folder, subreaper=False, grace_s=0.5)
    start(attempt.path)
    return attempt


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 7", 7, ("the pilot ended with code 7", "logs pilot")),
        ("exit 0", 0, ()),
        ("exit 42", Exit.STAGE_FAILED, ("the pilot ended with code 42", "logs pilot")),
        ("kill -9 $$", Exit.NEEDS_HUMAN, ("the pilot was killed", "start again to take it over")),
    ],
)
def test_attach_returns_what_the_exit_record_proves(site: Site, script: str, code: int, words: tuple[str, ...]) -> None:
    hand_made(site, script)
    attached = site.run("attach")
    assert attached.returncode == code
    assert all(word in attached.stderr for word in words)


def test_an_interpreter_that_cannot_be_executed_is_named(site: Site) -> None:
    site.config.write_text(site.config.read_text().replace("interpreter", "no-such-python"))
    done = site.run("--auto", "--yes")
    assert done.returncode == Exit.USAGE
    assert "no-such-python" in done.stderr and "[host] python" in done.stderr


def test_a_pilot_whose_supervisor_was_killed_needs_a_human(site: Site) -> None:
    attempt = hand_made(site, "read line < gate")
    supervisor = state(attempt.path).supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    attached = site.run("attach")
    assert attached.returncode == Exit.NEEDS_HUMAN
    assert "supervisor_died" in attached.stderr and "lives on" in attached.stderr
    assert site.run("status", "--idle").returncode == Exit.CONFIRMATION_NEEDED, "the job lives on"


def test_logs_follow_prints_the_last_line_of_a_stage_that_ends(site: Site) -> None:
    hand_made(site, "echo first; read line < gate; printf 'last, without newline'")
    with site.running("logs", "pilot", "-f") as logs:
        wait_for(logs.stdout, "first")
        site.release()
        out, _ = logs.communicate(timeout=30)
        assert (logs.returncode, out) == (0, "last, without newline\n")


def test_an_error_of_the_host_arrives_with_its_own_code_and_words(site: Site) -> None:
    done = site.run("explain", "nonsense")
    assert done.returncode == Exit.USAGE
    assert "no such stage" in done.stderr and "one line of narration" in done.stderr


def test_closed_output_is_an_interrupt_not_a_traceback(site: Site) -> None:
    with site.running("--auto", "--yes", "--output", "jsonl") as auto:
        assert auto.stdout is not None
        auto.stdout.close()
        assert auto.stderr is not None
        assert "Traceback" not in auto.stderr.read()
        assert auto.wait(30) == Exit.INTERRUPTED


def on_a_terminal(site: Site, answer: bytes, *words: str) -> tuple[int, str]:
    """Run on a pseudo-terminal, answer the first question with `answer`; exit code and everything drawn."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "console.cli", *words],
        cwd=site.folder,
        env={**site.environ(), "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    drawn, asked = b"", False
    while select.select([master], [], [], 60)[0]:
        try:
            drawn += os.read(master, 65536)
        except OSError:  # the other end is closed: the command has ended
            break
        if not asked and b"agree: " in drawn:
            os.write(master, answer + b"\n")
            asked = True
    os.close(master)
    return process.wait(30), drawn.decode()


def test_on_a_terminal_a_costly_step_is_agreed_to_by_its_typed_name(site: Site) -> None:
    site.plan([STAGES[0], CAUTIOUS])
    code, drawn = on_a_terminal(site, b"extract", "--auto")
    assert code == 0, drawn
    assert "stops pid 4711" in drawn
    assert "✓ done" in drawn and "12,345" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") > 0, "the cursor is given back"
    assert "\x1b]" not in drawn, "a log line must not rename the window"


def test_on_a_terminal_anything_else_than_the_name_is_a_no(site: Site) -> None:
    site.plan([STAGES[0], CAUTIOUS])
    code, _ = on_a_terminal(site, b"y", "--auto")
    assert code == Exit.CONFIRMATION_NEEDED
    assert site.home.pipelines() == ()
