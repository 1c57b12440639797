"""The verdict of the readiness gate: what was proven, how fast the server was, and whether that can be true.

Owns the gate's settings, the verdict (a value, JSON in and out), the rule that makes a fast start SUSPECT, and the
sentence that says why a start was fast or slow. Pure: it is given measurements and makes none. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backend.report import Check

IMPORT_FLOOR_S = 6.0
"""No SGLang start is faster: parent and scheduler import torch, transformers and sglang one after the other. Measured
with every cache warm: 17 s on 2 CPU cores, 28 s (15 + 13) on an H200 host; see docs/gate.md."""
RANK_BYTES_PER_S = 8e9
"""Generous rate of one rank for page cache → checked tensors → device; loaders reach a third of it."""
CLOCK_SLACK_S = 1.0
"""A listener may seem this much older than its launch: the launch time is taken around a fork, in another process."""


@dataclass(frozen=True)
class GateSettings:
    """How long the gate tries: attempts × interval or the deadline, whichever comes first. Times in seconds.

    `probe_timeout_s` stands above the 20 s after which SGLang itself answers 503, so that a slow first prefill is not
    taken for a dead server. `answer_timeout_s` bounds each real request once the server is healthy. `warn_after_s` says
    when to tell the operator that loading takes long, and goes on.
    """

    attempts: int = 60
    interval_s: float = 10.0
    deadline_s: float = 600.0
    probe_timeout_s: float = 25.0
    stability_s: float = 10.0
    warn_after_s: float | None = None
    answer_timeout_s: float = 120.0


@dataclass(frozen=True)
class ServerProcess:
    """The process that was launched, as its launcher recorded it.

    `pid` is the attempt's supervisor, or the server's first process; `started_at` are epoch seconds; `exit_path` is
    the file that appears when the attempt has ended; `port_was_closed` was seen immediately before the launch.
    """

    pid: int
    start_ticks: int
    log: Path
    started_at: float
    exit_path: Path
    port_was_closed: bool


@dataclass(frozen=True)
class ListenerFacts:
    """Who answers on the port: `started_at` in epoch seconds, `age_s` at the time of the look."""

    pid: int
    started_at: float
    age_s: float
    command: str

    @property
    def started(self) -> str:
        """Start time, ISO 8601 in UTC."""
        return iso(self.started_at)

    def __str__(self) -> str:
        return f"pid {self.pid}, started {self.started} ({self.age_s:.0f} s ago): {self.command}"


@dataclass(frozen=True)
class Verdict:
    """The gate's answer. `ok` = every check that could be made passed; `suspicions` = reasons not to believe it.

    `ready_after_s` runs from the launch to the first 200 of /health, None when there was none; `read_bytes` is what the
    server's processes had fetched from disk by then, None where the kernel would not say.
    """

    ok: bool
    launch_id: str
    ready_after_s: float | None
    listener: ListenerFacts | None
    checks: tuple[Check, ...]
    suspicions: tuple[str, ...]
    weight_bytes: int
    read_bytes: int | None
    polls: int
    load_lines: tuple[str, ...]
    why: str
    canary_digest: str | None = None

    @property
    def suspect(self) -> bool:
        """Whether something does not add up, even where every check passed."""
        return bool(self.suspicions)

    @property
    def failed(self) -> Check | None:
        """The check that ended the gate, None when it passed."""
        return next((check for check in self.checks if check.ok is False), None)

    @property
    def word(self) -> str:
        """READY, SUSPECT or FAILED."""
        if not self.ok:
            return "FAILED"
        return "SUSPECT" if self.suspect else "READY"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; derived values stand in it for readers that are not Python."""
        listener = None if self.listener is None else {**asdict(self.listener), "started": self.listener.started}
        return {
            **asdict(self),
            "listener": listener,
            "checks": [check.as_json() for check in self.checks],
            "suspicions": list(self.suspicions),
            "load_lines": list(self.load_lines),
            "suspect": self.suspect,
            "word": self.word,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Rebuild what `as_json` wrote; derived values are derived again. Raises KeyError on a foreign object."""
        listener = data["listener"]
        return cls(
            ok=bool(data["ok"]),
            launch_id=str(data["launch_id"]),
            ready_after_s=data["ready_after_s"],
            listener=None
            if listener is None
            else ListenerFacts(listener["pid"], listener["started_at"], listener["age_s"], listener["command"]),
            checks=tuple(Check(**check) for check in data["checks"]),
            suspicions=tuple(data["suspicions"]),
            weight_bytes=int(data["weight_bytes"]),
            read_bytes=data["read_bytes"],
            polls=int(data["polls"]),
            load_lines=tuple(data["load_lines"]),
            why=str(data["why"]),
            canary_digest=data["canary_digest"],
        )

    def text(self) -> str:
        """The verdict for people: one headline, the reason, and one line a check."""
        after = "" if self.ready_after_s is None else f" after {self.ready_after_s:.1f} s"
        if self.failed is not None:
            head = f"{self.failed.name}{after and f' (/health was 200{after})'}"
        else:
            head = f"ready{after}"
        lines = [f"{self.word}: {head}, launch {self.launch_id}", self.why]
        lines += [f"suspect: {reason}" for reason in self.suspicions]
        lines += [f"listener: {self.listener}"] if self.listener else []
        lines += [f"  {_MARKS[check.ok]} {check.name}: {check.evidence}" for check in self.checks]
        lines += [f"    fix: {check.fix}" for check in self.checks if check.ok is False and check.fix]
        return "\n".join(lines)


_MARKS = {True: "ok  ", False: "FAIL", None: "n/a "}


def iso(epoch: float) -> str:
    """Epoch seconds as ISO 8601, UTC, whole seconds."""
    return datetime.fromtimestamp(epoch, UTC).isoformat(timespec="seconds")


def least_seconds(weight_bytes: int, ranks: int) -> float:
    """The shortest believable time from launch to healthy: imports, then every rank loading its share in parallel."""
    return IMPORT_FLOOR_S + weight_bytes / (RANK_BYTES_PER_S * ranks)


def suspicions(
    *, ready_after_s: float, listener: ListenerFacts, launched_at: float, weight_bytes: int, ranks: int
) -> tuple[str, ...]:
    """Reasons not to believe a green health check: an older listener, or a start faster than imports + bytes allow."""
    found = []
    if listener.started_at < launched_at - CLOCK_SLACK_S:
        found.append(
            f"the listener (pid {listener.pid}) started {listener.started}, "
            f"{launched_at - listener.started_at:.0f} s before our launch"
        )
    least = least_seconds(weight_bytes, ranks)
    if ready_after_s < least:
        found.append(
            f"ready after {ready_after_s:.1f} s, but importing SGLang ({IMPORT_FLOOR_S:.0f} s at least) and loading "
            f"{size(weight_bytes)} on {ranks} rank(s) take {least:.1f} s or more: probably an old server answers"
        )
    return tuple(found)


def why(*, ready_after_s: float | None, ours: bool, weight_bytes: int, read_bytes: int | None, polls: int) -> str:
    """Why the start was as fast or slow as it was: disk reads of the server's processes against the weight bytes.

    `ours` is whether the answer was proven to come from this launch; nothing is explained of another server's.
    """
    if ready_after_s is None:
        return f"Nobody answered /health with 200 in {polls} poll(s)."
    if not ours:
        return "What answered /health was not proven to be this launch, so it says nothing about our server."
    first = " It was healthy at the gate's first look, so the time is an upper bound." if polls == 1 else ""
    if read_bytes is None:
        return f"The kernel does not let us see the server's disk reads, so page cache or disk cannot be told.{first}"
    share = read_bytes / weight_bytes if weight_bytes else 1.0
    seen = f"{size(read_bytes)} came from disk (Python's own files included) for {size(weight_bytes)} of weights"
    if share >= 0.9:
        cause = f"the page cache was cold: about {size(read_bytes / max(ready_after_s, 1e-3))}/s over the whole start"
    elif share <= 0.1:
        cause = "the page cache was warm (or the file system hides its reads, as FUSE does)"
    else:
        cause = "the page cache held the rest"
    return f"{seen}: {cause}.{first}"


def size(count: float) -> str:
    """Bytes for people, decimal units as disks and model cards use them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
