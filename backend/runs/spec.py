"""What a supervised attempt is to run: `spec.json`, written once by the caller before the start.

Owns the format. Secrets never stand in it: they travel as a dict into `supervisor.start` and from there only into the
job's environment. Knows nothing of how the job is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.errors import OperatorError, Refused, UsageError
from backend.runs.atomic import read_json, write_json
from backend.runs.layout import Attempt, new_ulid

_SECRET = re.compile(r"(?i)(^|_)(token|secret|password|passwd|api_?key)$")


@dataclass(frozen=True)
class Spec:
    """One command with everything that its supervisor must know.

    `grace_s` is the time between SIGTERM and SIGKILL. `subreaper=False` is for a job whose own supervised attempts
    must outlive it (the pilot). `gpu_lock` is the lock file to hold while the job lives, or None. A `service` is
    ready once a verdict with the same `launch_id` stands in its attempt, and ends only by a stop.
    """

    run_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    grace_s: float = 30.0
    subreaper: bool = True
    gpu_lock: str | None = None
    service: bool = False
    launch_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, as in `spec.json`."""
        return {**asdict(self), "argv": list(self.argv), "env": dict(self.env)}


def write_spec(
    attempt_dir: Path,
    *,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: Path | str = "/",
    run_id: str | None = None,
    grace_s: float = 30.0,
    subreaper: bool = True,
    gpu_lock: Path | None = None,
    service: bool = False,
    launch_id: str | None = None,
) -> Spec:
    """Write `spec.json` (mode 0600) into an attempt; `run_id` is a new ULID unless the client chose one.

    Writing the same spec again changes nothing; another one is Refused (`spec_exists`), because an attempt is one
    start. Raises UsageError for an empty command or a relative `cwd`, Refused (`secret_in_spec`) for a variable
    whose name says that it is a secret.
    """
    attempt = Attempt(attempt_dir)
    old = read_json(attempt.spec)
    spec = Spec(
        run_id=run_id or (str(old["run_id"]) if old else new_ulid()),
        argv=tuple(str(word) for word in argv),
        env=dict(env or {}),
        cwd=os.fspath(cwd),
        grace_s=grace_s,
        subreaper=subreaper,
        gpu_lock=None if gpu_lock is None else str(gpu_lock.absolute()),
        service=service,
        launch_id=launch_id,
    )
    _check(spec)
    if old is not None:
        if old != spec.as_json():
            raise Refused(
                f"{attempt.spec} holds another command already",
                fix="a retry is a new attempt directory",
                reason="spec_exists",
            )
        return spec
    attempt.create()
    write_json(attempt.spec, spec.as_json())
    return spec


def _check(spec: Spec) -> None:
    if not spec.argv or not spec.argv[0]:
        raise UsageError("the command is empty", reason="bad_spec")
    if not Path(spec.cwd).is_absolute():
        raise UsageError(f"cwd {spec.cwd!r} is not absolute", reason="bad_spec")
    if not spec.grace_s >= 0:
        raise UsageError(f"grace_s is {spec.grace_s}, must be 0 or more", reason="bad_spec")
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"environment variable {name!r} has a name or value that cannot be set", reason="bad_spec")
        if _SECRET.search(name):
            raise Refused(
                f"{name} looks like a secret and must not stand in spec.json",
                fix="pass it in `secrets` of the start: it then goes only into the job's environment",
                reason="secret_in_spec",
            )


def read_spec(attempt_dir: Path) -> Spec:
    """The spec of an attempt. Raises OperatorError (`no_spec`) where there is none."""
    path = Attempt(attempt_dir).spec
    data = read_json(path)
    if data is None:
        raise OperatorError(f"{path} does not exist: nothing to run", reason="no_spec")
    try:
        return Spec(**{**data, "argv": tuple(data["argv"])})
    except (TypeError, KeyError) as error:
        raise OperatorError(f"{path} is not a spec of this version: {error}", reason="bad_spec") from error
