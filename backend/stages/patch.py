"""patch: make SGLang sink its hidden states, by plugin: no file of SGLang is changed.

Severity 1: unpacks the plugin's folder under the home (content-addressed) and proves in a fresh interpreter that the
entry point is found on the PYTHONPATH a server will get. Whether the *running* server uses it is the gate's question.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from backend.engine.capture import plugin_dir, plugin_sha
from backend.report import Check
from backend.stages.base import Severity, Stage, StageContext, StagePlan
from backend.stages.sglang_files import hand_patched

GROUP = "sglang.srt.plugins"
ENTRY_POINT = "eagle3_capture"
_DISCOVER = (
    "import importlib.metadata as m, json; "
    f"print(json.dumps([[e.name, e.value, str(e.dist.locate_file(''))] for e in m.entry_points(group={GROUP!r})]))"
)


class Patch(Stage):
    """The capture plugin, on disk and discoverable."""

    name: ClassVar[str] = "patch"
    severity: ClassVar[Severity] = 1
    serves: ClassVar[tuple[str, ...]] = ("extract",)

    def plan(self, ctx: StageContext) -> StagePlan:
        """Which route, and that nothing of SGLang changes."""
        folder = ctx.home.path / "unpacked"
        lines = (f"route {ctx.config.capture.route}: plugin {plugin_sha()[:12]}, no SGLang file is changed",)
        return StagePlan(lines, (f"unpacks the plugin under {folder}",), {"sha256": plugin_sha()})

    def run(self, ctx: StageContext) -> dict[str, Any]:
        """Unpack (a no-op if this content is there) and say where."""
        return {"route": "plugin", "folder": str(plugin_dir(ctx.home.path / "unpacked")), "sha256": plugin_sha()}

    def verify(self, ctx: StageContext, outputs: Mapping[str, Any]) -> list[Check]:
        """A fresh interpreter finds our entry point, and only one route is live."""
        folder = Path(outputs["folder"])
        found = discover(ctx.python, folder)
        ours = [entry for entry in found if entry[0] == ENTRY_POINT]
        others = [entry for entry in found if entry[0] != ENTRY_POINT]
        checks = [
            Check(
                "plugin discoverable",
                len(ours) == 1 and Path(ours[0][2]).resolve() == folder.resolve(),
                f"entry points of {GROUP}: {ours or 'none of ours'}",
                fix="two copies of the plugin are on this interpreter's path: uninstall the other one",
            )
        ]
        if others:
            names = ", ".join(entry[0] for entry in others)
            checks.append(Check("other plugins", None, f"{names}: left out of the server by SGLANG_PLUGINS"))
        patched = hand_patched(ctx.python)
        fix = "reinstall sglang (pip install --force-reinstall --no-deps), or both routes would dump"
        evidence = (
            f"{', '.join(patched)} differ from the installed wheel" if patched else "model files are as installed"
        )
        checks.append(Check("sglang files pristine", not patched, evidence, fix=fix))
        return checks


def discover(python: str, folder: Path) -> list[list[str]]:
    """Entry points that a server started with this PYTHONPATH will see: [name, value, location]."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [python, "-c", _DISCOVER], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    entries: list[list[str]] = json.loads(done.stdout)
    return entries
