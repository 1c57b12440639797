"""Where everything stands on the host: home, pipelines, stages, attempts, as frozen path objects.

Owns the names of all files of a run directory and the allocation of attempts (one directory = one attempt, a retry is
a new directory). An attempt may stand anywhere: bench nests its servers inside its own. Knows no file's content.

    <home>/allow.json  audit.jsonl  locks/{gpu.lock,operator.json}  agent/
    <home>/pipelines/<id>/{plan.json,events.jsonl,lock}
    <home>/pipelines/<id>/stages/<nn-name>/{current -> attempts/3, attempts/3/…}
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backend.errors import Refused, UsageError

HOME_VARIABLE = "EAGLE3_HOME"
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_STAGE_DIR = re.compile(r"(\d\d)-([0-9A-Za-z][0-9A-Za-z._-]{0,63})")


def new_ulid() -> str:
    """A 26-character id, sortable by time (48 bits of milliseconds, 80 random bits)."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -5, -5))


def _plain(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{what} {name!r} is not a plain name", fix="use letters, digits, '.', '_' and '-'")
    return name


@dataclass(frozen=True)
class Home:
    """`$EAGLE3_HOME`. Making the object checks an existing folder and creates nothing; `create` makes it, mode 0700.

    Raises Refused (`insecure_home`) for a folder that others may write or that is not ours: whoever can write there
    can make us run and delete things.
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())
        self._check()

    def _check(self) -> None:
        try:
            info = self.path.stat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(info.st_mode):
            raise UsageError(
                f"the state folder {self.path} is not a folder",
                fix=f"name another one by [host] home or ${HOME_VARIABLE}",
                reason="bad_home",
            )
        if info.st_uid != os.geteuid():
            raise Refused(
                f"{self.path} belongs to uid {info.st_uid}, we are uid {os.geteuid()}",
                fix=f"choose a folder of your own with ${HOME_VARIABLE}",
                reason="insecure_home",
            )
        if info.st_mode & 0o022:
            raise Refused(
                f"{self.path} can be written by others (mode {stat.S_IMODE(info.st_mode):04o})",
                fix=f"chmod go-w {self.path}",
                reason="insecure_home",
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Home:
        """`$EAGLE3_HOME`, else `$XDG_STATE_HOME/eagle3-console`, else `~/.local/state/eagle3-console`."""
        if environ.get(HOME_VARIABLE):
            return cls(Path(environ[HOME_VARIABLE]))
        state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or Path.home()) / ".local/state"
        return cls(Path(state) / "eagle3-console")

    def create(self) -> Home:
        """Make the folder and its fixed children, mode 0700; an existing one is checked. Returns itself."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check()
            for child in (self.locks, self.agents, self.path / "pipelines"):
                child.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the state folder {self.path} cannot be used: {error.strerror}",
                fix=f"choose a folder of your own with room, by [host] home or ${HOME_VARIABLE}",
                reason="bad_home",
            ) from error
        return self

    @property
    def locks(self) -> Path:
        """The folder of locks and of the lease."""
        return self.path / "locks"

    @property
    def agents(self) -> Path:
        """Uploaded agents, named by content."""
        return self.path / "agent"

    @property
    def gpu_lock(self) -> Path:
        """Held by the one supervisor whose job uses the GPUs."""
        return self.locks / "gpu.lock"

    @property
    def operator(self) -> Path:
        """The operator lease."""
        return self.locks / "operator.json"

    @property
    def allow(self) -> Path:
        """Roots below which things may be deleted."""
        return self.path / "allow.json"

    @property
    def audit(self) -> Path:
        """Append-only record of every change that an operator asked for."""
        return self.path / "audit.jsonl"

    @property
    def hashes(self) -> Path:
        """Cache of content hashes."""
        return self.path / "hashes.json"

    def pipeline(self, pipeline_id: str) -> Pipeline:
        """The pipeline of that id, existing or not."""
        return Pipeline(self.path / "pipelines" / _plain(pipeline_id, "pipeline id"))

    def pipelines(self) -> tuple[Pipeline, ...]:
        """All pipelines, oldest id first."""
        return tuple(Pipeline(path) for path in _folders(self.path / "pipelines") if _NAME.fullmatch(path.name))


@dataclass(frozen=True)
class Pipeline:
    """One pipeline's folder."""

    path: Path

    @property
    def id(self) -> str:
        """Its id, which is its folder's name."""
        return self.path.name

    @property
    def plan(self) -> Path:
        """The frozen plan; never rewritten."""
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        """Events of the pipeline, written by whoever holds `lock`."""
        return self.path / "events.jsonl"

    @property
    def skipped(self) -> Path:
        """What the pilot passed over, and why; the events say it too, but are long."""
        return self.path / "skipped.json"

    @property
    def lock(self) -> Path:
        """Held by the one process that drives the pipeline."""
        return self.path / "lock"

    def create(self) -> Pipeline:
        """Make the folder, mode 0700. Returns itself."""
        (self.path / "stages").mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    def stages(self) -> tuple[tuple[int, str, Path], ...]:
        """(order, name, folder) of each stage that was ever attempted, in order."""
        found = []
        for path in _folders(self.path / "stages"):
            match = _STAGE_DIR.fullmatch(path.name)
            if match:
                found.append((int(match[1]), match[2], path))
        return tuple(found)

    def stage(self, stage: str) -> Path | None:
        """The folder of a stage by name, or None where it was never attempted."""
        return next((path for _, name, path in self.stages() if name == stage), None)

    def attempts(self, stage: str) -> tuple[Attempt, ...]:
        """All attempts of a stage, oldest first."""
        folder = self.stage(stage)
        if folder is None:
            return ()
        numbers = sorted(int(path.name) for path in _folders(folder / "attempts") if path.name.isdecimal())
        return tuple(Attempt(folder / "attempts" / str(number)) for number in numbers)

    def current(self, stage: str) -> Attempt | None:
        """The attempt that `current` points to: the newest one."""
        folder = self.stage(stage)
        if folder is None:
            return None
        try:
            target = (folder / "current").readlink()
        except FileNotFoundError:
            return None
        return Attempt(folder / target)

    def new_attempt(self, stage: str, order: int = 0) -> Attempt:
        """Allocate the next attempt of a stage (safe against others doing the same) and point `current` at it.

        `order` is the stage's place in the pipeline and part of the folder's name when it is first made.
        """
        folder = self.stage(stage) or self.path / "stages" / f"{order:02d}-{_plain(stage, 'stage')}"
        (folder / "attempts").mkdir(mode=0o700, parents=True, exist_ok=True)
        number = max((int(p.name) for p in _folders(folder / "attempts") if p.name.isdecimal()), default=0) + 1
        while True:
            try:
                (folder / "attempts" / str(number)).mkdir(mode=0o700)
                break
            except FileExistsError:
                number += 1
        link = folder / f".current.{os.getpid()}.{os.urandom(4).hex()}"
        link.symlink_to(f"attempts/{number}")
        link.replace(folder / "current")
        return Attempt(folder / "attempts" / str(number))


@dataclass(frozen=True)
class Attempt:
    """One attempt's folder and the names of its files. `exit.json` is the only proof of an end."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    def create(self) -> Attempt:
        """Make the folder, mode 0700 (for attempts outside a pipeline). Returns itself."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    @property
    def number(self) -> int:
        """The attempt's number; 0 where the folder's name is none."""
        return int(self.path.name) if self.path.name.isdecimal() else 0

    @property
    def stage(self) -> str:
        """The stage's name, or the folder's own name for an attempt outside a pipeline."""
        match = _STAGE_DIR.fullmatch(self.path.parent.parent.name)
        return match[2] if match and self.path.parent.name == "attempts" else self.path.name

    @property
    def pipeline_id(self) -> str:
        """The pipeline's id, or "" for an attempt outside a pipeline."""
        parents = self.path.parents
        inside = len(parents) > 3 and self.path.parent.name == "attempts" and parents[2].name == "stages"
        return parents[3].name if inside else ""

    @property
    def spec(self) -> Path:
        """What to run."""
        return self.path / "spec.json"

    @property
    def lock(self) -> Path:
        """Held by the attempt's supervisor for as long as it lives."""
        return self.path / "lock"

    @property
    def intent(self) -> Path:
        """Written before the job is forked: a start that may have happened."""
        return self.path / "intent.json"

    @property
    def proc(self) -> Path:
        """Written after the job is forked: the only proof of a start."""
        return self.path / "proc.json"

    @property
    def log(self) -> Path:
        """stdout and stderr of the job, append-only."""
        return self.path / "log"

    @property
    def progress(self) -> Path:
        """Latest progress, rewritten at most once a second."""
        return self.path / "progress.json"

    @property
    def events(self) -> Path:
        """Events of the job."""
        return self.path / "events.jsonl"

    @property
    def stop(self) -> Path:
        """Wishes of whoever asks for a stop (grace)."""
        return self.path / "stop.json"

    @property
    def exit(self) -> Path:
        """The only proof of an end."""
        return self.path / "exit.json"

    @property
    def outputs(self) -> Path:
        """What the job made, for verification."""
        return self.path / "outputs.json"

    @property
    def verdict(self) -> Path:
        """The gate's verdict on a service."""
        return self.path / "verdict.json"


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
