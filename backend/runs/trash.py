"""`python -m backend.runs.trash HOME ATTEMPT`: the detached job that frees trash after its undo window.

Waits until each pending trash may be unlinked and unlinks it, oldest first; an undo in the meantime takes it off the
list. Safe to start twice and to kill: what is left is pending for the next one, which `ensure_job` starts. Its
attempts stand in `<home>/trash/attempts/<n>`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from backend.errors import OperatorError
from backend.runs import allow
from backend.runs.audit import AuditLog
from backend.runs.deletion import pending_trash, purge_trash
from backend.runs.events import AttemptReporter
from backend.runs.layout import Attempt, Home
from backend.runs.locks import exclusive
from backend.runs.spec import write_spec
from backend.runs.state import state
from backend.runs.supervisor import start

IDLE_IO = 3 << 13  # IOPRIO_CLASS_IDLE: freeing old data must not slow the extraction that it makes room for
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def ensure_job(home: Home, python: str) -> bool:
    """See that pending trash has a job that frees it; True if one was started now.

    Does nothing where nothing is pending or a job lives, so it can be called at any time, by several at once.

    Raises:
        OperatorError: the job cannot be started.
    """
    with exclusive(home.create().locks / "trash.lock"):
        if not pending_trash(AuditLog(home.audit)):
            return False
        attempts = _attempts(home)
        newest = state(attempts[-1].path) if attempts else None
        if newest is not None and (newest.alive or newest.job_alive):
            return False
        number = attempts[-1].number + 1 if attempts else 1
        job = Attempt(_folder(home) / str(number)).create()
        write_spec(job.path, argv=[python, "-m", "backend.runs.trash", str(home.path), str(job.path)])
        start(job.path)
        return True


def _folder(home: Home) -> Path:
    return home.path / "trash" / "attempts"


def _attempts(home: Home) -> list[Attempt]:
    """Jobs so far, oldest first."""
    folder = _folder(home)
    found = (Attempt(path) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((attempt for attempt in found if attempt.number), key=lambda attempt: attempt.number)


def empty(home: Home, attempt: Path) -> int:
    """Purge everything pending; returns the exit code. A refused purge stays pending and is named in the log."""
    audit, failed = AuditLog(home.audit), 0
    refused: set[str] = set()
    with AttemptReporter(attempt) as reporter:
        while waiting := [trash for trash in pending_trash(audit) if str(trash.path) not in refused]:
            trash = min(waiting, key=lambda item: item.undo_until)
            time.sleep(max(0.0, trash.undo_until - time.time()))
            if str(trash.path) not in {str(item.path) for item in pending_trash(audit)}:
                continue  # undone while we waited
            try:
                purge_trash(trash, allow.load(home.allow), audit=audit, who="empty-trash", reporter=reporter)
            except OperatorError as error:
                reporter.warning(f"{trash.path} is not freed: {error.what}")
                refused.add(str(trash.path))
                failed += 1
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    """Run in the lowest priority for processor and disk."""
    os.nice(19)
    _idle_disk_priority()
    return empty(Home(Path(argv[0])), Path(argv[1]))


def _idle_disk_priority() -> None:
    """Best effort: where the kernel has no I/O scheduler the call changes nothing."""
    import ctypes

    number = IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, IDLE_IO)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
