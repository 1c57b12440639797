"""Is the installed SGLang as its wheel came? Three-way state of the files that people patch to dump hidden states.

A dump patch left in a model file and our plugin would both write; an upgrade silently undoes such a patch. The wheel's
own RECORD (sha256 per file) tells pristine from changed without knowing any patch.
"""

from __future__ import annotations

import json
import subprocess

PATCHED_BY_PEOPLE = (
    "sglang/srt/models/deepseek_v2.py",
    "sglang/srt/models/llama.py",
    "sglang/srt/models/qwen2.py",
    "sglang/srt/models/qwen3.py",
    "sglang/srt/models/kimi_k25.py",
    "sglang/srt/layers/logits_processor.py",
)
_COMPARE = """
import base64, hashlib, importlib.metadata as m, json, sys
changed = []
for file in m.files("sglang") or []:
    if str(file) in sys.argv[1:] and file.hash is not None:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(str(file))
print(json.dumps(changed))
"""


def hand_patched(python: str) -> list[str]:
    """Files of `python`'s SGLang that differ from its wheel's RECORD; empty = pristine."""
    argv = [python, "-c", _COMPARE, *PATCHED_BY_PEOPLE]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    changed: list[str] = json.loads(done.stdout)
    return changed
