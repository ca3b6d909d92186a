"""NVIDIA GPU metrics under dcgm-exporter's names, read by NVML at the scrape; none without a GPU or NVML."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from noria.observe.metrics.declarations import GPU_METRICS

_MIB = 2**20


@functools.cache
def open_nvml() -> Any | None:
    """Return the initialised NVML binding; None if it is not installed or finds no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def gpu_metrics(nvml: Any | None) -> list[Metric]:
    """Return one sample per GPU and metric, except metrics that a GPU lacks and GPUs that do not respond.

    `nvml` is the module `pynvml`, or a fake of it.
    """
    if nvml is None:
        return []
    families = {
        name: GaugeMetricFamily(name, declaration.help, labels=declaration.labels)
        for name, declaration in GPU_METRICS.items()
    }
    with contextlib.suppress(nvml.NVMLError):  # the driver is being replaced; the other metrics stay
        for index in range(nvml.nvmlDeviceGetCount()):
            _add_samples(nvml, index, families)
    return [*families.values()]


def _add_samples(nvml: Any, index: int, families: Mapping[str, GaugeMetricFamily]) -> None:
    """Add the samples of a GPU; none if it has fallen off the bus."""
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        labels = [str(index), _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))]
        for name, read in _READERS.items():
            with contextlib.suppress(nvml.NVMLError):
                families[name].add_metric(labels, read(nvml, handle))


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


_READERS: dict[str, Callable[[Any, Any], float]] = {
    "DCGM_FI_DEV_GPU_UTIL": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "DCGM_FI_DEV_MEM_COPY_UTIL": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    "DCGM_FI_DEV_FB_USED": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB,
    "DCGM_FI_DEV_FB_FREE": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free / _MIB,
    "DCGM_FI_DEV_GPU_TEMP": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "DCGM_FI_DEV_POWER_USAGE": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
    "DCGM_FI_DEV_SM_CLOCK": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
}
assert set(_READERS) == set(GPU_METRICS)
