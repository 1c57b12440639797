"""The end of a pipeline on stdout: the tables of `pipeline_ended`, and for each failure what, why, fix and log.

Knows the summary's form (`sections` of `title`, `columns`, `rows`; and `lines`), not what the rows mean.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from console.phrases import amount, outcome, status_word
from console.sanitise import clean
from console.state import PipelineState

PLAIN_WIDTH = 120


def screen(file: TextIO) -> Console:
    """A Rich console that never interprets the text it is given, and writes no escapes into a file or pipe."""
    width = None if file.isatty() else PLAIN_WIDTH
    return Console(file=file, markup=False, highlight=False, emoji=False, width=width)


def print_summary(state: PipelineState, out: TextIO | None = None) -> None:
    """Write the summary, if the pilot left one."""
    console = screen(out or sys.stdout)
    for section in state.summary.get("sections") or []:
        console.print(_table(section))
    for line in state.summary.get("lines") or []:
        console.print(Text(clean(str(line))))


def failures(state: PipelineState) -> list[str]:
    """Lines about every stage that ended badly, about missing consent, and about a pilot that did not end by itself."""
    lines = []
    for said in (state.needs, vars(state.failure) if state.failure else None):
        if said:
            lines.append(clean(str(said.get("what", ""))))
            lines += [f"  fix: {clean(str(said['fix']))}"] if said.get("fix") else []
    for stage in state.stages:
        if stage.failure is None:
            continue
        name = clean(stage.name)
        lines.append(f"{name} {status_word(stage.state)}: {outcome(stage)}")
        if stage.failure.fix:
            lines.append(f"  fix: {clean(stage.failure.fix)}")
        if stage.log:
            lines.append(f"  log: {clean(stage.log)}   (eagle3-console logs {name} --tail 50)")
    return lines


def _table(section: Mapping[str, Any]) -> RenderableType:
    columns = [str(name) for name in section.get("columns") or []]
    rows = section.get("rows") or []
    table = Table(title=Text(clean(str(section.get("title", ""))), style="bold"), title_justify="left")
    for position, name in enumerate(columns):
        values = [row[position] for row in rows if position < len(row)]
        numeric = bool(values) and all(isinstance(value, (int, float)) for value in values)
        table.add_column(Text(clean(name)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(amount(name, value)) for name, value in zip(columns, row, strict=False)))
    return table
