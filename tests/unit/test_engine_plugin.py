"""The plugin's bookkeeping without an engine: chunks joined by prefix, and no end that leaves a short row behind.

The hooks themselves run in real servers in tests/integration/test_capture.py.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from backend.engine.capture import BOUNDARIES_RID, PLUGIN_MODULE, read_capture
from backend.errors import OperatorError
from backend.resources import patches

H, LAYERS = 4, [2, 4, 5]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The plugin's module as an engine process has it after its model was loaded."""
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("EAGLE3_LAUNCH_ID", "e3-unit")
    spec = importlib.util.spec_from_file_location(
        "eagle3_capture_under_test", str(patches() / "sglang" / "plugin" / PLUGIN_MODULE)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._capture = module._Capture(nn.Module(), LAYERS, 8)
    return module


def rows(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, aux and last states of these positions; each value tells its position."""
    position = torch.arange(start, stop)
    return position, position[:, None] + torch.zeros(1, 3 * H), position[:, None] + torch.zeros(1, H)


def failure(folder: Path, rid: str) -> str:
    with pytest.raises(OperatorError) as caught:
        read_capture(folder / f"{rid}.safetensors")
    assert caught.value.reason == "capture_failed"
    return caught.value.what


def test_chunks_are_joined_in_order_and_appear_only_when_complete(plugin: ModuleType, tmp_path: Path) -> None:
    plugin._add_chunk("r", 0, 10, rows(0, 4))
    plugin._add_chunk("r", 4, 10, rows(4, 8))
    assert list(tmp_path.iterdir()) == []
    plugin._add_chunk("r", 8, 10, rows(8, 10))
    capture = read_capture(tmp_path / "r.safetensors")
    assert capture.input_ids_T.tolist() == list(range(10))
    assert torch.equal(capture.last_TH[:, 0], torch.arange(10.0))
    assert (capture.chunks, capture.launch_id) == (3, "e3-unit")
    assert [path.name for path in tmp_path.iterdir()] == ["r.safetensors"]


def test_a_reused_buffer_does_not_change_what_was_captured(plugin: ModuleType, tmp_path: Path) -> None:
    """On a CPU the engine's buffers are overwritten in place by the next chunk."""
    ids, aux, last = rows(0, 4)
    plugin._add_chunk("r", 0, 8, (ids, aux, last))
    for buffer in (ids, aux, last):
        buffer.fill_(99)
    plugin._add_chunk("r", 4, 8, rows(4, 8))
    assert read_capture(tmp_path / "r.safetensors").input_ids_T.tolist() == list(range(8))


@pytest.mark.parametrize("prefix", [3, 5, 8])
def test_a_prefix_that_was_not_computed_here_is_an_error(plugin: ModuleType, tmp_path: Path, prefix: int) -> None:
    plugin._add_chunk("r", 0, 10, rows(0, 4))
    plugin._add_chunk("r", prefix, 10, rows(prefix, 10))
    assert f"prefix_mismatch: a chunk starts at {prefix}, but 4 rows are held" in failure(tmp_path, "r")


def test_a_request_taken_back_by_the_engine_is_captured_from_its_new_start(plugin: ModuleType, tmp_path: Path) -> None:
    plugin._add_chunk("r", 0, 6, rows(0, 4))
    plugin._add_chunk("r", 0, 6, rows(0, 6))
    capture = read_capture(tmp_path / "r.safetensors")
    assert capture.input_ids_T.tolist() == list(range(6))
    assert capture.chunks == 1


def test_a_good_capture_under_an_old_id_clears_the_old_error(plugin: ModuleType, tmp_path: Path) -> None:
    """A resumed extraction numbers its tries from 1 again."""
    plugin._add_chunk("r", 7, 10, rows(7, 10))
    assert "prefix_mismatch" in failure(tmp_path, "r")
    plugin._add_chunk("r", 0, 3, rows(0, 3))
    assert len(read_capture(tmp_path / "r.safetensors").input_ids_T) == 3


def test_requests_that_clients_gave_up_do_not_pile_up_in_memory(plugin: ModuleType, tmp_path: Path) -> None:
    for i in range(plugin.MOST_HELD + 3):
        plugin._add_chunk(f"left-{i}", 0, 10, rows(0, 4))
    assert len(plugin._capture.parts) == plugin.MOST_HELD
    assert "abandoned" in failure(tmp_path, "left-0")
    plugin._add_chunk(f"left-{plugin.MOST_HELD}", 4, 10, rows(4, 10))
    assert len(read_capture(tmp_path / f"left-{plugin.MOST_HELD}.safetensors").input_ids_T) == 10


def test_a_write_that_fails_leaves_a_note_and_nothing_else(plugin: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "r.safetensors").mkdir()  # the rename cannot succeed
    plugin._add_chunk("r", 0, 3, rows(0, 3))
    assert "write_failed" in failure(tmp_path, "r")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_missing_folder_does_not_end_the_engine(
    plugin: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.rmdir()
    plugin._add_chunk("r", 0, 3, rows(0, 3))
    assert "r: write_failed" in caplog.text
    assert "its error note cannot be written" in caplog.text


@pytest.mark.parametrize("rid", ["../x", "a/b", "", ".hidden", "x" * 300, "a\x00b", "ä"])
def test_ids_that_cannot_name_a_file_are_recognised(plugin: ModuleType, rid: str) -> None:
    assert not plugin.FILE_NAME.fullmatch(rid)


@pytest.mark.parametrize("rid", ["0" * 32 + "-1", f"{BOUNDARIES_RID}a1", "eagle3-canary-x", "a.b_c"])
def test_our_own_ids_name_files(plugin: ModuleType, rid: str) -> None:
    assert plugin.FILE_NAME.fullmatch(rid)


def test_without_a_dump_folder_the_plugin_registers_nothing(plugin: ModuleType) -> None:
    before = set(sys.modules)
    plugin.DUMP_DIR = ""
    plugin.register()
    assert not {name for name in set(sys.modules) - before if name.startswith("sglang")}
