"""The files by which the pilot and a stage's process speak: `input.json`, `material.json`, `outputs.json`.

One owner for all three, so that the pilot (writer of inputs, reader of outputs) and the stage's process (the other
way round) cannot drift apart. `failure.json` is `OperatorError.as_json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.config import Config
from backend.errors import OperatorError
from backend.report import Check, Reporter
from backend.runs.atomic import read_json, write_json
from backend.runs.layout import Home
from backend.stages.base import Product, Stage, StageContext

INPUT, MATERIAL, OUTPUTS, FAILURE = "input.json", "material.json", "outputs.json", "failure.json"
OPENED = "store.json"
"""Names the store that an extraction writes, so that no purge takes it from under it."""


def write_input(attempt: Path, ctx: StageContext, fingerprint: str, material: Mapping[str, Any]) -> None:
    """Hand a stage its context; `material` is kept beside it for `explain`."""
    write_json(attempt / MATERIAL, dict(material))
    write_json(
        attempt / INPUT,
        {
            "config": ctx.config.model_dump(mode="json"),
            "python": ctx.python,
            "home": str(ctx.home.path),
            "products": {name: {**asdict(p), "attempt": str(p.attempt)} for name, p in ctx.products.items()},
            "server": str(ctx.server) if ctx.server else None,
            "pipeline": str(ctx.pipeline) if ctx.pipeline else None,
            "consented": [dict(item) for item in ctx.consented],
            "frozen_at": ctx.frozen_at,
            "fingerprint": fingerprint,
        },
    )


def read_input(attempt: Path, reporter: Reporter) -> tuple[StageContext, str]:
    """The context that `write_input` left, and the fingerprint that the result will carry."""
    data = read_json(attempt / INPUT)
    if data is None:
        raise OperatorError(f"{attempt / INPUT} is missing", fix="attempts are made by the pilot: use `eagle3-console`")
    products = {name: Product(**{**p, "attempt": Path(p["attempt"])}) for name, p in data["products"].items()}
    ctx = StageContext(
        config=Config.model_validate(data["config"]),
        python=data["python"],
        home=Home(Path(data["home"])),
        products=products,
        reporter=reporter,
        attempt=attempt,
        server=Path(data["server"]) if data["server"] else None,
        pipeline=Path(data["pipeline"]) if data["pipeline"] else None,
        consented=tuple(data["consented"]),
        frozen_at=data["frozen_at"],
    )
    return ctx, data["fingerprint"]


def fingerprint_of(ctx: StageContext) -> str:
    """The fingerprint that this attempt works under; names the folders it makes."""
    assert ctx.attempt is not None
    data = read_json(ctx.attempt / INPUT) or {}
    return str(data["fingerprint"])


def record_outputs(
    attempt: Path, stage: Stage, fingerprint: str, outputs: Mapping[str, Any], checks: Sequence[Check]
) -> None:
    """Keep what an attempt made and the checks it passed; written before the process exits 0."""
    record = {
        "fingerprint": fingerprint,
        "identity": {key: outputs[key] for key in stage.identity},
        "outputs": dict(outputs),
        "checks": [check.as_json() for check in checks],
    }
    write_json(attempt / OUTPUTS, record)


def read_product(attempt: Path, stage: str) -> Product | None:
    """What an attempt made; None if it has not come to its end, or was written in a form of another version."""
    record = read_json(attempt / OUTPUTS)
    if record is None or not record.keys() >= {"fingerprint", "outputs", "identity"}:
        return None
    return Product(stage, record["fingerprint"], record["outputs"], record["identity"], attempt)


def read_failure(attempt: Path) -> OperatorError | None:
    """Why an attempt failed, in its own words; None if it left none (it was killed)."""
    data = read_json(attempt / FAILURE)
    return OperatorError.from_json(data) if data else None
