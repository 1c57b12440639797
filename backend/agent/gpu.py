"""GPU facts through NVML, or the reason why there are none. Standard library plus the single-file binding `pynvml`.

A sample is a value that freezes one instant, never a live handle. "No driver" is an answer, not an error; an NVML call
that a card does not support leaves its field None, never zero (a bar at 0 % would be a lie).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one instant. Memory in bytes (NVML's v2 figures: `used` leaves out what the driver reserves)."""

    index: int
    name: str
    uuid: str
    memory_total: int
    memory_used: int
    utilisation: int | None
    """Per cent of the last sampling period during which a kernel ran."""
    power_w: float | None
    temperature_c: int | None
    owners: tuple[int, ...]
    """Pids of compute processes as NVML sees them: host pids, which a container may not be able to resolve."""


@dataclass(frozen=True)
class GpuReport:
    """All GPUs of the host, or why none can be seen."""

    gpus: tuple[GpuSample, ...]
    driver: str
    reason: str = ""


def sample() -> GpuReport:
    """Look once. Takes milliseconds; raises nothing: what NVML says no to stands in `reason`."""
    try:
        import pynvml
    except ImportError:
        return GpuReport((), "", "the NVML binding (module pynvml, package nvidia-ml-py) is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReport((), "", f"NVML does not start: {error}")
    try:
        count = pynvml.nvmlDeviceGetCount()
        gpus = tuple(_sample_one(pynvml, index) for index in range(count))
        return GpuReport(gpus, _text(pynvml.nvmlSystemGetDriverVersion()), "" if gpus else "NVML finds no GPU")
    except pynvml.NVMLError as error:
        return GpuReport((), "", f"NVML answered: {error}")
    finally:
        pynvml.nvmlShutdown()


def _sample_one(nvml: Any, index: int) -> GpuSample:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)

    def optional(call: str, *args: Any) -> Any:
        try:
            return getattr(nvml, call)(handle, *args)
        except nvml.NVMLError:
            return None

    power = optional("nvmlDeviceGetPowerUsage")
    busy = optional("nvmlDeviceGetUtilizationRates")
    return GpuSample(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_total=int(memory.total),
        memory_used=int(memory.used),
        utilisation=None if busy is None else int(busy.gpu),
        power_w=None if power is None else power / 1000.0,
        temperature_c=optional("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        owners=tuple(process.pid for process in optional("nvmlDeviceGetComputeRunningProcesses") or ()),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
