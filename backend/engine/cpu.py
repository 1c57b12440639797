"""What SGLang needs to serve on a CPU: flags, environment, and the folder of the CPU mode for its PYTHONPATH.

Measured for 0.5.14 with the wheel unmodified (docs/cpu-mode.md). Only small models; EAGLE-3 in float32 only, where its
output equals plain greedy output token for token.
"""

from __future__ import annotations

from pathlib import Path

from backend.resources import package_folder, unpacked

TRITON = "triton"
FLAGS = (
    *("--device", "cpu"),
    "--disable-overlap-schedule",
    "--skip-server-warmup",  # the first /health warms up; the warm-up's own request counts against its time-out
    "--sleep-on-idle",  # an idle scheduler burns half a core otherwise
    *("--watchdog-timeout", "900"),
)


def attention_backend(*, speculative: bool) -> str:
    """torch_native has no draft backend in SGLang; the Triton one runs interpreted, its hot parts in PyTorch."""
    return TRITON if speculative else "torch_native"


def environment(backend: str) -> dict[str, str]:
    """Variables that switch the CPU mode on; with the Triton attention backend its kernels run interpreted.

    PASSIVE: waiting OpenMP threads must not take the other core.
    """
    env = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
        # After a crash the server would wait 60 s for core dumps of GPUs that are not there.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    }
    return env | {"TRITON_INTERPRET": "1"} if backend == TRITON else env


def folder(under: Path) -> Path:
    """The folder that holds the CPU mode's `sitecustomize.py`, unpacked below `under`."""
    return unpacked(package_folder("engine/cpu_mode"), under)
