"""What a device tells of itself: NVML of NVIDIA's GPUs, RAPL of the CPU's packages. Where there is neither, nothing is told."""

import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.observe.gpus import open_nvml

RAPL = pathlib.Path("/sys/class/powercap")
_SIDE = 1200  # of the matrices: too large for the caches, a few tens of milliseconds each
_PROBE_S = 0.5


def matrix_gflops(seconds: float = _PROBE_S) -> float:
    """What numpy's float32 matrix product gets out of all the CPUs now, while nothing else runs.

    Where virtual machines share a processor it changes by the minute; runs with other values cannot be compared one to one.
    """
    matrix = np.ones((_SIDE, _SIDE), dtype=np.float32)
    matrix @ matrix
    products, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        products += 1
    return products * 2 * _SIDE**3 / (time.perf_counter() - started) / 1e9


@dataclass(frozen=True)
class GpuReading:
    """Of all GPUs that are watched, now."""

    share: float  # mean utilisation since NVML's last sample, 0 to 1
    used_bytes: int  # together
    energy_j: float | None  # together, since the driver was loaded; None before Volta


class Gpus:
    """Some GPUs, through NVML."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles

    def read(self) -> GpuReading:
        """One moment of them."""
        nvml, handles = self._nvml, self._handles
        shares = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        used = [nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
        try:
            energy_j = sum(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000
        except nvml.NVMLError:
            energy_j = None
        return GpuReading(sum(shares) / len(shares), sum(used), energy_j)


def find_gpus(devices: Sequence[str], environment: Mapping[str, str], nvml: Any = None) -> Gpus | None:
    """Those among the `devices` of the settings; None where there are none, or no NVML. `nvml` is the module pynvml, or a stand-in."""
    if all(device == "cpu" for device in devices):
        return None
    nvml = nvml or open_nvml()
    if nvml is None:
        return None
    try:
        names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        return Gpus(nvml, [_handle(nvml, names, _place(device)) for device in devices if device != "cpu"])
    except nvml.NVMLError:  # a GPU that CUDA has and NVML has not
        return None


def _place(device: str) -> int:
    """0 of `auto`, `cuda` and `cuda:0`; N of `cuda:N`."""
    number = device.partition(":")[2]
    return int(number) if number else 0


def _handle(nvml: Any, visible: Sequence[str], place: int) -> Any:
    """The GPU that CUDA calls `place`, among those `visible` to it by index or UUID; all, where nothing is said."""
    if place >= len(visible):
        return nvml.nvmlDeviceGetHandleByIndex(place)
    name = visible[place]
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


class Rapl:
    """The energy that the CPU's packages have used since it was made; `total_j` must be asked more often than a counter wraps."""

    def __init__(self, folder: pathlib.Path = RAPL) -> None:
        """None is counted where the kernel shows no package, or hides it (from others than root, since 2020)."""
        self._packages = [package for package in sorted(folder.glob("intel-rapl:[0-9]")) if _count(package) is not None]
        self._last = {package: _count(package) or 0 for package in self._packages}
        self._total_uj = 0

    def total_j(self) -> float | None:
        """Joules; None where nothing is told."""
        if not self._packages:
            return None
        for package in self._packages:
            now = _count(package)
            if now is not None:
                self._total_uj += grown(self._last[package], now, int(_text(package / "max_energy_range_uj") or 0))
                self._last[package] = now
        return self._total_uj / 1e6


def grown(before: int, now: int, largest: int) -> int:
    """By how much a counter has grown that starts again from 0 after `largest`."""
    return now - before if now >= before else now - before + largest


def _count(package: pathlib.Path) -> int | None:
    text = _text(package / "energy_uj")
    return int(text) if text else None


def _text(file: pathlib.Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return None
