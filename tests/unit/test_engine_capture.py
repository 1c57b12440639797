"""Reading what a capture left: whole dumps, and every kind of file that is none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backend.engine import cpu
from backend.engine.capture import live_markers, plugin_dir, plugin_sha, read_capture
from backend.errors import OperatorError
from console.bundle import build, install

T, H, LAYERS = 6, 4, (2, 4, 5)
METADATA = {"rid": "r", "layers": "2,4,5", "launch_id": "e3-1", "chunks": "2", "post_norm": "true"}
MARKER: dict[str, Any] = {
    "pid": 10,
    "ppid": 9,
    "start_ticks": 77,
    "time": 1.5,
    "route": "plugin",
    "launch_id": "e3-1",
    "layers": [2, 4, 5],
    "file": "/p/eagle3_capture.py",
    "sha256": "ab",
    "sglang": "0.5.14",
    "tp_rank": 0,
    "sink_hooked": True,
}


def write(path: Path, *, rows: int = T, width: int = H * 3, metadata: dict[str, str] | None = METADATA) -> Path:
    tensors = {
        "input_ids": torch.arange(T),
        "aux_hidden_state": torch.arange(T * width, dtype=torch.bfloat16).view(T, width),
        "hidden_state": torch.ones(rows, H, dtype=torch.bfloat16),
    }
    save_file(tensors, path, metadata=metadata)
    return path


def reason(path: Path) -> str:
    with pytest.raises(OperatorError) as caught:
        read_capture(path)
    assert path.stem in str(caught.value)
    return caught.value.reason


def test_a_whole_dump_is_read_with_its_identity(tmp_path: Path) -> None:
    capture = read_capture(write(tmp_path / "r.safetensors"))
    assert (capture.rid, capture.launch_id, capture.layers, capture.chunks) == ("r", "e3-1", LAYERS, 2)
    assert capture.post_norm
    assert capture.input_ids_T.tolist() == list(range(T))
    assert capture.aux_TC.shape == (T, 3 * H)
    assert capture.aux_TC.dtype == torch.bfloat16
    assert capture.nbytes == T * 4 * H * 2


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_truncated_file_is_broken_not_short(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "r.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    assert reason(path) == "capture_broken"


def test_a_safetensors_file_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    assert reason(path) == "capture_broken"
    write(path, metadata={**METADATA, "layers": "two"})
    assert reason(path) == "capture_broken"


def test_tensors_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    assert reason(write(tmp_path / "rows.safetensors", rows=T - 1)) == "capture_broken"
    assert reason(write(tmp_path / "width.safetensors", width=2 * H)) == "capture_broken"


def test_the_plugins_own_reason_is_passed_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.b-1.safetensors")
    note = {"rid": "a.b-1", "reason": "prefix_mismatch", "detail": "a chunk starts at 8, but 0 rows are held"}
    (tmp_path / "a.b-1.error.json").write_text(json.dumps(note))
    with pytest.raises(OperatorError, match="prefix_mismatch: a chunk starts at 8") as caught:
        read_capture(path)
    assert caught.value.reason == "capture_failed"


def test_an_answer_without_a_dump_says_that_the_capture_is_not_live(tmp_path: Path) -> None:
    assert reason(tmp_path / "gone.safetensors") == "capture_missing"


def test_markers_are_read_and_foreign_ones_are_named(tmp_path: Path) -> None:
    assert live_markers(tmp_path) == []
    (tmp_path / "_live.10.json").write_text(json.dumps(MARKER))
    [marker] = live_markers(tmp_path)
    assert (marker.pid, marker.start_ticks, marker.layers, marker.sink_hooked) == (10, 77, LAYERS, True)

    foreign = tmp_path / "_live.11.json"
    for text in ('{"pid": 11}', "[]", '{"pid"', json.dumps({**MARKER, "gpu": 3})):
        foreign.write_text(text)
        with pytest.raises(OperatorError, match=r"_live\.11\.json") as caught:
            live_markers(tmp_path)
        assert caught.value.reason == "marker_broken"


def test_the_plugin_is_unpacked_whole_and_its_hash_is_that_of_the_running_file(tmp_path: Path) -> None:
    folder = plugin_dir(tmp_path)
    assert hashlib.sha256((folder / "eagle3_capture.py").read_bytes()).hexdigest() == plugin_sha()
    [entry_points] = folder.glob("*.dist-info/entry_points.txt")
    assert "eagle3_capture:register" in entry_points.read_text()
    assert plugin_dir(tmp_path) == folder


@pytest.mark.slow
def test_plugin_and_cpu_mode_come_out_of_the_agents_archive_as_they_are_in_the_checkout(tmp_path: Path) -> None:
    """On a host the code is one zip file, and neither SGLang nor Python finds a plugin inside an archive."""
    archive = install(build(), tmp_path)
    code = (
        "import sys; from pathlib import Path; from backend.engine import capture, cpu\n"
        "assert '.pyz' in capture.__file__, capture.__file__\n"
        "print(capture.plugin_dir(Path(sys.argv[1]))); print(cpu.folder(Path(sys.argv[1])))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "host")],
        env={**os.environ, "PYTHONPATH": str(archive)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    plugin, mode = map(Path, ran.stdout.split())
    assert files(plugin) == files(plugin_dir(tmp_path / "here"))
    assert files(mode) == files(cpu.folder(tmp_path / "here"))
    assert "sitecustomize.py" in files(mode)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
