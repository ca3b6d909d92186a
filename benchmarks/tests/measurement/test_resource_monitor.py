"""The resource monitor, on real processes."""

import subprocess
import sys
import time

import psutil

from noria.testing.server import RunningServer
from noria_bench.measurement.hardware_meters import GpuReading
from noria_bench.measurement.resource_monitor import cpu_cores_used, energy_between_j, machine_cpu_s, monitor_resources
from waiting import wait_until

GROWING = """import time
held = []
for _ in range(40):
    held.append(bytearray(b'x' * 5_000_000))
    time.sleep(0.02)
input()"""
SPINNING = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


def test_growing_memory_is_sampled():
    with subprocess.Popen([sys.executable, "-c", GROWING], stdin=subprocess.PIPE) as child:
        with monitor_resources(RunningServer(0, 0.0, psutil.Process(child.pid))) as trace:
            wait_until(lambda: trace.memory and trace.memory[-1][1] > 150_000_000)
        child.stdin.close()
    assert [at for at, _ in trace.memory] == sorted(at for at, _ in trace.memory)


def test_other_processes_work_is_distinguished_from_the_server_s():
    idling = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with idling, subprocess.Popen([sys.executable, "-c", SPINNING]) as busy:
        spinner = psutil.Process(busy.pid)
        try:
            machine_s, began = machine_cpu_s(), time.monotonic()
            with (
                monitor_resources(RunningServer(0, 0.0, psutil.Process(idling.pid))) as other,
                monitor_resources(RunningServer(0, 0.0, spinner)) as own,
            ):
                before, started = spinner.cpu_times().user, time.monotonic()
                wait_until(lambda: spinner.cpu_times().user - before > 1.5)
                spun_s, shortest_s = spinner.cpu_times().user - before, time.monotonic() - started
            machine_s, longest_s = machine_cpu_s() - machine_s, time.monotonic() - began
        finally:
            busy.kill()
            idling.kill()
    # Each monitor ran longer than what is within it, and shorter than what is around it, on a busy machine too.
    assert other.other_cpu_share * longest_s * psutil.cpu_count() > 0.7 * spun_s
    assert own.other_cpu_share * shortest_s * psutil.cpu_count() < machine_s - 0.7 * spun_s


def test_new_processes_count_from_their_start():
    assert cpu_cores_used({1: 10.0, 2: 5.0, 3: 7.0}, {1: 11.0, 2: 5.5, 4: 0.5}, 2.0) == 1.0


def test_a_spinning_server_uses_its_cpu_time():
    with subprocess.Popen([sys.executable, "-c", SPINNING]) as busy:
        spinner = psutil.Process(busy.pid)
        try:
            before = sum(spinner.cpu_times()[:2])
            with monitor_resources(RunningServer(0, 0.0, spinner), interval_s=0.5) as trace:
                wait_until(lambda: len(trace.cpu_cores) >= 4 and any(trace.cpu_cores))
            spent_s = sum(spinner.cpu_times()[:2]) - before
        finally:
            busy.kill()
    usage = trace.usage
    assert len(usage.at_s) == len(usage.cpu_cores) == len(usage.resident_bytes)
    assert 0.0 < sum(cores_now * 0.5 for cores_now in usage.cpu_cores) < 2 * spent_s + 0.5
    assert (usage.gpu_utilisation, usage.gpu_bytes) == ((), ())


def test_energy_is_the_difference_or_none():
    first, last = GpuReading(0.5, 1, 100.0), GpuReading(0.5, 1, 350.0)
    assert energy_between_j(first, last) == 250.0
    assert energy_between_j(first, GpuReading(0.5, 1, None)) is None
