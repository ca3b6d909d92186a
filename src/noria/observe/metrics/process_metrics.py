"""Metrics of the server's processes and its machine, read at the scrape, so that dashboards need no cAdvisor.

Processes are found by their titles: the supervisor, which is this process's parent, and its children.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from noria.observe import cgroup
from noria.observe.child_processes import child_processes
from noria.observe.metrics import declarations
from noria.observe.metrics.section import Declaration


def process_metrics(own_name: str = "frontend") -> list[Metric]:
    """Return one sample per process, and the machine's cores and memory.

    `own_name` is that of this process, if it has set no title.
    """
    cpu_s, memory, start_s, cores, limit = families = [
        _family(declaration)
        for declaration in (
            declarations.PROCESS_CPU_SECONDS,
            declarations.PROCESS_MEMORY_BYTES,
            declarations.PROCESS_START_SECONDS,
            declarations.MACHINE_CORES,
            declarations.MACHINE_MEMORY_BYTES,
        )
    ]
    for name, process in _server_processes(own_name):
        with contextlib.suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            cpu_s.add_metric([name], times.user + times.system)
            memory.add_metric([name], process.memory_info().rss)
            start_s.add_metric([name], process.create_time())
    num_cores, memory_bytes = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    # The limit of a group may exceed what the machine has.
    cores.add_metric([], min(cgroup.cpu_limit() or num_cores, num_cores))
    limit.add_metric([], min(cgroup.memory_limit() or memory_bytes, memory_bytes))
    return [*families]


def _family(declaration: Declaration) -> CounterMetricFamily | GaugeMetricFamily:
    family_class = CounterMetricFamily if declaration.kind == "counter" else GaugeMetricFamily
    return family_class(declaration.name.removesuffix("_total"), declaration.help, labels=declaration.labels)


def _server_processes(own_name: str) -> Iterator[tuple[str, psutil.Process]]:
    """Yield each process with its name, such as `frontend-0`; without a supervisor, this process and its children."""
    own = psutil.Process()
    with contextlib.suppress(psutil.Error):
        parent = own.parent()
        if parent is not None and process_name(parent) == "supervisor":
            yield "supervisor", parent
            yield from _named_children(parent)
            return
    yield process_name(own) or own_name, own
    with contextlib.suppress(psutil.Error):
        yield from _named_children(own)


def _named_children(process: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    for child in child_processes(process):
        if name := process_name(child):
            yield name, child


def process_name(process: psutil.Process) -> str | None:
    """Return the last word of the title `noria …` that the process has set; None for other processes and ended ones.

    A title is one string, unlike a command line that only mentions noria.
    """
    try:
        title = pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return None
    parts = title.split(" ")
    return parts[-1] if parts[0] == "noria" and "\0" not in title else None
