"""Training against the real parts: Hugging Face's layer, SGLang's own loader, kill -9, and data that can be learnt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import backend.engine
from backend.eagle3.accept import estimate_accept
from backend.eagle3.attention import ChainCache
from backend.eagle3.checkpoints import PROGRESS
from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.draft_config import DraftConfig
from backend.eagle3.export import export_draft, load_draft
from backend.eagle3.initial import initialise
from backend.eagle3.records import SequenceSource, TrainingRecord
from backend.eagle3.rope import RopeConfig, cos_sin, inverse_frequencies
from backend.eagle3.settings import TrainSettings
from backend.eagle3.target import TargetCheckpoint
from backend.eagle3.trainer import train
from backend.eagle3.vocab import DraftVocab
from backend.report import Silent
from tests.unit.eagle3_support import CPU, random_draft, record, write_target

pytestmark = pytest.mark.slow

ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
}  # fmt: skip
KIMI_ROPE: dict[str, object] = {
    "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(ROPES))
def test_a_draft_made_of_the_targets_last_layer_computes_that_layer(tmp_path: Path, kind: str) -> None:
    """With the token half of q, k and v at zero and fc passing the last layer's input on, the draft IS that layer: its
    state must be Hugging Face's last hidden state. Checks attention, GQA, rotary embedding, norms and MLP at once."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=512, initializer_range=0.4,
        rope_parameters={"rope_theta": 10000.0, **ROPES[kind]}, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    target = TargetCheckpoint(tmp_path)
    draft_config = DraftConfig.for_target(target.config, draft_vocab_size=50, layers=(1, 3, 5))
    draft = LlamaEagle3Draft(draft_config, DraftVocab(torch.arange(50), 50))
    initialise(draft, target, init="layer", seed=0)
    ids_BT = torch.randint(50, (2, 100))
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(draft.midlayer.self_attn, name).weight[:, :32] = 0
        draft.fc.weight.zero_()
        draft.fc.weight[:, -32:] = torch.eye(32)
        out = model(ids_BT, output_hidden_states=True)
        aux_BTC = torch.cat([out.hidden_states[c] for c in (1, 3, 5)], dim=-1)
        embed_BTH = target.frozen().embed_VH[ids_BT]
        g_BTH = draft.step(embed_BTH, draft.fuse(aux_BTC), ChainCache())
    torch.testing.assert_close(draft.norm(g_BTH), out.hidden_states[6], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft.logits(g_BTH), out.logits, rtol=1e-4, atol=1e-3)


SGLANG_LOADER = """
import json, sys, torch
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
set_global_server_args_for_scheduler(ServerArgs(model_path=sys.argv[1], device="cpu", attention_backend="torch_native"))
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
init_distributed_environment(
    backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method="file://" + sys.argv[3]
)
initialize_model_parallel(1)
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from safetensors.torch import load_file
from transformers import AutoConfig
model = LlamaForCausalLMEagle3(AutoConfig.from_pretrained(sys.argv[2]))
for parameter in model.parameters():
    parameter.data.fill_(float("nan"))
tensors = load_file(sys.argv[2] + "/model.safetensors")
model.load_weights(tensors.items())
loaded = {name: p.data.clone() for name, p in model.named_parameters()}
loaded["cos_sin"] = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
loaded["hot_token_id"] = model.hot_token_id
torch.save(loaded, sys.argv[4])
"""


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, KIMI_ROPE, ROPES["llama3"]])
def test_sglangs_own_loader_takes_every_tensor(tmp_path: Path, rope: dict[str, object]) -> None:
    """SGLang skips unknown names and leaves missing ones as they were, silently. Here they were NaN: after loading,
    only the embedding (the server puts the target's in its place) may still be. And SGLang's rotary table is ours."""
    target = write_target(tmp_path / "target", head_dim=8, rope_parameters={"rope_theta": 50000.0, **rope})
    draft = random_draft(target, 32).float()
    export_draft(draft, tmp_path / "draft")
    # the server needs a whole model folder only to name one; the tokenizer is not read
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(backend.engine.__file__).parent / "cpu_mode"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_LOADER, str(target.folder), str(tmp_path / "draft"),
         str(tmp_path / "rendezvous"), str(tmp_path / "loaded.pt")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)

    ours = draft.state_dict()
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    expected = {
        "model.fc.weight": ours["fc.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["lm_head.weight"],
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat([ours[f"{attention}{n}_proj.weight"] for n in "qkv"]),
        "model.layers.0.self_attn.o_proj.weight": ours[f"{attention}o_proj.weight"],
        "model.layers.0.mlp.gate_up_proj.weight": torch.cat([ours[f"{mlp}{n}_proj.weight"] for n in ("gate", "up")]),
        "model.layers.0.mlp.down_proj.weight": ours[f"{mlp}down_proj.weight"],
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        expected[f"model.layers.0.{norm}.weight"] = ours[f"midlayer.{norm}.weight"]
    table, hot = loaded.pop("cos_sin"), loaded.pop("hot_token_id")
    assert loaded.pop("model.embed_tokens.weight").isnan().all()
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        if name == "lm_head.weight":
            loaded[name] = loaded[name][: len(value)]  # SGLang pads the vocabulary to a multiple of 64
        assert torch.equal(loaded[name], value), name
    assert torch.equal(hot, draft.target_ids_R)
    inv_freq_F, scale = inverse_frequencies(target.config.rope, 8, target.config.max_position_embeddings)
    cos_TF, sin_TF = cos_sin(inv_freq_F, scale, 0, 500)
    torch.testing.assert_close(table[:500], torch.cat([cos_TF, sin_TF], dim=-1), rtol=1e-6, atol=1e-6)


def test_rotary_schemes_differ_so_that_their_tests_mean_something() -> None:
    tables = [
        inverse_frequencies(RopeConfig.from_model_config({"rope_parameters": rope}), 12, 512)[0]
        for rope in [*ROPES.values(), KIMI_ROPE]
    ]
    assert all(not torch.allclose(a, b) for i, a in enumerate(tables) for b in tables[:i])


def on_policy(target: TargetCheckpoint, seed: int) -> TrainingRecord:
    """A record whose text is what its own last hidden states predict: the target's greedy answer to itself."""
    made = record(target, 16, [(4, 16)], seed)
    last_TH = 3 * made.last_TH  # as sure of itself as a real model
    choice_T = (last_TH @ target.frozen().lm_head_VH.T).argmax(-1)
    ids_T = made.input_ids_T.clone()
    ids_T[5:] = choice_T[4:-1]
    return TrainingRecord(made.id, made.source, ids_T, made.spans, made.aux_TC, last_TH)


def test_training_learns_one_batch_by_heart(tmp_path: Path) -> None:
    """Every piece from the loss to the export has to be right for a chain of three to be accepted nearly always."""
    target = write_target(tmp_path / "target", hidden=32, inner=64, head_dim=8)
    records = [on_policy(target, seed) for seed in range(4)]
    settings = TrainSettings(
        ttt_steps=3, batch_tokens=64, lr=3e-3, epochs=400, draft_vocab_size=40, init="layer", warmup_share=0.05,
        threads=1, eval_every_s=None, checkpoint_every_s=None,
    )  # fmt: skip
    source = SequenceSource(records)
    result = train(settings, source, source, target, tmp_path / "run", Silent())
    assert result.draft_dir is not None
    assert result.loss_last < 0.5 * result.loss_first

    def walk(folder: Path) -> float:
        draft, frozen = load_draft(folder), target.frozen()
        return estimate_accept(draft, frozen, source, steps=3, batch_tokens=64, device=CPU)[0].walk.accept_length

    assert walk(result.untrained_dir) < 1.5
    assert walk(result.draft_dir) > 3.0
    assert result.evaluations[-1].estimate.walk.accept_length == walk(result.draft_dir), (
        "the export is what was trained"
    )


CHILD = """
import sys
from pathlib import Path
from backend.eagle3.records import SequenceSource
from backend.eagle3.settings import TrainSettings
from backend.eagle3.target import TargetCheckpoint
from backend.eagle3.trainer import train
from backend.report import Silent
from tests.unit.eagle3_support import record

class Loud(Silent):
    def progress(self, done, total, unit, **detail):
        print(done, flush=True)

target = TargetCheckpoint(Path(sys.argv[1]))
records = SequenceSource([record(target, 8 + i, [(2, 8 + i)], i) for i in range(8)])
settings = TrainSettings(
    ttt_steps=2, batch_tokens=24, lr=3e-3, epochs=6, draft_vocab_size=30, threads=1, eval_every_s=None,
    checkpoint_every_s=None, checkpoint_every_steps=1,
)
train(settings, records, SequenceSource([]), target, Path(sys.argv[2]), Loud())
"""


def start(target: Path, out: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(target), str(out)],
        stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> int:
    """Run to the end; the first step that was made."""
    assert process.stdout is not None
    steps = [int(line) for line in process.stdout]
    assert process.wait() == 0
    return steps[0]


def final_losses(out: Path) -> list[float]:
    newest = sorted((out / "checkpoints").iterdir())[-1]
    losses: list[float] = json.loads((newest / PROGRESS).read_text())["progress"]["losses"]
    return losses


def test_a_run_killed_three_times_ends_as_one_that_never_was(tmp_path: Path) -> None:
    """kill -9 with a checkpoint after every step, so that most kills hit a checkpoint being written."""
    target = write_target(tmp_path / "target").folder
    finish(start(target, tmp_path / "whole"))
    for last_seen in (4, 9, 15):
        process = start(target, tmp_path / "killed")
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= last_seen:
                break
        process.kill()
        process.wait()
        process.stdout.close()
    first = finish(start(target, tmp_path / "killed"))
    names = [p.name for p in (tmp_path / "killed" / "checkpoints").iterdir()]
    assert all(name.startswith("step-") for name in names), "half-written checkpoints are removed"
    assert first >= 14, "the run went on from its newest checkpoint"
    assert final_losses(tmp_path / "killed") == final_losses(tmp_path / "whole")
    draft = "draft/model.safetensors"
    assert (tmp_path / "killed" / draft).read_bytes() == (tmp_path / "whole" / draft).read_bytes()
