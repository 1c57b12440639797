"""The operator lease: which one operator may change things on this host now.

Owns `operator.json`. Sixty seconds, renewed every fifteen by the watch channel, counted on the host's boot clock (a
laptop's sleep or a wrong wall clock changes nothing). Taking over names the lease that was seen, so that two people
cannot both take over the same one. Reading needs no lease. Knows nothing of what operators do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backend.errors import Exit, OperatorError
from backend.runs.atomic import read_json, write_json
from backend.runs.identity import boot_id
from backend.runs.layout import new_ulid
from backend.runs.locks import exclusive, guard_of

TTL_S = 60.0
RENEW_EVERY_S = 15.0


@dataclass(frozen=True)
class Lease:
    """One operator's hold. `expires` is on CLOCK_BOOTTIME of boot `boot_id`; `taken` is epoch seconds, for display."""

    id: str
    who: str
    host: str
    pid: int
    taken: float
    expires: float
    boot_id: str

    def left_s(self) -> float:
        """Seconds until it expires; 0 when it has, or when the host was rebooted since."""
        if self.boot_id != boot_id():
            return 0.0
        return max(0.0, self.expires - _now())

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, as in the file."""
        return asdict(self)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def current(path: Path) -> Lease | None:
    """The lease that is in force, or None where there is none or it expired."""
    data = read_json(path)
    lease = Lease(**data) if data else None
    return lease if lease is not None and lease.left_s() > 0 else None


def _held(lease: Lease) -> OperatorError:
    return OperatorError(
        f"{lease.who} (on {lease.host}) has control, for another {lease.left_s():.0f} s unless renewed",
        fix=f"watch read-only, or take over lease {lease.id}",
        reason="lease_held",
        code=Exit.CONTROL_HELD,
    )


def _lost(lease_id: str, now: Lease | None) -> OperatorError:
    by = f"taken by {now.who} (on {now.host})" if now else "it expired"
    return OperatorError(
        f"control was lost: lease {lease_id}, {by}",
        fix="nothing was changed; look at the current state, then take control again",
        reason="lease_lost",
        code=Exit.CONTROL_HELD,
    )


def _change(path: Path, decide: Callable[[Lease | None, Lease | None], Lease | None]) -> Lease | None:
    """Read, decide (given the lease in force and the last one written), write: all under the guard."""
    with exclusive(guard_of(path)):
        data = read_json(path)
        last = Lease(**data) if data else None
        lease = decide(last if last is not None and last.left_s() > 0 else None, last)
        if lease is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, lease.as_json())
    return lease


def _new(who: str, host: str, pid: int) -> Lease:
    return Lease(new_ulid(), who, host, pid, time.time(), _now() + TTL_S, boot_id())


def acquire(path: Path, who: str, host: str, pid: int) -> Lease:
    """Take control. Raises OperatorError (`lease_held`, exit code 5) that names the holder."""
    fresh = _new(who, host, pid)

    def decide(now: Lease | None, last: Lease | None) -> Lease:
        if now is not None:
            raise _held(now)
        return fresh

    _change(path, decide)
    return fresh


def takeover(path: Path, seen_id: str, who: str, host: str, pid: int) -> Lease:
    """Take control from the holder of lease `seen_id`. Raises `lease_held` where another one is in force by now."""
    fresh = _new(who, host, pid)

    def decide(now: Lease | None, last: Lease | None) -> Lease:
        if now is not None and now.id != seen_id:
            raise _held(now)
        return fresh

    _change(path, decide)
    return fresh


def renew(path: Path, lease_id: str) -> Lease:
    """Extend a lease by its full time, also shortly after it expired if nobody took it. Raises `lease_lost`."""

    def decide(now: Lease | None, last: Lease | None) -> Lease:
        if last is None or last.id != lease_id or last.boot_id != boot_id():
            raise _lost(lease_id, now)
        return replace(last, expires=_now() + TTL_S)

    lease = _change(path, decide)
    assert lease is not None
    return lease


def release(path: Path, lease_id: str) -> None:
    """Give control back; a lease that is not in force any more is left alone."""
    _change(path, lambda now, last: None if last is not None and last.id == lease_id else last)


def require(path: Path, lease_id: str) -> Lease:
    """The lease in force, which must be `lease_id`: every verb that changes something asks. Raises `lease_lost`."""
    now = current(path)
    if now is None or now.id != lease_id:
        raise _lost(lease_id, now)
    return now
