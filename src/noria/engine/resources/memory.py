"""The memory of a device: what is free, what this process uses, and whether a model fits."""

from collections.abc import Callable

import psutil

from noria.errors import ModelError
from noria.observe import cgroup

_WEIGHTS_FACTOR = 1.25  # copies of single tensors while they are converted, and the tensors of the slots
_FIXED_BYTES = 64 * 2**20  # libraries' workspaces


def free_memory_bytes(device: str) -> int:
    """The bytes that may be allocated on a device, "cpu" or "cuda:N"; for a CPU, as its control group allows."""
    if device == "cpu":
        available: int = psutil.virtual_memory().available
        limited = cgroup.free_memory()
        return available if limited is None else min(available, limited)
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # bytes in torch's allocator
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def used_memory_bytes(device: str) -> int:
    """Return the GPU memory that torch has reserved, in use or cached; of a CPU the resident memory of this process."""
    if device == "cpu":
        resident: int = psutil.Process().memory_info().rss
        return resident
    import torch

    return torch.cuda.memory_reserved(device)


def peak_bytes(device: str, action: Callable[[], object]) -> int:
    """Run `action`; return the most GPU memory that its tensors took at once; 0 on a CPU, where it is not known."""
    if device == "cpu":
        action()
        return 0
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def bytes_to_load(weights_bytes: int) -> int:
    """Return the bytes that weights need while they are loaded, with what they need beside them."""
    return int(_WEIGHTS_FACTOR * weights_bytes) + _FIXED_BYTES


def check_memory(name: str, weights_bytes: int, device: str, free_bytes: Callable[[str], int]) -> None:
    """Check that weights, and what they need beside them, fit the memory of a device.

    Raises ModelError: they do not.
    """
    needed, free = bytes_to_load(weights_bytes), free_bytes(device)
    if needed > free:
        raise ModelError(
            f"{name} needs {needed:,} bytes of the memory of {device}, of which {free:,} are free. Deploy it "
            "with --swap, which unloads what serves first, or use a device with more memory."
        )
