"""Chooses the device and the dtype, and describes the device."""

import os
import subprocess
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The first generation whose tensor cores support bfloat16.
_AMPERE = (8, 0)


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is the first GPU, or the CPU. Raises ValueError if it does not exist."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    number = int(name.partition(":")[2] or 0)
    if name != "cpu" and number >= count:
        raise ValueError(
            f"--device is {name}; torch sees {count} CUDA devices. Use cpu or auto, or install a torch with CUDA."
        )
    return torch.device("cpu" if name == "cpu" else f"cuda:{number}")


def choose_dtype(name: str, device: torch.device) -> str:
    """The dtype called `name`; `auto` is bfloat16 on GPUs, float16 on those before Ampere, float32 on a CPU."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= _AMPERE else "float16"


def describe_device(device: torch.device, cpu: str) -> dict[str, Any]:
    """The device's name (`cpu` is the processor's), memory, driver and versions, JSON-ready."""
    found = {"type": device.type, "torch": str(torch.__version__), "driver": None}
    if device.type == "cpu":
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return found | {"name": f"{cpu}, {torch.get_num_threads()} threads", "memory_bytes": memory_bytes}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "driver": _driver(),
    }


def _driver() -> str | None:
    """The NVIDIA driver's version; None without nvidia-smi."""
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.splitlines()[0].strip() if result.stdout.strip() else None
