"""`--output jsonl`: one object a line, as published in `docs/schema/events-v1.json`.

Owns that form. Lines that come from the host carry the host's `seq`; lines that the console adds (plan, accepted,
detached, error …) have none. Pure ASCII, so no byte of a host's text can reach the terminal as a control character.
"""

from __future__ import annotations

import json
import time
from typing import Any

from console.events import Event
from console.sanitise import redact

VERSION = 1


def from_event(event: Event, host: str) -> str:
    """A pipeline event as one line."""
    return _line(
        event.ev,
        dict(event.d),
        t=event.t,
        host=host,
        pipeline=event.pipe or None,
        seq=event.seq,
        stage=event.stage or None,
        attempt=event.att or None,
    )


def own(kind: str, data: dict[str, Any], *, host: str | None = None, pipeline: str | None = None) -> str:
    """A line that the console adds, at the console's time."""
    return _line(kind, data, t=time.time(), host=host, pipeline=pipeline)


def _line(
    kind: str,
    data: dict[str, Any],
    *,
    t: float,
    host: str | None,
    pipeline: str | None,
    seq: int | None = None,
    stage: str | None = None,
    attempt: int | None = None,
) -> str:
    whole, part = divmod(round(t * 1000), 1000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{part:03d}Z"
    record = {
        "v": VERSION,
        "ts": stamp,
        "event": kind,
        "host": host,
        "pipeline": pipeline,
        "seq": seq,
        "stage": stage,
        "attempt": attempt,
        "data": data,
    }
    return redact(json.dumps(record, ensure_ascii=True, separators=(",", ":")))
