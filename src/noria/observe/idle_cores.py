"""A process that works beside others and leaves the cores to them.

A low priority is not enough where others compute on several cores at once, as a step of an image does. One of its
threads often waits for the others, for less than a millisecond; whatever is runnable then gets its core, which
presumably keeps the kernel from moving another of its threads there. On 2 cores, a process under SCHED_IDLE that took
0.4 of a core made images take 1.9 times as long; at niceness 19 it was 2.5 times. So
such a process also pauses while others want its core, and is runnable for a small part of the time only. On a machine
that is always busy it would never end: its pauses are bounded, and it is at niceness 19, since under SCHED_IDLE it
would get next to nothing after them.
"""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator

_SLICE_S = 0.01  # seconds of CPU time between two looks; beside others it takes two to three times as long
_PAUSE_S = 0.25
_BUSY_SHARE = 0.1  # share of a thread's time spent waiting for a core; above it, others want the core, too


@contextlib.contextmanager
def yielding_cores(max_pauses_s: float = 60.0) -> Iterator[None]:
    """A context in which the main thread, which calls this, pauses while others want its core (Linux).

    Its pauses are `max_pauses_s` in all, and begin between two operations of Python's. The process's niceness is 19
    from then on, for good.
    """
    os.nice(19)
    ran_ns, waited_ns = _scheduler_times()
    num_pauses = 0

    def pause_if_busy(*_: object) -> None:
        nonlocal ran_ns, waited_ns, num_pauses
        before_ns = ran_ns, waited_ns
        ran_ns, waited_ns = _scheduler_times()
        if num_pauses * _PAUSE_S < max_pauses_s and is_wanted(ran_ns - before_ns[0], waited_ns - before_ns[1]):
            num_pauses += 1
            time.sleep(_PAUSE_S)

    signal.signal(signal.SIGPROF, pause_if_busy)
    signal.siginterrupt(signal.SIGPROF, False)  # libraries need not know of it
    signal.setitimer(signal.ITIMER_PROF, _SLICE_S, _SLICE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # one may be on its way, and would end the process


def is_wanted(ran_ns: int, waited_ns: int) -> bool:
    """Return whether others want the core on which a thread ran and for which it waited."""
    return waited_ns > _BUSY_SHARE * (ran_ns + waited_ns)


def _scheduler_times() -> tuple[int, int]:
    """Return for how long the main thread ran, and waited for a core; zeros where the kernel does not count that."""
    try:
        ran_ns, waited_ns, *_ = pathlib.Path("/proc/self/schedstat").read_text().split()
    except OSError:
        return 0, 0
    return int(ran_ns), int(waited_ns)
