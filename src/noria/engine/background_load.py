"""What loading a model may use while others serve: memory that is free, and on a CPU the time that they leave."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil

from noria.errors import ModelError
from noria.observe import cgroup

_WEIGHTS_FACTOR = 1.25  # copies of single tensors while they are converted, and the tensors of the slots
_FIXED_BYTES = 64 * 2**20  # libraries' workspaces
# On two cores, requests took 1.1 times as long while a model loaded at this priority, and 2.2 times at an equal one;
# the load took 10 to 50 s instead of 2 to 6.
_LOWEST_PRIORITY = 19

T = TypeVar("T")


def free_memory_bytes(device: str) -> int:
    """The bytes that may be allocated on a device, "cpu" or "cuda:N"; for a CPU, as its control group allows."""
    if device == "cpu":
        available: int = psutil.virtual_memory().available
        limited = cgroup.free_memory()
        return available if limited is None else min(available, limited)
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # of torch's allocator
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def check_memory(name: str, weights_bytes: int, device: str, free_bytes: Callable[[str], int]) -> None:
    """Check that weights, and what they need beside them, fit the memory of a device.

    Raises:
        ModelError: they do not.

    """
    needed, free = int(_WEIGHTS_FACTOR * weights_bytes) + _FIXED_BYTES, free_bytes(device)
    if needed > free:
        raise ModelError(
            f"{name} needs {needed:,} bytes of the memory of {device}, of which {free:,} are free; unmount another "
            "model first, or use a device with more memory."
        )


def run_apart(action: Callable[[], T], *, at_low_priority: bool = True) -> T:
    """Call `action` in a thread that ends; return or raise what it does.

    At the lowest CPU priority, what it starts inherits it, and cannot get a higher one again: threads that are to serve
    must be started elsewhere.
    """

    def call() -> T:
        if at_low_priority:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        return action()

    with ThreadPoolExecutor(1, thread_name_prefix="loader") as executor:
        return executor.submit(call).result()
