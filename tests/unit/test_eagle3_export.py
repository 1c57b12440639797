"""An export is exactly what SGLang loads, and anything less is refused before a server sees it."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.eagle3.draft_config import DraftConfig
from backend.eagle3.export import check_export, expected_tensors, export_draft, load_draft, require
from backend.eagle3.folders import complete_folder
from backend.eagle3.initial import initialise
from backend.eagle3.target import TargetCheckpoint
from backend.errors import OperatorError, Refused
from tests.unit.eagle3_support import random_draft, write_target
from tests.unit.test_eagle3_target import KIMI_ROPE

OURS = ("config.json", "model.safetensors")


@pytest.fixture
def target(tmp_path: Path) -> TargetCheckpoint:
    return write_target(tmp_path / "target")


@pytest.fixture
def exported(tmp_path: Path, target: TargetCheckpoint) -> Path:
    export_draft(random_draft(target, 20), tmp_path / "draft")
    return tmp_path / "draft"


def failed(folder: Path, target: TargetCheckpoint | None = None) -> tuple[str, str]:
    """Name and evidence of the check that refuses the export."""
    checks = check_export(folder, target)
    with pytest.raises(OperatorError) as caught:
        require(checks)
    assert caught.value.reason == "draft_broken"
    check = next(check for check in checks if check.ok is False)
    return check.name, check.evidence


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Change, add or (None) remove tensors; `__` in a keyword stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changed.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_names_and_shapes_are_those_of_sglangs_table(exported: Path, target: TargetCheckpoint) -> None:
    h, inner, q, kv, d, v = 16, 24, 24, 12, 20, 40
    table = {
        "fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (d, h), "d2t": (d,), "t2d": (v,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h), "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h), "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (inner, h), "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner), "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,), "midlayer.post_attention_layernorm.weight": (h,),
    }  # fmt: skip
    tensors = load_file(exported / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == table
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    checks = check_export(exported, target)
    assert all(check.ok for check in checks) and len(checks) == 7
    assert sorted(p.name for p in exported.iterdir()) == ["config.json", "model.safetensors"]


def test_a_state_dict_is_the_export(target: TargetCheckpoint) -> None:
    """Parameter names are SGLang's names: nothing is renamed on the way out."""
    draft = random_draft(target, 20)
    assert set(draft.state_dict()) == set(expected_tensors(draft.config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_export_computes_what_the_draft_computed(tmp_path: Path, target: TargetCheckpoint, dtype: str) -> None:
    draft = random_draft(target, 38).float()
    export_draft(draft, tmp_path / "x", dtype=dtype)
    back = load_draft(tmp_path / "x")
    for name, value in draft.state_dict().items():
        stored = value.to(torch.bfloat16).float() if dtype == "bfloat16" and value.is_floating_point() else value
        assert torch.equal(back.state_dict()[name], stored), name
    assert back.config.layers == (2, 4, 5) and back.config.dtype == dtype


def test_a_missing_tensor_is_refused_by_name(exported: Path) -> None:
    rewrite(exported, midlayer__mlp__up_proj__weight=None)
    name, evidence = failed(exported)
    assert name.startswith("tensor names") and "midlayer.mlp.up_proj.weight" in evidence


def test_a_renamed_tensor_is_refused(exported: Path) -> None:
    """SGLang would skip it silently and keep its random start."""
    tensors = load_file(exported / "model.safetensors")
    rewrite(exported, midlayer__hidden_norm__weight=None, layers__0__hidden__weight=tensors["norm.weight"].clone())
    _, evidence = failed(exported)
    assert "midlayer.hidden_norm.weight" in evidence and "layers.0.hidden.weight" in evidence


def test_a_wrong_shape_is_refused(exported: Path) -> None:
    rewrite(exported, fc__weight=torch.zeros(16, 32))
    _, evidence = failed(exported)
    assert "fc.weight" in evidence and "[16, 48]" in evidence


def test_a_wrong_dtype_is_refused(exported: Path) -> None:
    rewrite(exported, norm__weight=torch.ones(16, dtype=torch.float16))
    assert "norm.weight is F16" in failed(exported)[1]


@pytest.mark.parametrize("cut", [1, 1000, 10**6])
def test_a_truncated_file_is_refused(exported: Path, cut: int) -> None:
    weights = exported / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: max(4, weights.stat().st_size - cut)])
    assert failed(exported)[0] == "file length"


def test_a_tail_after_the_tensors_is_refused(exported: Path) -> None:
    with (exported / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert failed(exported)[0] == "file length"


def test_a_header_that_is_not_json_is_refused(exported: Path) -> None:
    (exported / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope")
    assert failed(exported)[0] == "file length"


def test_nan_is_refused_by_name(exported: Path) -> None:
    rewrite(exported, lm_head__weight=torch.full((20, 16), float("nan")))
    assert failed(exported) == ("finite", "lm_head.weight holds NaN or Inf")


def test_vocabulary_maps_that_disagree_are_refused(exported: Path) -> None:
    t2d = load_file(exported / "model.safetensors")["t2d"]
    rewrite(exported, t2d=~t2d)
    assert failed(exported)[0] == "vocabulary map"
    rewrite(exported, t2d=t2d, d2t=torch.zeros(20, dtype=torch.int64) + 30)
    assert failed(exported)[0] == "vocabulary map"


def test_a_draft_that_cannot_end_a_turn_is_refused(tmp_path: Path, target: TargetCheckpoint) -> None:
    draft = random_draft(target, 20)
    draft.d2t.fill_(20)  # tokens 20 … 39
    draft.t2d.copy_(torch.arange(40) >= 20)
    export_draft(draft, tmp_path / "x")
    assert "end-of-text token 2" in failed(tmp_path / "x")[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 1e6), ("tie_word_embeddings", True), ("num_hidden_layers", 2), ("norm_output", None)],
)
def test_an_edited_config_is_refused(exported: Path, key: str, value: object) -> None:
    config = json.loads((exported / "config.json").read_text())
    config[key] = value
    if key == "norm_output":
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    (exported / "config.json").write_text(json.dumps(config))
    assert failed(exported)[0] == "config"


def test_a_draft_for_another_target_is_refused(tmp_path: Path, exported: Path) -> None:
    other = write_target(tmp_path / "other", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    name, evidence = failed(exported, other)
    assert name == "fits the target" and "500000.0" in evidence
    shallow = write_target(tmp_path / "shallow", layers=5)
    assert failed(exported, shallow)[0] == "fits the target"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_refused(exported: Path, name: str) -> None:
    (exported / name).unlink()
    assert failed(exported)[0] == "files" and name in failed(exported)[1]


def test_a_second_weight_file_is_refused(exported: Path) -> None:
    (exported / "old.safetensors").write_bytes((exported / "model.safetensors").read_bytes())
    assert failed(exported)[0] == "files"


def test_exporting_again_replaces_our_export_and_nothing_else(tmp_path: Path, target: TargetCheckpoint) -> None:
    first, second = random_draft(target, 38, seed=1).float(), random_draft(target, 38, seed=2).float()
    export_draft(first, tmp_path / "x")
    export_draft(second, tmp_path / "x")
    assert torch.equal(load_draft(tmp_path / "x").fc.weight, second.fc.weight)
    (tmp_path / "x" / "notes.txt").write_text("mine")
    with pytest.raises(Refused, match=r"notes\.txt") as caught:
        export_draft(first, tmp_path / "x")
    assert caught.value.reason == "folder_taken"
    assert torch.equal(load_file(tmp_path / "x" / "model.safetensors")["fc.weight"], second.fc.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target", "x"], "nothing half-written is left"


def test_a_failed_write_leaves_the_old_export_and_no_rest(
    tmp_path: Path, target: TargetCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = random_draft(target, 38).float()
    export_draft(draft, tmp_path / "x")
    before = (tmp_path / "x" / "model.safetensors").read_bytes()

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("backend.eagle3.export.save_file", no_space)
    with pytest.raises(OSError, match="No space"):
        export_draft(draft, tmp_path / "x")
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target", "x"]


def test_a_crash_between_the_two_renames_loses_no_export(tmp_path: Path, target: TargetCheckpoint) -> None:
    draft = random_draft(target, 38).float()
    export_draft(draft, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / ".x.old")
    (tmp_path / ".x.tmp").mkdir()
    with pytest.raises(RuntimeError, match="stop"), complete_folder(tmp_path / "x", replace=frozenset(OURS)):
        raise RuntimeError("stop")
    assert torch.equal(load_draft(tmp_path / "x").fc.weight, draft.fc.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target", "x"]


def test_layer_ids_are_written_where_sglang_reads_them_and_in_its_numbering(target: TargetCheckpoint) -> None:
    """Llama-type targets: SGLang captures at id + 1. DeepSeek-type (Kimi): ids as they are, unless the first is 1."""
    deep = replace(target.config, num_hidden_layers=30)
    llama = DraftConfig.for_target(deep, draft_vocab_size=20)
    assert llama.layers == (2, 15, 27)
    kimi = replace(llama, target_architecture="KimiK25ForConditionalGeneration", layers=(2, 30, 58))
    for config, ids in ((llama, [1, 14, 26]), (kimi, [2, 30, 58])):
        data = json.loads(json.dumps(config.as_json()))
        assert data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
        assert data["eagle_config"]["use_aux_hidden_state"] is True
        assert DraftConfig.from_json(data) == config


def test_yarn_is_carried_in_both_spellings(tmp_path: Path) -> None:
    target = write_target(tmp_path, rope_parameters=None, rope_theta=50000.0, rope_scaling=KIMI_ROPE)
    data = DraftConfig.for_target(target.config, draft_vocab_size=20).as_json()
    assert data["rope_theta"] == data["rope_parameters"]["rope_theta"] == 50000.0
    assert data["rope_scaling"]["rope_type"] == data["rope_parameters"]["rope_type"] == "yarn"
    assert data["rope_scaling"]["factor"] == 64.0 and data["rope_scaling"]["mscale_all_dim"] == 1.0
    assert DraftConfig.from_json(json.loads(json.dumps(data))).rope == target.config.rope


@pytest.mark.parametrize("layers", [(2, 4, 8), (4, 2), ()])
def test_layers_that_the_target_does_not_have_are_refused(target: TargetCheckpoint, layers: tuple[int, ...]) -> None:
    with pytest.raises(OperatorError) as caught:
        DraftConfig.for_target(target.config, draft_vocab_size=20, layers=layers)
    assert caught.value.reason == "bad_layers"


def test_an_activation_that_sglangs_draft_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="gelu") as caught:
        DraftConfig.for_target(write_target(tmp_path, hidden_act="gelu").config, draft_vocab_size=20)
    assert caught.value.reason == "draft_unsupported"


def test_layer_init_takes_the_targets_last_layer(target: TargetCheckpoint) -> None:
    draft = random_draft(target, 20).float()
    initialise(draft, target, init="layer", seed=0)
    layer = draft.midlayer
    assert torch.equal(layer.self_attn.q_proj.weight[:, 16:], target.layer_tensor(7, "self_attn.q_proj.weight"))
    assert torch.equal(layer.mlp.down_proj.weight, target.layer_tensor(7, "mlp.down_proj.weight"))
    assert torch.equal(layer.hidden_norm.weight, target.layer_tensor(7, "input_layernorm.weight"))
    assert torch.equal(draft.lm_head.weight, target.frozen().lm_head_VH[draft.target_ids_R])
    assert torch.equal(draft.norm.weight, target.final_norm())
    torch.testing.assert_close(draft.fc.weight[:, 32:], torch.eye(16), atol=0.02, rtol=0)
    again = random_draft(target, 20, seed=0).float()
    initialise(again, target, init="layer", seed=0)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))


def test_layer_init_refuses_a_layer_that_is_not_a_plain_llama_layer(target: TargetCheckpoint) -> None:
    """DeepSeek's latent attention, Qwen's biases and norms, quantised weights: each would start wrong, silently."""
    rewrite(target.folder, model__layers__7__self_attn__q_norm__weight=torch.ones(6))
    odd = TargetCheckpoint(target.folder)
    with pytest.raises(OperatorError, match=r"q_norm") as caught:
        initialise(random_draft(odd, 20), odd, init="layer", seed=0)
    assert caught.value.reason == "init_unsupported"
