"""Event lines: the append-only history of a pipeline or of an attempt, and the reporter that writes them for a job.

Owns the line format (`v` changes only when a reader would break) and the rules that make it safe to follow while it
grows: one write(2) per line, 4 KB at most, `seq` without gaps, a last line without newline is not there yet. The
writer of a pipeline's log is whoever holds the pipeline's lock; of an attempt's log, its job. Knows no event's meaning.

    {"v":1,"seq":41,"t":1796091985.19,"mono":58223.4,"boot":"995a…","pipe":"01J…","stage":"extract","att":3,
     "ev":"progress","d":{…}}
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.errors import OperatorError
from backend.report import Check
from backend.runs.atomic import write_json
from backend.runs.identity import boot_id
from backend.runs.layout import Attempt

VERSION = 1
LINE_LIMIT = 4096
READ_LIMIT = 4 << 20
UNREADABLE = "unreadable"
"""The `ev` that a reader gives to a line that is no event, so that one damaged line hides neither itself nor others."""
_NOT_SYNCED = frozenset({"progress", "metric"})


@dataclass(frozen=True)
class Event:
    """One line. `t` is epoch seconds and may jump, `mono` seconds since boot `boot`: durations come from `mono`."""

    v: int
    seq: int
    t: float
    mono: float
    boot: str
    pipe: str
    stage: str
    att: int
    ev: str
    d: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, as in the file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """The event of one line; fields of later versions are ignored. Raises KeyError, TypeError, ValueError."""
        return cls(
            v=int(data["v"]),
            seq=int(data["seq"]),
            t=float(data["t"]),
            mono=float(data["mono"]),
            boot=str(data["boot"]),
            pipe=str(data["pipe"]),
            stage=str(data["stage"]),
            att=int(data["att"]),
            ev=str(data["ev"]),
            d=dict(data["d"]),
        )


def plain(value: Any) -> Any:
    """The value as JSON that every reader takes: NaN and infinities become words, unknown types their `str`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _dump(obj: Any) -> bytes:
    # A lone surrogate (from a file name) has no UTF-8 form: it becomes "?".
    return json.dumps(obj, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def cut(d: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """`d` in at most `limit` bytes of JSON: what fits stays, a long text is shortened, `cut` names what suffered."""
    if len(_dump(d)) <= limit:
        return dict(d)
    kept: dict[str, Any] = {}
    lost: list[str] = []
    for key in sorted(d, key=lambda name: len(_dump(d[name]))):
        trial = {**kept, key: d[key], "cut": [*lost, key]}
        if len(_dump(trial)) <= limit:
            kept[key] = d[key]
            continue
        lost.append(key)
        text = d[key]
        while isinstance(text, str) and text:
            text = text[: len(text) * 3 // 4]
            if len(_dump({**kept, key: text + "…", "cut": lost})) <= limit:
                kept[key] = text + "…"
                break
    while len(_dump({**kept, "cut": lost})) > limit and lost:
        lost = [*lost[:-2], "…"] if len(lost) > 1 else []
    return {**kept, "cut": lost}


class EventLog:
    """Writer of one log. One at a time: hold the pipeline's lock, or be the attempt's job.

    Opening continues `seq` after the last whole line and removes a part of a line that a killed writer left; no
    reader has passed it, because readers stop at the last newline.
    """

    def __init__(self, path: Path, *, pipe: str = "", stage: str = "", att: int = 0) -> None:
        self._path = path
        self._pipe, self._stage, self._att = pipe, stage, att
        self._boot = boot_id()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._seq = self._resume()

    def _resume(self) -> int:
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, 2 * LINE_LIMIT, max(0, size - 2 * LINE_LIMIT))
        whole = tail.rfind(b"\n") + 1
        if whole < len(tail):
            os.ftruncate(self._fd, size - len(tail) + whole)
        for line in reversed(tail[:whole].splitlines()):
            event = _parse(line, 0)
            if event.ev != UNREADABLE:
                return event.seq + 1
        return 0

    def emit(self, ev: str, d: Mapping[str, Any] | None = None, *, stage: str | None = None, att: int = 0) -> Event:
        """Append one event and return it as written; durable, but for progress and metrics.

        `stage` and `att` replace the log's own (in a pipeline's log they change from event to event). Raises OSError
        where the line cannot be written; the log then ends with the line before.
        """
        head = Event(
            VERSION,
            self._seq,
            round(time.time(), 3),
            round(time.monotonic(), 3),
            self._boot,
            self._pipe,
            self._stage if stage is None else stage,
            self._att if stage is None else att,
            ev,
            {},
        ).as_json()
        d = cut(plain(d or {}), LINE_LIMIT - len(_dump(head)) - 1)
        line = _dump({**head, "d": d}) + b"\n"
        before = os.fstat(self._fd).st_size
        if os.write(self._fd, line) != len(line):
            os.ftruncate(self._fd, before)
            raise OSError(errno.ENOSPC, "no space left for a whole line", str(self._path))
        if ev not in _NOT_SYNCED:
            os.fsync(self._fd)
        self._seq += 1
        return Event.from_json({**head, "d": d})

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _parse(line: bytes, offset: int) -> Event:
    try:
        return Event.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError):
        text = line[:200].decode(errors="replace")
        return Event(0, -1, 0.0, 0.0, "", "", "", 0, UNREADABLE, {"offset": offset, "text": text})


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Events from byte `offset` on, and the offset to go on from; at most 4 MiB a call.

    A last line without newline is left for the next call. A line that is no event comes as ev "unreadable". A log
    that does not exist yet is empty. Raises OperatorError (`log_replaced`) where the file is shorter than `offset`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return [], offset
    try:
        size = os.fstat(fd).st_size
        data = os.pread(fd, READ_LIMIT, offset)
    finally:
        os.close(fd)
    if size < offset:
        raise OperatorError(
            f"{path} has {size} bytes, fewer than the {offset} already read: it was replaced",
            fix="read it again from 0",
            reason="log_replaced",
        )
    events, position = [], offset
    for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]:
        if line:
            events.append(_parse(line, position))
        position += len(line) + 1
    return events, position


@dataclass(frozen=True)
class Eta:
    """Rates in units/s and the remaining seconds as a range: from the faster to the slower of recent and overall."""

    rate: float | None
    eta_s: float | None
    eta_hi_s: float | None


class Pace:
    """Rate and remaining time from a stream of (time, done): overall since the first point, recent over a window."""

    WINDOW_S = 60.0

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None

    def add(self, now: float, done: int) -> None:
        """One point; `now` in monotonic seconds. A `done` that falls starts anew (another loop, another unit)."""
        if self._first is None or done < self._points[-1][1]:
            self._first = (now, done)
            self._points.clear()
        if len(self._points) > 1 and now - self._points[-2][0] < 1.0:
            self._points.pop()
        self._points.append((now, done))
        while len(self._points) > 2 and now - self._points[1][0] > self.WINDOW_S:
            self._points.popleft()

    def eta(self, total: int) -> Eta:
        """What is left until `total`. What was done before the first point (a resume) does not count as speed."""
        if self._first is None:
            return Eta(None, None, None)
        now, done = self._points[-1]
        rates = [(done - then) / (now - at) for at, then in (self._first, self._points[0]) if now > at and done > then]
        if not rates:
            return Eta(None, None, None)
        left = max(0, total - done)
        return Eta(rates[-1], left / max(rates), left / min(rates))


class AttemptReporter:
    """The `Reporter` of a job under a supervisor: `progress.json` at most once a second, and the attempt's events.

    Progress becomes an event every 1 % or 10 s. A reporter never raises: what cannot be written (full disk) is
    counted, and the count is a warning in the log as soon as a line can be written again.
    """

    EVENT_EVERY_S = 10.0
    FILE_EVERY_S = 1.0

    def __init__(self, attempt_dir: Path, *, pipe: str | None = None, stage: str | None = None) -> None:
        attempt = Attempt(attempt_dir)
        self._path = attempt.progress
        self._log = EventLog(
            attempt.events,
            pipe=attempt.pipeline_id if pipe is None else pipe,
            stage=attempt.stage if stage is None else stage,
            att=attempt.number,
        )
        self._paces: dict[str, Pace] = {}
        self._file_at = self._event_at = -math.inf
        self._event_share: tuple[str, int] = ("", -1)
        self._pending: dict[str, Any] | None = None
        self.lost = 0

    def progress(self, done: int, total: int, unit: str, **detail: float | int | str) -> None:
        """See `Reporter.progress`; callers need not throttle."""
        now = time.monotonic()
        pace = self._paces.setdefault(unit, Pace())
        pace.add(now, done)
        eta = pace.eta(total)
        self._pending = {"done": done, "total": total, "unit": unit, **asdict(eta), **plain(detail)}
        if done >= total or now - self._file_at >= self.FILE_EVERY_S:
            self._write_file(now)
        share = (unit, done * 100 // total if total > 0 else 0)
        if share != self._event_share or now - self._event_at >= self.EVENT_EVERY_S:
            self._emit("progress", {"done": done, "total": total, "unit": unit, **asdict(eta), **detail})
            self._event_share, self._event_at = share, now

    def metric(self, **values: float | int | str) -> None:
        """See `Reporter.metric`."""
        self._emit("metric", values)

    def note(self, text: str) -> None:
        """See `Reporter.note`."""
        self._emit("note", {"text": text})

    def warning(self, text: str) -> None:
        """See `Reporter.warning`."""
        self._emit("warning", {"text": text})

    def check(self, check: Check) -> None:
        """See `Reporter.check`."""
        self._emit("check", check.as_json())

    def event(self, ev: str, **d: Any) -> None:
        """Any other event of the job (gate_poll, verified …)."""
        self._emit(ev, d)

    def close(self) -> None:
        """Write the progress that was held back, then close."""
        if self._pending is not None:
            self._write_file(time.monotonic())
        self._log.close()

    def __enter__(self) -> AttemptReporter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write_file(self, now: float) -> None:
        record = {"v": VERSION, "t": round(time.time(), 3), "mono": round(now, 3), **(self._pending or {})}
        try:
            write_json(self._path, record, durable=False)
        except OSError:
            self.lost += 1
            return
        self._file_at, self._pending = now, None

    def _emit(self, ev: str, d: Mapping[str, Any]) -> None:
        try:
            if self.lost:
                self._log.emit("warning", {"text": f"{self.lost} reports could not be written", "lost": self.lost})
                self.lost = 0
            self._log.emit(ev, d)
        except OSError:
            self.lost += 1
