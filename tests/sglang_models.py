"""Tiny models that SGLang really serves: a Llama and a DeepSeek-V3 with random weights, and EAGLE-3 drafts for them.

Built once per folder by transformers, float32, no network. Their tokenizer is a real byte-level BPE with a chat
template. Random weights make capture and parity tests sharp (nothing is small by accident); they answer nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB, HIDDEN, LAYERS = 512, 128, 8
DRAFT_VOCAB = 256
MAX_POSITION = 4096
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
CORPUS = (
    "the quick brown fox jumps over the lazy dog. speculative decoding drafts tokens and the target verifies them ",
    "hello world, this is a test of the tiny tokenizer 0123456789. what is the capital of france? paris. ",
)
# A line break ends the role: a space there would merge with the answer's first word, and no mask could tell them apart.
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tiny_llama(folder: Path) -> Path:
    """Llama: 8 layers, grouped heads (4 over 2), 1.3 M parameters."""
    config = LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=32)
    return _once(folder, lambda scratch: _save(LlamaForCausalLM, config, scratch))


def tiny_deepseek_v3(folder: Path) -> Path:
    """DeepSeek-V3 as Kimi-K2 uses it: latent attention, 8 experts in 2 groups, sigmoid routing with bias, yarn."""

    def build(scratch: Path) -> None:
        config = DeepseekV3Config(
            **COMMON,
            moe_intermediate_size=64,
            num_key_value_heads=4,
            n_shared_experts=1,
            n_routed_experts=8,
            routed_scaling_factor=2.5,
            kv_lora_rank=64,
            q_lora_rank=96,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 1024,
            },
        )
        _save(DeepseekV3ForCausalLM, config, scratch)
        # Keys of the real checkpoints' config.json that SGLang reads and transformers does not write.
        written = json.loads((scratch / "config.json").read_text())
        written |= {
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "ep_size": 1,
            "num_nextn_predict_layers": 0,
        }
        (scratch / "config.json").write_text(json.dumps(written, indent=1))

    return _once(folder, build)


def tiny_draft(folder: Path) -> Path:
    """An untrained EAGLE-3 draft for either tiny target: every second token is in its vocabulary."""
    return _once(folder, lambda scratch: _save_draft(scratch, _draft_weights(torch.arange(DRAFT_VOCAB) * 2)))


def fitted_draft(folder: Path, target: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> Path:
    """A draft that is often right on these very prompts: `fc` solved so that its first guess is the target's token.

    Its layer adds nothing, so it repeats the first guess afterwards: acceptances and rejections both happen.
    """

    def build(scratch: Path) -> None:
        inputs_PC, normed_PH, tokens, model = _trajectories(target, prompts, new_tokens)
        kept = torch.unique(tokens)
        others = torch.tensor([i for i in range(VOCAB) if i not in set(kept.tolist())])
        kept = torch.cat([kept, others[: DRAFT_VOCAB - len(kept)]]).sort().values
        weights = _draft_weights(kept)
        gram = inputs_PC @ inputs_PC.T + 1e-3 * torch.eye(len(inputs_PC), dtype=torch.float64)
        weights["fc.weight"] = (inputs_PC.T @ torch.linalg.solve(gram, normed_PH)).T.float().contiguous()
        weights["norm.weight"] = model.model.norm.weight.detach().clone()
        weights["lm_head.weight"] = model.lm_head.weight.detach()[kept].clone()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"midlayer.{name}.weight"].zero_()
        _save_draft(scratch, weights)

    return _once(folder, build)


def prompt(length: int, seed: int) -> list[int]:
    """Random ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def hugging_face_states(target: Path, input_ids: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Reference for a capture: (aux_TC, last_TH) of transformers' own model, float32, eager attention."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    states = model(torch.tensor([list(input_ids)]), output_hidden_states=True).hidden_states
    return torch.cat([states[c][0] for c in layers], dim=-1), states[-1][0]


def _once(folder: Path, build: Callable[[Path], None]) -> Path:
    """A model folder is complete as soon as it has its name."""
    if not folder.is_dir():
        scratch = folder.with_name(f".{folder.name}.tmp")
        scratch.mkdir(parents=True)
        torch.manual_seed(0)
        build(scratch)
        scratch.rename(folder)
    return folder


def _save(kind: type, config: Any, folder: Path) -> None:
    model = kind(config).to(torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(unk_token=None))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([text * 4 for text in CORPUS], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    whole.chat_template = CHAT_TEMPLATE
    return whole


def _draft_weights(kept: Tensor) -> dict[str, Tensor]:
    """Names and shapes of SGLang's LlamaForCausalLMEagle3; `kept` are the target ids of its vocabulary, ascending."""
    heads, kv_heads, width, inner = 4, 2, 32, 256

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape) * 0.05

    weights = {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(DRAFT_VOCAB, HIDDEN),
        "d2t": kept - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True),
    }
    shapes = {
        "self_attn.q_proj": (heads * width, 2 * HIDDEN),
        "self_attn.k_proj": (kv_heads * width, 2 * HIDDEN),
        "self_attn.v_proj": (kv_heads * width, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads * width),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
    }
    weights |= {f"midlayer.{name}.weight": weight(*shape) for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = torch.ones(HIDDEN)
    return weights


def _save_draft(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **COMMON,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


@torch.no_grad()
def _trajectories(
    target: Path, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Along the target's greedy answers: aux states at p, the (unit) pre-norm state at p + 1, and the tokens met."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    inputs, outputs, tokens = [], [], []
    for ids in prompts:
        whole = model.generate(
            torch.tensor([list(ids)]), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
        )
        before_norm.clear()
        states = model(whole, output_hidden_states=True).hidden_states
        start = len(ids) - 1
        aux = torch.cat([states[c][0] for c in (2, LAYERS // 2, LAYERS - 3)], dim=-1)
        inputs.append(aux[start:-1])
        outputs.append(before_norm[0][0][start + 1 :])
        tokens.append(whole[0, start:])
    outputs_PH = torch.cat(outputs).double()
    outputs_PH = outputs_PH / outputs_PH.pow(2).mean(-1, keepdim=True).sqrt()
    return torch.cat(inputs).double(), outputs_PH, torch.cat(tokens), model
