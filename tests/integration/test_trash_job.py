"""The job that frees trash: started once where something is pending, and again after it was killed."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.runs.allow import Allow, add_root
from backend.runs.audit import AuditLog
from backend.runs.deletion import UNDO_WINDOW_S, apply_delete, plan_delete
from backend.runs.layout import Attempt, Home
from backend.runs.marker import write_marker
from backend.runs.state import state
from backend.runs.stop import stop
from backend.runs.trash import ensure_job
from tests.integration.runs_support import await_end

pytestmark = pytest.mark.slow


def jobs(home: Home) -> list[Attempt]:
    folder = home.path / "trash" / "attempts"
    return [Attempt(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []


def trashed(home: Home, root: Path) -> Path:
    """A folder that has just gone to trash."""
    (root / "old").mkdir(parents=True)
    (root / "old" / "rows").write_text("x" * 100)
    write_marker(root / "old", "hidden-state-store", "u1", "test")
    add_root(home.create().allow, root)
    plan = plan_delete(root, "old", Allow((root,)), references=())
    return apply_delete(plan, plan.sha, Allow((root,)), references=(), audit=AuditLog(home.audit), who="t").path


def test_there_is_one_job_as_long_as_trash_is_pending_and_none_without(tmp_path: Path) -> None:
    base = Path(os.path.realpath(tmp_path))
    home = Home(base / "state")
    assert not ensure_job(home, sys.executable) and jobs(home) == []
    trash = trashed(home, base / "root")
    try:
        with ThreadPoolExecutor(4) as pool:
            started = list(pool.map(lambda _: ensure_job(home, sys.executable), range(4)))
        assert sorted(started) == [False, False, False, True]
        (job,) = jobs(home)
        assert state(job.path).alive
        stop(job.path, 0)
        assert ensure_job(home, sys.executable), "a job that was killed must not leave the disk full for ever"
        assert len(jobs(home)) == 2 and trash.is_dir(), "the undo window is not over"
    finally:
        for job in jobs(home):
            stop(job.path, 0)


def test_the_job_frees_what_is_past_its_undo_window(tmp_path: Path) -> None:
    base = Path(os.path.realpath(tmp_path))
    home = Home(base / "state")
    trash = trashed(home, base / "root")
    lines = home.audit.read_text()
    made = str(next(entry.facts["time"] for entry in AuditLog(home.audit).entries()))
    home.audit.write_text(lines.replace(f'"time": {made}', f'"time": {float(made) - UNDO_WINDOW_S - 1}'))
    assert ensure_job(home, sys.executable)
    (job,) = jobs(home)
    await_end(state(job.path).supervisor)
    assert state(job.path).state == "succeeded" and not trash.exists()
    assert not ensure_job(home, sys.executable)
