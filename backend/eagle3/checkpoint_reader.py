"""Named tensors and rows out of a safetensors checkpoint, single file or sharded, without loading the rest.

Owns: finding which file holds a tensor, reading it (whole or by rows), and saying clearly what is missing or broken.
Does not know: what the tensors mean (see `target.py`), quantised formats, or anything about drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from backend.errors import OperatorError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointReader:
    """Reads a Hugging Face checkpoint folder lazily; safe to share between threads for reading.

    Raises `OperatorError` with reason `checkpoint_missing`, `checkpoint_broken` or `tensor_missing`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._file_of = _weight_map(self.folder)

    def names(self) -> frozenset[str]:
        """Every tensor name of the checkpoint."""
        return frozenset(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        path = self._path_of(name)
        try:
            with safe_open(path, framework="pt") as file:
                return tuple(int(n) for n in file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise _broken(path, name, error) from error

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor on the CPU, in its stored dtype or converted to `dtype`."""
        path = self._path_of(name)
        try:
            with safe_open(path, framework="pt") as file:
                value: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise _broken(path, name, error) from error
        return value if dtype is None else value.to(dtype)

    def rows(self, name: str, ids: Sequence[int] | torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows `ids` of a 2-D tensor in the order asked for: [len(ids), columns]. Each distinct row is read once.

        Raises `OperatorError` (reason `row_out_of_range`) for an id outside the table.
        """
        wanted_N = torch.as_tensor(ids, dtype=torch.int64).flatten()
        distinct, place_N = torch.unique(wanted_N, return_inverse=True)
        height, width = self._table_shape(name)
        if len(distinct) and (int(distinct[0]) < 0 or int(distinct[-1]) >= height):
            bad = int(distinct[0]) if int(distinct[0]) < 0 else int(distinct[-1])
            raise OperatorError(
                f"row {bad} was asked of {name}, which has {height} rows",
                fix="the token ids belong to another tokenizer or vocabulary than this checkpoint",
                reason="row_out_of_range",
            )
        path = self._path_of(name)
        try:
            with safe_open(path, framework="pt") as file:
                table = file.get_slice(name)
                parts = [table[start:stop] for start, stop in _runs(distinct.tolist())]
        except SafetensorError as error:
            raise _broken(path, name, error) from error
        rows = torch.cat(parts) if parts else torch.empty(0, width)
        rows = rows[place_N]
        return rows if dtype is None else rows.to(dtype)

    def _table_shape(self, name: str) -> tuple[int, int]:
        shape = self.shape(name)
        if len(shape) != 2:
            raise OperatorError(
                f"{name} has shape {list(shape)}; rows can be read of a matrix only", reason="tensor_not_a_table"
            )
        return shape[0], shape[1]

    def _path_of(self, name: str) -> Path:
        file = self._file_of.get(name)
        if file is None:
            raise OperatorError(
                f"the checkpoint {self.folder} has no tensor {name}",
                fix="check [target] model: the folder must hold the complete model in Hugging Face layout",
                reason="tensor_missing",
            )
        return self.folder / file


def _runs(sorted_ids: list[int]) -> list[tuple[int, int]]:
    """Ascending ids as half-open ranges, so that neighbouring rows are one read."""
    runs: list[tuple[int, int]] = []
    for row in sorted_ids:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise OperatorError(
                f"{index} is not a safetensors index: {error}",
                fix="download the file again",
                reason="checkpoint_broken",
            ) from error
        missing = sorted({file for file in files.values() if not (folder / file).is_file()})
        if missing:
            raise OperatorError(
                f"the checkpoint {folder} lacks {len(missing)} of its files, first {missing[0]}",
                fix="finish the download of the model",
                reason="checkpoint_missing",
            )
        return files
    single = folder / SINGLE_FILE
    if not single.is_file():
        raise OperatorError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}",
            fix="point [target] model at a folder with a safetensors checkpoint",
            reason="checkpoint_missing",
        )
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    except SafetensorError as error:
        raise _broken(single, "the header", error) from error


def _broken(path: Path, name: str, error: Exception) -> OperatorError:
    return OperatorError(
        f"{path} cannot be read ({name}): {error}",
        fix="the file is truncated or damaged: fetch it again and compare its checksum",
        reason="checkpoint_broken",
    )
