"""A plan as an operator reads it: what each stage would do and why, with numbers, commands, switches and consent.

Reads the plan's JSON as `backend.pilot plan` makes it; adds nothing to it and decides nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from console.consent import ACTING, Need, needs
from console.marks import size
from console.phrases import amount
from console.sanitise import clean

_ACTIONS = {
    "run": ("▶", "run", "bold cyan"),
    "skip": ("»", "skip", "dim green"),
    "not_needed": ("–", "not needed", "dim"),
    "outside": (" ", "left out", "dim"),
}


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """The whole plan."""
    where = f"{plan['name']} on {plan['host']}, state in {plan['home']}"
    console.print(Text(f"Plan for {clean(where)}", "bold"))
    console.print(_overview(plan))
    for stage in plan["stages"]:
        if stage["action"] == ACTING:
            for line in _stage(stage):
                console.print(line, soft_wrap=True)
    for line in _switches(plan):
        console.print(line)
    print_deletions(plan, console)
    for line in _totals(plan.get("totals") or {}):
        console.print(line, soft_wrap=True)
    print_needs(needs(plan), console)
    if plan["nothing_to_do"]:
        console.print("Nothing to do: every stage is done or not needed.")


def print_deletions(plan: Mapping[str, Any], console: Console) -> None:
    """Every path that would be deleted, and the flag that agrees to each."""
    for item in plan.get("destructive") or []:
        facts = f"{size(item['bytes'])} in {item['files']:,} files"
        console.print(Text(f"Deletes {clean(str(item['path']))}: {facts}", "bold red"), soft_wrap=True)
        console.print(f"  agree with: --allow purge={clean(str(item['sha']))}", soft_wrap=True)


def print_needs(lacking: list[Need], console: Console) -> None:
    """What has to be agreed to, with the flag for each."""
    if not lacking:
        return
    console.print(Text("Needs agreement:", "bold"))
    for need in lacking:
        without = " (without it this step is left out)" if need.optional else ""
        console.print(f"  {need.stage} (severity {need.severity}): {' '.join(need.flags)}{without}", soft_wrap=True)


def _overview(plan: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for number, stage in enumerate(plan["stages"], 1):
        glyph, word, style = _ACTIONS.get(stage["action"], ("?", clean(str(stage["action"])), "magenta"))
        table.add_row(
            Text(f"{number:>2}", "dim"),
            Text(clean(stage["name"])),
            Text(f"{glyph} {word}", style),
            Text(clean(str(stage.get("why") or ""))),
        )
    return table


def _stage(stage: Mapping[str, Any]) -> Iterator[Text]:
    """What stands in the plan about one stage, beyond its line in the overview; nothing if there is nothing."""
    lines = [*_details(stage)]
    if lines:
        yield Text(clean(str(stage["name"])), "bold")
        yield from lines


def _details(stage: Mapping[str, Any]) -> Iterator[Text]:
    for line in stage.get("lines") or []:
        yield Text(f"  {clean(str(line))}")
    if numbers := stage.get("numbers"):
        yield Text(f"  {_numbers(numbers)}")
    for effect in stage.get("effects") or []:
        yield Text(f"  changes: {clean(str(effect))}", "yellow")
    if launch := stage.get("launch"):
        yield Text(f"  command: {clean(shlex.join(launch['argv']))}")
        for name, value in (launch.get("env") or {}).items():
            yield Text(f"  env:     {clean(f'{name}={shlex.quote(str(value))}')}")
        for name in launch.get("defaults") or []:
            yield Text(f"  engine default: {clean(str(name))}", "dim")


def _switches(plan: Mapping[str, Any]) -> Iterator[Text]:
    for switch in plan.get("switches") or []:
        modes = f"{switch['from'] or 'no server'} → {switch['to'] or 'no server'}"
        yield Text(f"Server switch before {switch['before']}: {clean(modes)}, cost {clean(str(switch['cost']))}")


def _totals(totals: Mapping[str, Any]) -> Iterator[Text]:
    """Figures on one line, sentences (how the disk is budgeted, where a figure is from) on lines of their own."""
    said = {name: value for name, value in totals.items() if isinstance(value, str)}
    if figures := {name: value for name, value in totals.items() if name not in said}:
        yield Text(f"Totals: {_numbers(figures)}", "bold")
    for name, value in said.items():
        yield Text(f"  {clean(name).replace('_', ' ')}: {clean(value)}")


def _numbers(values: Mapping[str, Any]) -> str:
    return " · ".join(f"{clean(str(name)).replace('_', ' ')} {amount(name, value)}" for name, value in values.items())
