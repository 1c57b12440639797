"""Training checkpoints: complete or absent, a few kept, refused by a run that would not continue them.

Owns: the folder layout `checkpoints/step-<n>/{training.pt, progress.json}`, retention and the identity rule.
Does not know models or optimisers beyond their state dicts, nor when a checkpoint is due.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.eagle3.folders import complete_folder, discard_partial
from backend.errors import OperatorError, Refused

TENSORS = "training.pt"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: tensors by owner ("model", "optimizer"), plain progress values, and its identity."""

    tensors: dict[str, Any]
    progress: dict[str, Any]
    identity: dict[str, Any]


def save_checkpoint(root: Path, step: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `step-<n>` atomically, then drop all but the newest `keep`. Writing the same step again replaces it."""
    final = root / f"step-{step:08d}"
    with complete_folder(final, replace=frozenset({TENSORS, PROGRESS})) as folder:
        torch.save(checkpoint.tensors, folder / TENSORS)
        text = json.dumps({"identity": checkpoint.identity, "progress": checkpoint.progress}, indent=1)
        (folder / PROGRESS).write_text(text + "\n")
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old)
    return final


def load_latest(root: Path, identity: Mapping[str, Any], device: torch.device) -> Checkpoint | None:
    """The newest checkpoint, or None where there is none. Removes what a killed run left half-written.

    Raises `Refused` (reason `checkpoint_foreign`) naming the value in which it differs from this run, and
    `OperatorError` (reason `checkpoint_broken`) where it cannot be read.
    """
    discard_partial(root)
    found = _complete(root)
    if not found:
        return None
    newest = found[-1]
    try:
        record = json.loads((newest / PROGRESS).read_text())
        theirs, progress = record["identity"], record["progress"]
    except (OSError, ValueError, KeyError) as error:
        raise _broken(newest, error) from error
    ours = json.loads(json.dumps(dict(identity)))  # tuples become lists, as they did on disk
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            raise Refused(
                f"{newest} was made with {key} = {theirs.get(key)!r}; this run has {ours.get(key)!r}",
                fix="give this run its own output folder, or restore the old value to continue the old run",
                reason="checkpoint_foreign",
            )
    try:
        tensors = torch.load(newest / TENSORS, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise _broken(newest, error) from error
    return Checkpoint(tensors, progress, theirs)


def _complete(root: Path) -> list[Path]:
    return sorted(root.glob("step-*")) if root.is_dir() else []


def _broken(folder: Path, error: Exception) -> OperatorError:
    return OperatorError(
        f"the checkpoint {folder} cannot be read: {error}",
        fix=f"move {folder} away: the one before it will be used",
        reason="checkpoint_broken",
    )
