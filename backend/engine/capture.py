"""What the capture plugin leaves on disk, read back: dumps, error notes, live markers; and where the plugin itself is.

Reader's half of the contract whose writer is `patches/sglang/plugin/eagle3_capture.py` (which runs inside SGLang and
imports nothing of ours). A dump appears by rename, so a file under its final name is whole.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backend.errors import OperatorError
from backend.resources import patches, unpacked

PLUGIN_MODULE = "eagle3_capture.py"
BOUNDARIES_RID = "eagle3-boundaries-"
"""A request whose id starts so, alone in flight, is captured at all boundaries 0..N-1."""


@dataclass(frozen=True)
class Capture:
    """One captured request: T tokens, n captured layers, hidden size H.

    `aux_TC` [T, n*H] holds the residual stream at the input of each of `layers`, low to high; `last_TH` [T, H] is the
    last hidden state, after the final norm where `post_norm`.
    """

    rid: str
    path: Path
    input_ids_T: torch.Tensor
    aux_TC: torch.Tensor
    last_TH: torch.Tensor
    layers: tuple[int, ...]
    launch_id: str
    post_norm: bool
    chunks: int

    @property
    def nbytes(self) -> int:
        """Bytes of states."""
        return self.aux_TC.nbytes + self.last_TH.nbytes


@dataclass(frozen=True)
class LiveMarker:
    """Proof that a server process loaded the plugin and switched the capture on."""

    pid: int
    ppid: int
    start_ticks: int
    time: float
    route: str
    launch_id: str
    layers: tuple[int, ...]
    file: str
    sha256: str
    sglang: str
    tp_rank: int
    sink_hooked: bool
    """True once a real forward pass went through the sink (SGLang only logs a hook whose target is gone)."""


def read_capture(path: Path) -> Capture:
    """One dump.

    Raises:
        OperatorError: `capture_failed` with the plugin's own reason, `capture_missing`, or `capture_broken`.
    """
    note = path.with_suffix(".error.json")
    if note.exists():
        told = _object(note)
        raise OperatorError(
            f"the capture of {path.stem} failed: {told.get('reason')}: {told.get('detail')}",
            fix="send the request again under a new id; the server's log has more",
            reason="capture_failed",
        )
    if not path.exists():
        raise OperatorError(
            f"the server answered {path.stem}, but left no {path.name}",
            fix="the capture is not live in this server: run the gate",
            reason="capture_missing",
        )
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata()
            capture = Capture(
                rid=meta["rid"],
                path=path,
                input_ids_T=file.get_tensor("input_ids"),
                aux_TC=file.get_tensor("aux_hidden_state"),
                last_TH=file.get_tensor("hidden_state"),
                layers=tuple(int(layer) for layer in meta["layers"].split(",")),
                launch_id=meta["launch_id"],
                post_norm=meta["post_norm"] == "true",
                chunks=int(meta["chunks"]),
            )
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise OperatorError(
            f"{path} is not a capture: {type(error).__name__}: {error}",
            fix="another program writes into this folder, or its disk is broken: choose another [capture] dump_dir",
            reason="capture_broken",
        ) from error
    ids, aux, last = (tuple(t.shape) for t in (capture.input_ids_T, capture.aux_TC, capture.last_TH))
    if len(last) != 2 or ids != last[:1] or aux != (last[0], last[1] * len(capture.layers)):
        raise OperatorError(
            f"{path}: ids {ids}, aux {aux} and last {last} do not fit {len(capture.layers)} layers",
            reason="capture_broken",
        )
    return capture


def live_markers(dump_dir: Path) -> list[LiveMarker]:
    """The markers in a dump folder, one per capturing process.

    Raises:
        OperatorError: `marker_broken`, a file of that name is not the plugin's.
    """
    return [_marker(path) for path in sorted(dump_dir.glob("_live.*.json"))]


def _marker(path: Path) -> LiveMarker:
    data = _object(path)
    try:
        return LiveMarker(**{**data, "layers": tuple(data["layers"])})
    except (KeyError, TypeError) as error:
        raise OperatorError(
            f"{path} is not a live marker of this console's plugin: {error}",
            fix="an older or foreign capture wrote it: remove the file, then launch again",
            reason="marker_broken",
        ) from error


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that was written by rename."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OperatorError(f"{path} is not JSON: {error}", fix="remove the file", reason="marker_broken") from error
    if not isinstance(found, dict):
        raise OperatorError(f"{path} holds no JSON object", fix="remove the file", reason="marker_broken")
    return found


def plugin_sha() -> str:
    """sha256 of the plugin's module, as its live marker reports it."""
    return hashlib.sha256(_plugin_source().joinpath(PLUGIN_MODULE).read_bytes()).hexdigest()


def plugin_dir(under: Path) -> Path:
    """The plugin's folder for PYTHONPATH, unpacked below `under`."""
    return unpacked(_plugin_source(), under)


def _plugin_source() -> Traversable:
    return patches().joinpath("sglang", "plugin")
