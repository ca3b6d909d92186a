"""Meters of the hardware: NVML for NVIDIA's GPUs, RAPL for the CPU packages. Without them, nothing is reported."""

import itertools
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.observe.metrics.gpus import open_nvml

RAPL = pathlib.Path("/sys/class/powercap")
# Matrices that exceed the caches; a product takes some tens of milliseconds.
_MATRIX_SIDE = 1200
_PROBE_S = 0.5


def matrix_gflops(seconds: float = _PROBE_S) -> float:
    """The rate of numpy's float32 matrix product on all CPUs, over `seconds`, while nothing else runs.

    Where virtual machines share a processor it changes within minutes; runs with different rates are not directly
    comparable.
    """
    matrix = np.ones((_MATRIX_SIDE, _MATRIX_SIDE), dtype=np.float32)
    matrix @ matrix
    num_products, elapsed_s, started = 0, 0.0, time.perf_counter()
    # At least one, even if the process is not scheduled for `seconds`.
    while num_products == 0 or elapsed_s < seconds:
        matrix @ matrix
        num_products, elapsed_s = num_products + 1, time.perf_counter() - started
    return num_products * 2 * _MATRIX_SIDE**3 / elapsed_s / 1e9


@dataclass(frozen=True)
class GpuReading:
    """A reading of all metered GPUs."""

    utilisation: float  # mean utilisation since NVML's last sample, 0 to 1
    used_bytes: int  # together, beyond those in use when the meter was created
    energy_j: float | None  # together, since the driver was loaded; None on GPUs before Volta


class GpuMeter:
    """Meters GPUs through NVML."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        """Create it before the server starts: memory in use by then is not counted as the server's."""
        self._nvml, self._handles = nvml, handles
        self._initial_bytes = self._total_used_bytes()

    @property
    def names(self) -> list[str]:
        """The GPUs' product names."""
        names = [self._nvml.nvmlDeviceGetName(handle) for handle in self._handles]
        return [name.decode() if isinstance(name, bytes) else name for name in names]

    def read(self) -> GpuReading:
        """Read utilisation, memory and energy."""
        nvml, handles = self._nvml, self._handles
        shares = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        try:
            energy_j = sum(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000
        except nvml.NVMLError:
            energy_j = None
        return GpuReading(sum(shares) / len(shares), max(0, self._total_used_bytes() - self._initial_bytes), energy_j)

    def _total_used_bytes(self) -> int:
        return sum(self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)


def find_gpus(devices: Sequence[str], environment: Mapping[str, str], nvml: Any = None) -> GpuMeter | None:
    """A meter of the GPUs among `devices`; None without GPUs or NVML. `nvml` is the module pynvml, or a fake."""
    if all(device == "cpu" for device in devices):
        return None
    nvml, visible = nvml or open_nvml(), _visible_devices(environment)
    indices = [_device_index(device) for device in devices if device != "cpu"]
    if nvml is None or (visible is not None and max(indices) >= len(visible)):
        return None
    try:
        gpus = GpuMeter(nvml, [_gpu_handle(nvml, visible, index) for index in indices])
        gpus.read()
    # CUDA sees a GPU that NVML does not, or one without utilisation: a slice of another (MIG).
    except nvml.NVMLError:
        return None
    return gpus


def _visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """The indices or UUIDs that CUDA may use, up to the first that is empty or -1; None: all."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, value.split(","))))


def _device_index(device: str) -> int:
    """0 for `auto`, `cuda` and `cuda:0`; N for `cuda:N`."""
    number = device.partition(":")[2]
    return int(number) if number else 0


def _gpu_handle(nvml: Any, visible: Sequence[str] | None, index: int) -> Any:
    """The handle of CUDA's device `index` among those `visible` to it."""
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    name = visible[index]
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


class RaplMeter:
    """The energy of the CPU packages since this meter was created. Call `total_j` more often than the counters wrap."""

    def __init__(self, folder: pathlib.Path = RAPL) -> None:
        """Reports nothing if the kernel shows no package, or hides the counters (from all but root, since 2020)."""
        self._packages = [
            package for package in sorted(folder.glob("intel-rapl:[0-9]")) if _read_energy_uj(package) is not None
        ]
        self._last = {package: _read_energy_uj(package) or 0 for package in self._packages}
        self._total_uj = 0

    def total_j(self) -> float | None:
        """Joules; None without readable packages."""
        if not self._packages:
            return None
        for package in self._packages:
            now = _read_energy_uj(package)
            if now is not None:
                self._total_uj += counter_increase(
                    self._last[package], now, int(_read_text(package / "max_energy_range_uj") or 0)
                )
                self._last[package] = now
        return self._total_uj / 1e6


def counter_increase(before: int, now: int, largest: int) -> int:
    """The increase of a counter that wraps to 0 after `largest`."""
    return now - before if now >= before else now - before + largest


def _read_energy_uj(package: pathlib.Path) -> int | None:
    text = _read_text(package / "energy_uj")
    return int(text) if text else None


def _read_text(file: pathlib.Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return None
