"""Reading a target: any layout gives the same values, only what is asked for is read, damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.eagle3.checkpoint_reader import CheckpointReader
from backend.eagle3.rope import RopeConfig
from backend.eagle3.target import TargetCheckpoint
from backend.errors import OperatorError
from tests.unit.eagle3_support import write_target

KIMI_ROPE = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def shard(folder: Path, prefix: str = "") -> None:
    """Split `model.safetensors` into two files with an index, every name under `prefix`."""
    tensors = {prefix + name: value for name, value in load_file(folder / "model.safetensors").items()}
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("tied", [True, False])
def test_single_and_sharded_prefixed_checkpoints_read_alike(tmp_path: Path, prefix: str, tied: bool) -> None:
    plain = write_target(tmp_path / "a", tied=tied)
    write_target(tmp_path / "b", tied=tied)
    shard(tmp_path / "b", prefix)
    other = TargetCheckpoint(tmp_path / "b")
    assert torch.equal(plain.frozen().embed_VH, other.frozen().embed_VH)
    assert torch.equal(plain.frozen().lm_head_VH, other.frozen().lm_head_VH)
    assert torch.equal(plain.final_norm(), other.final_norm())
    assert plain.layer_names(7) == other.layer_names(7) and plain.layer_names(6) == frozenset()
    assert plain.tied == other.tied == tied
    assert torch.equal(other.head_rows([3, 1]), plain.frozen().lm_head_VH[[3, 1]])


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    frozen = write_target(tmp_path, tied=True).frozen().to(torch.device("cpu"), torch.bfloat16)
    assert frozen.lm_head_VH is frozen.embed_VH


def test_rows_come_in_the_order_asked_for_with_repeats(tmp_path: Path) -> None:
    target = write_target(tmp_path)
    table = target.frozen().embed_VH
    wanted = [39, 0, 7, 8, 9, 7]
    assert torch.equal(target.embed_rows(wanted), table[wanted])
    assert target.embed_rows([]).shape == (0, 16)


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_outside_the_table_is_an_error_that_names_it(tmp_path: Path, row: int) -> None:
    with pytest.raises(OperatorError, match=str(row)) as caught:
        write_target(tmp_path).embed_rows([3, row])
    assert caught.value.reason == "row_out_of_range"


def test_kimi_layout_is_understood(tmp_path: Path) -> None:
    """Kimi-K2.5: config under `text_config`, DeepSeek widths, YaRN, eos only in the outer files."""
    write_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {
            "model_type": "kimi_k2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 61,
            "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
            "v_head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
            "rope_theta": 50000.0, "rope_scaling": KIMI_ROPE, "eos_token_id": 31, "bos_token_id": 30,
        },
    }))  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [32, 33]}))
    added = {"34": {"content": "<|im_end|>", "special": True}, "35": {"content": "x", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 36, "special": True}]}))
    config = TargetCheckpoint(tmp_path).config
    assert config.architecture == "KimiK25ForConditionalGeneration"
    assert config.num_hidden_layers == 61
    assert config.head_dim == 8
    assert config.rope.kind == "yarn" and config.rope.theta == 50000.0
    assert dict(config.rope.scaling)["factor"] == 64.0
    assert config.eos_token_ids == (31, 32, 33)
    assert config.special_ids == (30, 31, 32, 33, 34, 36)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 3]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}},
    ],
)
def test_a_rotary_embedding_that_the_draft_cannot_have_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(OperatorError) as caught:
        RopeConfig.from_model_config(values)
    assert caught.value.reason == "rope_unsupported"


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_target(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(OperatorError, match=r"model\.safetensors") as caught:
        TargetCheckpoint(tmp_path)
    assert caught.value.reason == "checkpoint_broken"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_target(tmp_path)
    shard(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(OperatorError, match=r"model-2\.safetensors") as caught:
        CheckpointReader(tmp_path)
    assert caught.value.reason == "checkpoint_missing"


def test_a_folder_without_weights_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError) as caught:
        TargetCheckpoint(tmp_path)
    assert caught.value.reason == "checkpoint_missing"
    write_target(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OperatorError, match="num_attention_heads") as caught:
        TargetCheckpoint(tmp_path)
    assert caught.value.reason == "config_incomplete"


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"model\.layers\.7\.nothing") as caught:
        write_target(tmp_path).layer_tensor(7, "nothing")
    assert caught.value.reason == "tensor_missing"
