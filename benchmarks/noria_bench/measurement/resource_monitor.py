"""Samples the resources of a server and its device under load, and the CPU time that other processes use meanwhile."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from noria.testing.server import RunningServer
from noria_bench.measurement.hardware_meters import GpuMeter, GpuReading, RaplMeter
from noria_bench.measurement.runs import ResourceUsage
from noria_bench.running import in_background

_SAMPLE_INTERVAL_S = 0.25


@dataclass
class ResourceTrace:
    """The samples of `monitor_resources`.

    The first three lists have a value for each sample; the rest is set at its end.
    """

    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds since the start, bytes of all processes
    cpu_cores: list[float] = field(default_factory=list)  # CPU seconds per second, since the previous sample
    gpu_readings: list[GpuReading] = field(default_factory=list)  # empty without GPUs
    energy_j: float | None = None  # energy of the GPUs; without GPUs, of the CPU packages
    matrix_gflops: list[float] = field(default_factory=list)  # filled by the caller, before and after
    other_cpu_share: float = 0.0  # share of the machine's CPU time, used by neither the server nor this bench

    @property
    def usage(self) -> ResourceUsage:
        """The trace as a run stores it."""
        return ResourceUsage(
            at_s=tuple(round(at_s, 3) for at_s, _ in self.memory),
            cpu_cores=tuple(round(cores, 3) for cores in self.cpu_cores),
            resident_bytes=tuple(held for _, held in self.memory),
            gpu_utilisation=tuple(reading.utilisation for reading in self.gpu_readings),
            gpu_bytes=tuple(reading.used_bytes for reading in self.gpu_readings),
            energy_j=self.energy_j,
            other_cpu_share=self.other_cpu_share,
            matrix_gflops=tuple(round(speed, 1) for speed in self.matrix_gflops),
        )


@contextlib.contextmanager
def monitor_resources(
    server: RunningServer,
    gpus: GpuMeter | None = None,
    interval_s: float = _SAMPLE_INTERVAL_S,
    into_trace: ResourceTrace | None = None,
) -> Iterator[ResourceTrace]:
    """Sample `server` and `gpus` every `interval_s`. A high `other_cpu_share` makes the measurement unreliable.

    The samples go into `into_trace`, if given, so that the caller has them even if the load raises an error.
    """
    trace, rapl = ResourceTrace() if into_trace is None else into_trace, RaplMeter()
    started, all_cpu_s, own_cpu_s = time.monotonic(), machine_cpu_s(), _own_cpu_s(server)
    first = gpus.read() if gpus is not None else None

    def sample(ended: threading.Event) -> None:
        before, before_s = server.cpu_s(), started
        while not ended.wait(interval_s):
            now, now_s = server.cpu_s(), time.monotonic()
            trace.memory.append((now_s - started, server.resident_bytes()))
            trace.cpu_cores.append(cpu_cores_used(before, now, now_s - before_s))
            before, before_s = now, now_s
            if gpus is not None:
                trace.gpu_readings.append(gpus.read())
            rapl.total_j()

    try:
        with in_background(sample):
            yield trace
    finally:
        trace.energy_j = (
            energy_between_j(first, gpus.read()) if gpus is not None and first is not None else rapl.total_j()
        )
        other_cpu_s = (machine_cpu_s() - all_cpu_s) - (_own_cpu_s(server) - own_cpu_s)
        trace.other_cpu_share = max(0.0, other_cpu_s / ((time.monotonic() - started) * (os.cpu_count() or 1)))


def cpu_cores_used(before: Mapping[int, float], now: Mapping[int, float], elapsed_s: float) -> float:
    """CPU seconds per second of the processes in `now`, by process id; a new process counts from its start."""
    return sum(max(0.0, spent - before.get(pid, 0.0)) for pid, spent in now.items()) / elapsed_s


def energy_between_j(first: GpuReading, last: GpuReading) -> float | None:
    """Joules that the GPUs used between two readings; None if they do not report energy."""
    return None if first.energy_j is None or last.energy_j is None else last.energy_j - first.energy_j


def machine_cpu_s() -> float:
    """CPU seconds of all processes, and those stolen by other virtual machines."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _own_cpu_s(server: RunningServer) -> float:
    """CPU seconds of the server's processes, of this one, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + sum(server.cpu_s().values())
