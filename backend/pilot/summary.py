"""The summary at the end of a run: what was made, how good it is, how long each stage took. Pure: results in, rows out.

The wire form (`sections` of columns and rows, `lines` of prose) is drawn by whoever follows; see docs/events.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backend.stages.base import StageContext
from backend.stages.registry import stage_names

Results = Mapping[str, Mapping[str, Any]]
GB = 1e9


def summarise(ctx: StageContext, results: Results) -> dict[str, Any]:
    """Sections for every stage that has something to say, then the stages with their wall time."""
    sections, lines = [], []
    for name, tell in SECTIONS.items():
        outputs = results.get(name, {}).get("outputs")
        if outputs is not None:
            section, said = tell(outputs)
            sections += [section] if section else []
            lines += said
    sections.append(_stages(results))
    if ctx.config.host.device == "cpu" and (ratio := _speed_ratio(results)) is not None:
        lines.append(
            f"with the draft this CPU makes {ratio:.2f} × the tokens/s of the server without one: of so small a target "
            "on a CPU a draft gains little or nothing. The accept length is what carries over to a GPU."
        )
    return {"sections": sections, "lines": lines}


def _speed_ratio(results: Results) -> float | None:
    """Tokens/s with the trained draft over those without a draft, at the first concurrency; None if not measured."""
    measured = results.get("bench", {}).get("outputs", {}).get("results", {})
    if "trained" not in measured or "none" not in measured:
        return None
    return float(measured["trained"][0]["tokens_s"]) / float(measured["none"][0]["tokens_s"])


def _section(title: str, columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"title": title, "columns": columns, "rows": rows}


def _merge(outputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    rows = [
        [
            source["name"],
            f"{source['read']:,}",
            f"{source['kept']:,}",
            f"{sum(source['dropped'].values()):,}",
            f"{source['tokens']:,}",
            f"{source['supervised']:,}",
        ]
        for source in outputs["sources"]
    ]
    columns = ["source", "records in", "kept", "dropped", "tokens", "supervised"]
    splits = ", ".join(f"{name} {count:,}" for name, count in outputs["splits"].items())
    return _section("data", columns, rows), [
        f"merged: {outputs['records']:,} records, {outputs['tokens']:,} tokens ({splits})"
    ]


def _gate(outputs: Mapping[str, Any]) -> tuple[None, list[str]]:
    verdict = outputs["verdict"]
    word = "SUSPECT" if verdict["suspicions"] else "believed" if verdict["ok"] else "refused"
    passed = sum(check["ok"] is True for check in verdict["checks"])
    return None, [
        f"gate: {word}, ready after {verdict['ready_after_s']:.1f} s, {passed} checks passed; {verdict['why']}"
    ]


def _extract(outputs: Mapping[str, Any]) -> tuple[None, list[str]]:
    size = f"{outputs['bytes'] / GB:,.3f} GB ({outputs['bytes'] / max(1, outputs['tokens']):,.0f} B/token)"
    return None, [f"hidden states: {outputs['records']:,} records, {size}, {outputs['tokens_s']:,.0f} tokens/s"]


def _train(outputs: Mapping[str, Any]) -> tuple[None, list[str]]:
    walk, untrained = outputs["heldout"]["trained"], outputs["heldout"]["untrained"]
    return None, [
        f"training: loss {outputs['loss_first']:.3f} → {outputs['loss_last']:.3f} in {outputs['steps']:,} steps, "
        f"{outputs['tokens_s']:,.0f} tokens/s; estimated accept length (serving walk, held out) "
        f"{walk['accept_length']:.2f} [{walk['low']:.2f}, {walk['high']:.2f}], "
        f"untrained {untrained['accept_length']:.2f}"
    ]


def _bench(outputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    names = {"trained": "trained draft", "untrained": "untrained draft", "none": "no draft"}
    rows = [
        [
            names[variant],
            str(m["concurrency"]),
            f"{m['accept_length']:.2f}" if m["accept_length"] else "1.00 (none)",
            f"{m['tokens_s']:,.1f}",
            f"{m['completion_tokens']:,} in {m['seconds']:,.1f} s",
        ]
        for variant, measured in outputs["results"].items()
        for m in measured
    ]
    columns = ["server", "in flight", "accept length", "tokens/s", "output tokens"]
    return _section(f"bench: {outputs['prompts']} held-out prompts, measured by SGLang", columns, rows), []


def _stages(results: Results) -> dict[str, Any]:
    rows = []
    for name in stage_names():
        result = results.get(name)
        if result is not None:
            seconds = result.get("seconds")
            rows.append([name, result["state"], "" if seconds is None else f"{seconds:,.1f} s"])
    return _section("stages", ["stage", "state", "wall time"], rows)


Tell = Callable[[Mapping[str, Any]], tuple[dict[str, Any] | None, list[str]]]
SECTIONS: dict[str, Tell] = {
    "merge": _merge,
    "gate": _gate,
    "extract": _extract,
    "train": _train,
    "bench": _bench,
}
