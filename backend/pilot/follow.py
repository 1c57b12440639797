"""Following one attempt: its events become the pipeline's events, in order and exactly once, until it has ended.

The pipeline's log is one stream with one writer (whoever holds the pipeline's lock). A forwarded event carries the
number it had in the attempt (`src`), so a pilot that was killed goes on where its predecessor stopped.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from backend.errors import Refused
from backend.runs.atomic import read_json
from backend.runs.events import EventLog, read_events
from backend.runs.identity import ProcessIdentity, open_verified
from backend.runs.layout import Attempt
from backend.runs.state import AttemptState
from backend.runs.state import state as state_of

# Readers are waited for by pidfd; this bounds only how late a line of a living attempt is forwarded.
FORWARD_EVERY_S = 0.25
FORWARDED = frozenset({"progress", "metric", "note", "warning", "check"})


class Follower:
    """Forwards one attempt's events into the pipeline's log."""

    def __init__(self, attempt: Attempt, stage: str, number: int, log: EventLog, seen: int) -> None:
        """`seen` is the highest `src` of this attempt that the pipeline's log holds already."""
        self.attempt = attempt
        self.number = number
        self.stage = stage
        self.log = log
        self.seen = seen
        self.offset = 0

    def until_end(self) -> AttemptState:
        """Block until the attempt's supervisor is gone; returns the state it left."""
        pidfd = self._supervisor()
        while pidfd is not None:
            ready, _, _ = select.select([pidfd], [], [], FORWARD_EVERY_S)
            self.forward()
            if ready:
                os.close(pidfd)
                pidfd = None
        while self.forward():
            continue
        return state_of(self.attempt.path)

    def forward(self) -> bool:
        """Copy what is new; True if there may be more."""
        before = self.offset
        events, self.offset = read_events(self.attempt.events, self.offset)
        for event in events:
            if event.seq > self.seen and event.ev in FORWARDED:
                self.log.emit(event.ev, {**event.d, "src": event.seq}, stage=self.stage, att=self.number)
                self.seen = event.seq
        return self.offset != before

    def _supervisor(self) -> int | None:
        proc = read_json(self.attempt.proc)
        if proc is None:
            return None
        try:
            return open_verified(ProcessIdentity.from_json(proc["supervisor"]))
        except Refused:
            return None  # it has ended, and its pid may belong to another process already


def forwarded_until(events: Path, stage: str, attempt: int) -> int:
    """The highest `src` of an attempt in a pipeline's log; -1 if there is none."""
    seen, offset = -1, 0
    while True:
        found, after = read_events(events, offset)
        if after == offset:
            return seen
        offset = after
        seen = max([seen, *(int(e.d.get("src", -1)) for e in found if e.stage == stage and e.att == attempt)])
