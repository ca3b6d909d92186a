"""Calls on a GPU, captured as CUDA graphs: their kernels are launched together, at the cost of one launch."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")

_capturing = threading.RLock()


class CudaGraph(Generic[Result]):
    """A captured call without arguments; it reads its inputs where they were when it was captured."""

    def __init__(self, call: Callable[[], Result], device: torch.device, pool: Any, num_warm_ups: int) -> None:
        """Capture the call after `num_warm_ups` of it; `pool` is the memory of graphs of which one runs at a time.

        In the first calls of a shape, libraries allocate memory and choose kernels, which cannot be captured.

        Raises RuntimeError: the memory does not suffice, or the call does what cannot be captured, such as waiting.
        """
        self._device = device
        # Torch leaves the thread on the stream of a capture that is broken off; the last context restores its own.
        with _capturing, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(num_warm_ups):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # Another thread may allocate memory meanwhile, for a model that is being mounted.
            try:
                with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                    self._result = call()
            except RuntimeError:
                _end_allocation(pool)
                raise

    def replay(self) -> Result:
        """Compute again; the result is valid until a graph of this pool is captured or replayed."""
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._result


def _end_allocation(pool: Any) -> None:
    """Do what torch leaves out if a capture is broken off: while it allocates for one, it frees no cached memory."""
    device = torch.cuda.current_device()
    # If only the memory was short, torch has ended it and says so; before 2.7 it has another function.
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


@contextlib.contextmanager
def no_capture() -> Iterator[None]:
    """Wait until no thread captures a graph, and let none begin: waiting for the whole device would break it off."""
    with _capturing:
        yield


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work. Raises RuntimeError if this process has lost it."""
    with _capturing:
        torch.cuda.synchronize(device)


def free_memory(device: torch.device | str) -> None:
    """Return the memory that torch keeps for later to a GPU."""
    with _capturing, torch.cuda.device(device):
        torch.cuda.empty_cache()
