"""A server seen from outside while it is loaded: the memory that it holds, and what others do to the machine meanwhile."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from noria.bench.server import RunningServer

_SAMPLE_S = 0.25


@dataclass
class Observations:
    """What was seen; complete when the watch is over."""

    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds since its start, bytes of all processes
    others_share: float = (
        0.0  # of the machine's CPU time, taken by processes that are neither the server nor this bench
    )


@contextlib.contextmanager
def watched(server: RunningServer) -> Iterator[Observations]:
    """Look at `server` four times a second; on a machine that others use, `others_share` says how much to believe."""
    found, ended = Observations(), threading.Event()
    started, machine_s, ours_s = time.monotonic(), _machine_s(), _ours_s(server)

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            found.memory.append((time.monotonic() - started, server.resident_bytes()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        others_s = (_machine_s() - machine_s) - (_ours_s(server) - ours_s)
        found.others_share = max(0.0, others_s / ((time.monotonic() - started) * (os.cpu_count() or 1)))


def _machine_s() -> float:
    """CPU seconds that the machine has spent on anybody, or another machine has taken from it."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _ours_s(server: RunningServer) -> float:
    """CPU seconds of the server's processes, this one, and its children that have ended."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for process in (server.process, *server.process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
