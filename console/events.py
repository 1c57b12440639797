"""Pipeline events out of raw bytes: live from an agent, stored, or recorded.

The event itself is `backend.runs.events.Event`, the format's owner. A line that is no event, or an event of a kind that
is unknown here, never stops a follower: the first is counted, the second passes through (`docs/events.md`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from backend.runs.events import Event

__all__ = ["Event", "EventReader", "parse"]


class EventReader:
    """Events out of bytes in pieces of any size. `offset` is where the next unread line starts in the file."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.damaged = 0
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events whose line is complete. A last line without a newline is still being written."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.offset += len(line) + 1
            event = parse(line)
            if event is None:
                self.damaged += bool(line.strip())
            else:
                yield event


def parse(line: bytes) -> Event | None:
    """One line, or None if it is no event."""
    try:
        return Event.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return None
