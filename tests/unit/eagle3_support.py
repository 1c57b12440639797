"""Small real parts for the EAGLE-3 tests: a tiny target checkpoint on disk, random records, and the slow reference.

The reference is written as the definition reads: one anchor and one token at a time, an explicit list of keys and
values, float64, no batching and no masks. It shares no code with `backend.eagle3` beside the parameter names.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.eagle3.batches import Batch, collate
from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.draft_config import DraftConfig
from backend.eagle3.initial import initialise
from backend.eagle3.records import TrainingRecord
from backend.eagle3.target import FrozenTarget, TargetCheckpoint
from backend.eagle3.teacher import Teacher
from backend.eagle3.vocab import DraftVocab
from backend.report import Check

CPU = torch.device("cpu")
# Tensors of a few hundred numbers: a second thread has nothing to do but wait, and on a busy machine waits long.
torch.set_num_threads(1)


def write_target(
    folder: Path,
    *,
    hidden: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 6,
    inner: int = 24,
    layers: int = 8,
    vocab: int = 40,
    tied: bool = True,
    seed: int = 0,
    **config: object,
) -> TargetCheckpoint:
    """A Llama checkpoint with random weights: embedding, head, final norm and only its last layer."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(std=0.3, generator=generator)

    last = f"model.layers.{layers - 1}."
    tensors = {
        "model.embed_tokens.weight": weight(vocab, hidden),
        "model.norm.weight": 1 + weight(hidden),
        f"{last}self_attn.q_proj.weight": weight(heads * head_dim, hidden),
        f"{last}self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
        f"{last}self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
        f"{last}self_attn.o_proj.weight": weight(hidden, heads * head_dim),
        f"{last}mlp.gate_proj.weight": weight(inner, hidden),
        f"{last}mlp.up_proj.weight": weight(inner, hidden),
        f"{last}mlp.down_proj.weight": weight(hidden, inner),
        f"{last}input_layernorm.weight": 1 + weight(hidden),
        f"{last}post_attention_layernorm.weight": 1 + weight(hidden),
    }
    if not tied:
        tensors["lm_head.weight"] = weight(vocab, hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(values | config))
    return TargetCheckpoint(folder)


def random_draft(target: TargetCheckpoint, draft_vocab: int, seed: int = 0) -> LlamaEagle3Draft:
    """A draft with large random weights in float64, so that every term matters. Its vocabulary holds token 2 (eos)."""
    generator = torch.Generator().manual_seed(seed)
    size = target.config.vocab_size
    shuffled = [token for token in torch.randperm(size, generator=generator).tolist() if token != 2]
    ids = torch.tensor(sorted([2, *shuffled[: draft_vocab - 1]]))
    draft = LlamaEagle3Draft(DraftConfig.for_target(target.config, draft_vocab_size=draft_vocab), DraftVocab(ids, size))
    initialise(draft, target, init="random", seed=seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += torch.empty(parameter.shape).normal_(std=0.2, generator=generator)
    return draft.double()


def record(
    target: TargetCheckpoint, tokens: int, spans: list[tuple[int, int]], seed: int, source: str = "a"
) -> TrainingRecord:
    """A record of random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    hidden = target.config.hidden_size
    return TrainingRecord(
        id=f"{seed:032x}",
        source=source,
        input_ids_T=torch.randint(3, target.config.vocab_size, (tokens,), generator=generator),
        spans=tuple(spans),
        aux_TC=torch.randn(tokens, 3 * hidden, generator=generator),
        last_TH=torch.randn(tokens, hidden, generator=generator),
    )


def double_batch(records: list[TrainingRecord], steps: int) -> Batch:
    """The product's own batch, its states widened to float64."""
    batch = collate(records, steps, CPU)
    return replace(batch, aux_BTC=batch.aux_BTC.double(), last_BTH=batch.last_BTH.double())


def teacher_of(target: TargetCheckpoint, draft: LlamaEagle3Draft) -> tuple[FrozenTarget, Teacher]:
    """The frozen target in float64 and its teacher for the draft's vocabulary."""
    frozen = target.frozen(torch.float64)
    return frozen, Teacher(frozen, draft.target_ids_R)


@dataclass
class Heard:
    """A reporter that keeps what it is told."""

    metrics: list[dict[str, float | int | str]] = field(default_factory=list)
    progressed: list[tuple[int, int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def progress(self, done: int, total: int, unit: str, **detail: float | int | str) -> None:
        self.progressed.append((done, total, unit))

    def metric(self, **values: float | int | str) -> None:
        self.metrics.append(values)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def check(self, check: Check) -> None:
        self.checks.append(check)


KeyValue = tuple[torch.Tensor, torch.Tensor]


class Reference:
    """The draft's forward for one token at a time, from a dict of named float64 tensors."""

    def __init__(self, draft: LlamaEagle3Draft, target: FrozenTarget) -> None:
        self.w = dict(draft.named_parameters())
        self.config = draft.config
        self.embed = target.embed_VH

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.config.rms_norm_eps) * self.w[name]

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rotate one head's vector, element by element."""
        half, out = len(x) // 2, []
        for i in range(len(x)):
            angle = position / self.config.rope.theta ** (2 * (i % half) / len(x))
            partner = -x[i + half] if i < half else x[i - half]
            out.append(x[i] * math.cos(angle) + partner * math.sin(angle))
        return torch.stack(out)

    def token(self, token: int, g: torch.Tensor, position: int, seen: list[KeyValue]) -> tuple[torch.Tensor, KeyValue]:
        """(output state, this token's key and value); attends to `seen` and to itself."""
        c, a = self.config, "midlayer.self_attn."
        x = torch.cat([self.norm(self.embed[token], "midlayer.input_layernorm.weight"),
                       self.norm(g, "midlayer.hidden_norm.weight")])  # fmt: skip
        q, k, v = ((self.w[f"{a}{n}_proj.weight"] @ x).view(-1, c.head_dim) for n in ("q", "k", "v"))
        mine = (torch.stack([self.turn(row, position) for row in k]), v)
        heads = []
        for h in range(c.num_attention_heads):
            shared = h * c.num_key_value_heads // c.num_attention_heads
            query = self.turn(q[h], position)
            keys = [keys[shared] for keys, _ in [*seen, mine]]
            score = torch.stack([query @ key / math.sqrt(c.head_dim) for key in keys])
            weight = torch.exp(score - score.max()) / torch.exp(score - score.max()).sum()
            heads.append(sum(w * value[shared] for w, (_, value) in zip(weight, [*seen, mine], strict=True)))
        h_state = g + self.w[f"{a}o_proj.weight"] @ torch.cat(heads)
        y = self.norm(h_state, "midlayer.post_attention_layernorm.weight")
        gate, up = self.w["midlayer.mlp.gate_proj.weight"] @ y, self.w["midlayer.mlp.up_proj.weight"] @ y
        return h_state + self.w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up), mine

    def scores(self, g: torch.Tensor) -> torch.Tensor:
        return self.w["lm_head.weight"] @ self.norm(g, "norm.weight")

    def prefix(self, record: TrainingRecord, upto: int) -> list[tuple[torch.Tensor, KeyValue]]:
        """Step 0 of anchors 0 … upto, each with the earlier ones in its cache."""
        done: list[tuple[torch.Tensor, KeyValue]] = []
        for p in range(upto + 1):
            g = self.w["fc.weight"] @ record.aux_TC[p].double()
            done.append(self.token(int(record.input_ids_T[p + 1]), g, p, [kv for _, kv in done]))
        return done


def brute_supervised(record: TrainingRecord, p: int, k: int) -> bool:
    """(p, k) counts iff x_{p+1} … x_{p+2+k} are all there and all of one turn."""
    wanted = set(range(p + 1, p + 3 + k))
    return any(wanted <= set(range(start, stop)) for start, stop in record.spans)
