"""Recognizes the errors that torch and its libraries raise when memory runs out."""

import torch

_MESSAGES = (  # of a plain RuntimeError, where no torch.OutOfMemoryError is raised
    "can't allocate memory",  # the host's allocator
    "CUDA error: out of memory",  # the runtime: launches, streams, pinned memory
    "CUDA driver error: out of memory",  # torch's compiled kernels
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no memory left for a tensor or for a library's workspace."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _MESSAGES)
