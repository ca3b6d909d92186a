"""The CPU priorities of an engine's threads (Linux: each thread has its own, and what it starts inherits it)."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_NICENESS = 19

T = TypeVar("T")


def add_niceness(increment: int) -> None:
    """Add to the niceness of each of this process's threads, up to 19; threads that they start inherit it."""
    for thread_id in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + increment)


def run_apart(action: Callable[[], T], niceness: int = 0) -> T:
    """Call `action` in a thread that ends, with at least this niceness; return or raise what it does.

    What it starts inherits the niceness, and cannot get a lower one again: threads that are to serve must be started
    elsewhere.
    """

    def call() -> T:
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, max(niceness, os.getpriority(os.PRIO_PROCESS, thread_id)))
        return action()

    with ThreadPoolExecutor(1, thread_name_prefix="loader") as executor:
        return executor.submit(call).result()


def on_one_core(action: Callable[[], T]) -> Callable[[], T]:
    """Return `action` with one thread for torch's operations, for a thread that is not the loop's.

    Libgomp would give that thread a pool of its own, and a second pool slows the first (ADR 5).
    """

    def call() -> T:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return action()
        finally:
            torch.set_num_threads(before)  # which is also the number of threads that start later

    return call
