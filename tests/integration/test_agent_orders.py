"""The agent's mutating verbs as real processes: a start is never doubled nor lost, a stop acts on what was seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.agent.protocol import PROTOCOL, Request, encode, pack
from backend.errors import Exit
from backend.runs import lease
from backend.runs.layout import Attempt, new_ulid
from backend.runs.spec import write_spec
from backend.runs.state import state
from backend.runs.stop import stop
from backend.runs.supervisor import start
from tests.integration.cli_site import STAGES, Site

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.scenario(waits=True)
    yield site
    site.close()


def order(site: Site, pipeline: str, key: str = "same") -> dict[str, Any]:
    plan = {"key": key, "name": "tiny", "python": str(site.folder / "interpreter"), "stages": STAGES}
    return {
        "home": str(site.home.path),
        "pipeline_id": pipeline,
        "plan": plan,
        "consent": {"yes": True, "allow": []},
        "operator": {"who": "ann", "host": "laptop"},
    }


def agent(site: Site, verb: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "backend.agent", verb],
        cwd=site.folder,
        env={**os.environ, "PYTHONPATH": ROOT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ask(site: Site, verb: str, args: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """One verb as a script would call it."""
    process = agent(site, verb)
    out, _ = process.communicate(json.dumps(args).encode(), timeout=60)
    return process.returncode, json.loads(out)


def pilots(site: Site) -> list[Path]:
    return sorted(site.home.path.glob("pipelines/*/pilot/attempts/*"))


def test_many_starts_of_one_wish_at_once_make_one_pilot(site: Site) -> None:
    """Two terminals, a double click, a retry after a lost answer: the same plan is one pipeline."""
    starts = [agent(site, "start") for _ in range(6)]
    for process in starts:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order(site, new_ulid())).encode())
        process.stdin.close()
    answers = []
    for process in starts:
        assert process.stdout is not None
        answers.append(json.loads(process.stdout.read()))
        assert process.wait(60) == 0
    assert sorted(answer["how"] for answer in answers) == ["attached"] * 5 + ["started"]
    assert len({answer["id"] for answer in answers}) == 1
    assert len(pilots(site)) == 1


def test_the_same_start_sent_again_is_the_same_start_also_after_its_end(site: Site) -> None:
    wish = order(site, new_ulid())
    assert ask(site, "start", wish)[1]["how"] == "started"
    assert ask(site, "start", wish)[1]["how"] == "attached"
    site.close()
    assert ask(site, "start", wish)[1] == {
        "id": wish["pipeline_id"],
        "how": "attached",
        "attached": True,
        "attempt": 1,
        "offset": 0,
    }
    assert len(pilots(site)) == 1


def test_a_start_is_carried_out_although_the_console_died_right_after_sending_it(site: Site) -> None:
    wish = order(site, new_ulid())
    process = agent(site, "serve")
    hello = {"protocol": PROTOCOL, "home": wish["home"]}
    wire = encode(Request(1, "hello", pack(hello))) + encode(Request(2, "start", pack(wish)))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(wire)
    process.stdin.flush()
    while not list(site.home.path.glob("pipelines/*/plan.json")):  # the thread is at work: now the console dies
        assert process.poll() is None
    process.stdin.close()
    process.stdout.close()
    process.wait(60)
    assert site.pilot().state == "running"


def test_a_person_who_has_control_is_not_overrun_and_is_named(site: Site) -> None:
    held = lease.acquire(site.home.create().operator, "bo", "desk", os.getpid())
    code, answer = ask(site, "start", order(site, new_ulid()))
    assert (code, answer["reason"]) == (Exit.CONTROL_HELD, "lease_held")
    assert "bo" in answer["what"]
    assert pilots(site) == []
    lease.release(site.home.operator, held.id)
    assert ask(site, "start", order(site, new_ulid()))[0] == 0


def test_a_start_that_fails_gives_control_back(site: Site) -> None:
    wish = order(site, new_ulid())
    wish["plan"]["python"] = ""
    code, answer = ask(site, "start", wish)
    assert (code, answer["reason"]) == (Exit.USAGE, "bad_spec")
    assert lease.current(site.home.operator) is None


def test_a_stop_by_an_operator_with_an_old_picture_stops_nothing(site: Site) -> None:
    pipeline = new_ulid()
    ask(site, "start", order(site, pipeline))
    stop = {"home": str(site.home.path), "pipeline": pipeline, "operator": {"who": "ann", "host": "laptop"}}
    for seen in ({"attempt": 2, "state": "running"}, {"attempt": 1, "state": "succeeded"}):
        code, answer = ask(site, "stop", {**stop, "expect": [{"stage": "pilot", **seen}]})
        assert (code, answer["reason"]) == (Exit.CONFIRMATION_NEEDED, "changed")
        assert site.pilot().state == "running"
    code, answer = ask(site, "stop", {**stop, "expect": [{"stage": "pilot", "attempt": 1, "state": "running"}]})
    assert [(part["stage"], part["state"]) for part in answer["stopped"]] == [("pilot", "cancelled")]
    assert lease.current(site.home.operator) is None, "a stopped pipeline holds no control"


@pytest.fixture
def orphans(site: Site) -> Iterator[dict[str, Attempt]]:
    """A task (extract) and a service without its proof (launch) of a pipeline whose pilot was killed."""
    pipeline = new_ulid()
    wish = order(site, pipeline)
    wish["plan"]["stages"] = [*STAGES, {"name": "launch", "kind": "service"}]
    ask(site, "start", wish)
    job = site.pilot().job
    assert job is not None
    os.kill(job.pid, signal.SIGKILL)
    made = {name: site.home.pipeline(pipeline).new_attempt(name) for name in ("extract", "launch")}
    for attempt in made.values():
        write_spec(attempt.path, argv=["sleep", "1000"], grace_s=0.5)
        start(attempt.path)
    ask_end = {"home": str(site.home.path), "pipeline": pipeline}
    agent(site, "watch").communicate(json.dumps(ask_end).encode(), timeout=60)
    yield made
    for attempt in made.values():
        stop(attempt.path, 0.5)


def test_no_pipeline_starts_beside_a_task_that_outlived_its_pilot(site: Site, orphans: dict[str, Attempt]) -> None:
    """A killed pilot and a changed config: two pipelines would fight over one server."""
    other = site.home.pipelines()[0].id
    code, answer = ask(site, "start", order(site, new_ulid(), key="another"))
    assert (code, answer["reason"]) == (Exit.CONTROL_HELD, "stage_running")
    assert f"stage extract of pipeline {other} of ann" in answer["what"]
    assert f"eagle3-console stop --pipeline {other}" in answer["fix"]
    ask(site, "stop", {"home": str(site.home.path), "pipeline": other, "operator": {"who": "ann", "host": "laptop"}})
    assert state(orphans["extract"].path).state == "cancelled"
    assert state(orphans["launch"].path).alive, "a stop without --services leaves the server, proven or not"
    assert ask(site, "start", order(site, new_ulid(), key="another"))[0] == 0, "a service stands in nobody's way"


def test_the_same_plan_takes_over_what_outlived_its_pilot(site: Site, orphans: dict[str, Attempt]) -> None:
    code, answer = ask(site, "start", order(site, new_ulid()))
    assert (code, answer["how"], answer["id"]) == (0, "resumed", site.home.pipelines()[0].id)
    assert state(orphans["extract"].path).alive


def test_names_with_any_bytes_reach_the_plan_unchanged(site: Site) -> None:
    """User data travels in bodies: no quoting, no shell, no command line on the way."""
    odd = "'; rm -rf / #\n\t\x07 é 漢 $(touch x) \"\\"
    wish = order(site, new_ulid())
    wish["plan"]["config"] = {"paths": [odd]}
    wish["operator"] = {"who": odd, "host": odd}
    code, _ = ask(site, "start", wish)
    assert code == 0
    frozen = json.loads((pilots(site)[0] / "order.json").read_text(encoding="utf-8"))
    assert frozen["config"]["paths"] == [odd]


def test_log_and_watch_print_the_bytes_of_the_files(site: Site) -> None:
    pipeline = new_ulid()
    ask(site, "start", order(site, pipeline))
    site.release()
    process = agent(site, "watch")
    out, _ = process.communicate(json.dumps({"home": str(site.home.path)}).encode(), timeout=60)
    assert out == site.home.pipeline(pipeline).events.read_bytes() != b""
    process = agent(site, "log")
    out, _ = process.communicate(json.dumps({"home": str(site.home.path), "stage": "pilot"}).encode(), timeout=60)
    assert out == b"pilot speaks \x1b[31mred\x1b[0m\n"


def test_snapshot_tells_pilot_stages_and_what_the_plan_leaves_out(site: Site) -> None:
    pipeline = new_ulid()
    ask(site, "start", order(site, pipeline))
    _, answer = ask(site, "snapshot", {"home": str(site.home.path)})
    (seen,) = answer["pipelines"]
    assert (seen["id"], seen["pilot"]["state"], seen["operator"]["who"]) == (pipeline, "running", "ann")
    assert [(stage["name"], stage["state"]) for stage in seen["stages"]] == [
        ("merge", "skipped"),
        ("extract", "pending"),
    ]


@pytest.mark.parametrize(("stdin", "reason"), [(b"{nope", "bad_request"), (b"[]", "bad_request")])
def test_a_script_gets_errors_as_json_with_their_code(site: Site, stdin: bytes, reason: str) -> None:
    process = agent(site, "snapshot")
    out, err = process.communicate(stdin, timeout=60)
    assert process.returncode == Exit.USAGE
    assert json.loads(out)["reason"] == reason
    assert err.strip()
