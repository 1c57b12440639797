"""The exported draft: `config.json` + `model.safetensors` as SGLang's `llama_eagle3.py` loads them, and their check.

Owns: writing both atomically and proving, from the files alone, that SGLang will load every tensor. SGLang skips a
tensor whose name it does not know and leaves a missing one at its random start, both silently: a draft with only wrong
names starts healthy and accepts nothing. So the exact set of names and shapes is checked here, before any server.
Does not know training.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.draft_config import DraftConfig
from backend.eagle3.folders import complete_folder
from backend.eagle3.target import TargetCheckpoint
from backend.eagle3.vocab import DraftVocab
from backend.errors import OperatorError
from backend.report import Check

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def expected_tensors(config: DraftConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → (shape, stored dtype) of every tensor of an export: all of them, and no other."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.layers) * hidden),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (shared, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (shared, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    stored = _STORED[config.dtype]
    return {name: (shape, stored) for name, shape in shapes.items()} | {
        "d2t": ((config.draft_vocab_size,), "I64"),
        "t2d": ((config.vocab_size,), "BOOL"),
    }


def export_draft(draft: LlamaEagle3Draft, out_dir: Path, *, dtype: str = "float32") -> DraftConfig:
    """Write the draft; an earlier export at `out_dir` is replaced, anything else there is refused.

    Raises `Refused` (reason `folder_taken`). Returns the config as written.
    """
    config = replace(draft.config, dtype=dtype)
    tensors = {
        name: (value.to(DTYPES[dtype]) if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in draft.state_dict().items()
    }
    with complete_folder(Path(out_dir), replace=frozenset({CONFIG, WEIGHTS})) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config.as_json(), indent=2) + "\n")
    return config


def load_draft(folder: Path) -> LlamaEagle3Draft:
    """An exported draft as a float32 model, after the checks that need no target.

    Raises `OperatorError` (reason `draft_broken`) naming the first failed check.
    """
    require(check_export(folder))
    config = DraftConfig.from_json(json.loads((folder / CONFIG).read_text()))
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    draft = LlamaEagle3Draft(config, DraftVocab.from_offsets(tensors["d2t"], config.vocab_size))
    draft.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    return draft


def require(checks: list[Check]) -> None:
    """Raise `OperatorError` (reason `draft_broken`) if any check failed."""
    failed = next((check for check in checks if check.ok is False), None)
    if failed is not None:
        raise OperatorError(
            f"the draft cannot be served: {failed.name}: {failed.evidence}",
            fix=failed.fix or "export it again from its checkpoint",
            reason="draft_broken",
        )


def check_export(folder: Path, target: TargetCheckpoint | None = None) -> list[Check]:
    """Prove an exported draft from its files, with the target's own values where a target is given.

    Later checks need what the earlier ones proved, so the list ends at the first failed stage.
    """
    files = _check_files(folder)
    checks = [files]
    if not files.ok:
        return checks
    try:
        config = DraftConfig.from_json(json.loads((folder / CONFIG).read_text()))
        checks.append(Check("config", True, f"{len(config.as_json())} keys as trained"))
    except (OperatorError, ValueError) as error:
        what = error.what if isinstance(error, OperatorError) else f"config.json is not JSON: {error}"
        return [*checks, Check("config", False, what, fix="do not edit an exported config; export again")]
    header, check = _read_header(folder / WEIGHTS)
    checks.append(check)
    if not check.ok:
        return checks
    table = _check_tensor_table(header, config)
    checks.append(table)
    if not table.ok:
        return checks
    checks.extend(_check_values(folder / WEIGHTS, config))
    if target is not None:
        checks.append(_check_against_target(config, target))
    return checks


def _check_files(folder: Path) -> Check:
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    others = sorted(p.name for p in folder.glob("*.safetensors") if p.name != WEIGHTS)
    if missing:
        return Check("files", False, f"{folder} has no {' and no '.join(missing)}")
    if others:
        return Check("files", False, f"{folder} also holds {others[0]}, which SGLang would load too")
    return Check("files", True, f"{CONFIG} and {WEIGHTS}")


def _read_header(path: Path) -> tuple[dict[str, Any], Check]:
    """The safetensors header, and whether its offsets end exactly where the file does (no truncation, no tail)."""
    name, size = "file length", path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            return {}, Check(name, False, f"{path.name} has {size} bytes, less than its header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            return {}, Check(name, False, f"the header of {path.name} is not JSON: {error}")
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    ok = end == size
    return header, Check(name, ok, f"{path.name} has {size} bytes, its header describes {end}")


def _check_tensor_table(header: dict[str, Any], config: DraftConfig) -> Check:
    expected = expected_tensors(config)
    missing, extra = sorted(expected.keys() - header.keys()), sorted(header.keys() - expected.keys())
    name = "tensor names, shapes and dtypes"
    if missing or extra:
        return Check(name, False, f"missing {missing}, unknown {extra}", {"missing": missing, "unknown": extra})
    for tensor, (shape, dtype) in expected.items():
        found = (tuple(header[tensor]["shape"]), str(header[tensor]["dtype"]))
        if found != (shape, dtype):
            return Check(name, False, f"{tensor} is {found[1]} {list(found[0])}, expected {dtype} {list(shape)}")
    return Check(name, True, f"exactly the {len(expected)} expected tensors")


def _check_values(path: Path, config: DraftConfig) -> list[Check]:
    try:
        with safe_open(path, framework="pt") as file:
            odd = next(
                (
                    n
                    for n in expected_tensors(config)
                    if n not in ("d2t", "t2d") and not file.get_tensor(n).isfinite().all()
                ),
                None,
            )
            d2t_R, t2d_V = file.get_tensor("d2t"), file.get_tensor("t2d")
    except SafetensorError as error:
        return [Check("finite", False, f"{path.name} cannot be read: {error}")]
    finite = Check("finite", odd is None, f"{odd} holds NaN or Inf" if odd else "every weight is finite")
    name = "vocabulary map"
    try:
        vocab = DraftVocab.from_offsets(d2t_R, config.vocab_size)
    except ValueError as error:
        return [finite, Check(name, False, f"d2t: {error}")]
    if not torch.equal(vocab.t2d_V, t2d_V):
        return [finite, Check(name, False, "t2d does not mark the tokens that d2t maps to")]
    absent = [token for token in config.eos_token_ids if not bool(t2d_V[token])]
    if absent:
        return [finite, Check(name, False, f"the end-of-text token {absent[0]} cannot be proposed")]
    return [finite, Check(name, True, f"{len(vocab)} of {config.vocab_size} tokens, end-of-text among them")]


def _check_against_target(config: DraftConfig, target: TargetCheckpoint) -> Check:
    name = "fits the target"
    try:
        wanted = DraftConfig.for_target(
            target.config, draft_vocab_size=config.draft_vocab_size, layers=config.layers, dtype=config.dtype
        )
    except OperatorError as error:
        return Check(name, False, error.what, fix="train for this target")
    theirs, ours = wanted.as_json(), config.as_json()
    differing = sorted(key for key in theirs if theirs[key] != ours[key])
    if differing:
        key = differing[0]
        return Check(
            name, False, f"{key} is {ours[key]!r}, the target's is {theirs[key]!r}", fix="train for this target"
        )
    return Check(name, True, f"layers {list(config.layers)} of {target.config.num_hidden_layers}")
