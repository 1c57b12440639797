"""The follower's view on a terminal: the list of stages, the work's progress and its curve, redrawn in place.

Draws on stderr, so that stdout stays data; what scrolls by above the list (checks, warnings, notes) is the same
narration as in `console.views.Plain`. All text from the host is cleaned before it is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from console import phrases
from console.events import Event
from console.marks import duration, mark
from console.sanitise import clean
from console.state import PipelineState, StageState
from console.summary import failures, print_summary, screen
from console.views import narrate

_SCROLLS_BY = ("check", "note", "warning", "needs_confirmation", "pipeline_started", "service_ready")
_OLD_S = 15.0  # progress older than this is shown with its age


class Terminal:
    """The live view. Nothing is drawn before the first event, so that prompts and plans stand undisturbed."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._console = screen(err)
        self._state = PipelineState()
        self._heard = time.monotonic()
        self._live: Live | None = None

    def event(self, event: Event, state: PipelineState) -> None:
        """Take the new state; the next redraw shows it."""
        self._state, self._heard = state, time.monotonic()
        if self._live is None:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        if event.ev in _SCROLLS_BY and (text := narrate(event, state)):
            where = f"{phrases.position(state, event.stage)} {clean(event.stage)} " if event.stage else ""
            style = "yellow" if event.ev in ("warning", "needs_confirmation") else ""
            self._console.print(Text(f"{time.strftime('%H:%M:%S', time.localtime(event.t))} {where}{text}", style))

    def own(self, kind: str, data: dict[str, Any], text: str = "") -> None:
        """What is for people."""
        if text:
            self._console.print(Text(text))

    def alive(self, state: PipelineState) -> None:
        """The ages in the view tell it."""

    def ended(self, state: PipelineState, code: int) -> None:
        """Freeze the list, then failures and the summary."""
        self.close()
        self._console.print(stages_table(state))
        for line in failures(state):
            self._console.print(Text(line, "red" if not line.startswith(" ") else ""))
        print_summary(state, self._out)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._draw())

    def _draw(self) -> Iterator[RenderableType]:
        state = self._state
        since = f" · {duration(state.t - state.started)}" if state.started is not None else ""
        yield Text(f"{clean(state.name)}{since}", style="bold")
        yield stages_table(state)
        stage = state.stage(state.current)
        if stage.progress is not None and stage.state == "running":
            age = time.monotonic() - self._heard
            old = f" · {duration(age)} ago" if age > _OLD_S else ""
            yield ProgressBar(total=1.0, completed=stage.progress.share, width=60)
            yield Text(phrases.progress(stage.progress) + old)
        if stage.metrics and stage.state == "running":
            yield Text(phrases.metrics(stage.metrics), style="cyan")


def stages_table(state: PipelineState) -> Table:
    """Glyph, word, colour and what became of it, one row a stage."""
    table = Table.grid(padding=(0, 2))
    for stage in state.stages:
        look = mark(stage.state)
        table.add_row(
            Text(phrases.position(state, stage.name), "dim"),
            Text(clean(stage.name)),
            Text(f"{look.glyph} {look.word}", look.style),
            Text(_detail(stage), overflow="ellipsis", no_wrap=True),
        )
    return table


def _detail(stage: StageState) -> str:
    if stage.state == "running" and stage.progress is not None:
        return phrases.progress(stage.progress)
    return phrases.outcome(stage)
