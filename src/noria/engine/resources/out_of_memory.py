"""Recognizes the errors that torch, ONNX Runtime, OpenVINO and their libraries raise when memory runs out.

Without torch, which a server of text encoders may lack: torch's own error is recognized by the name of its class.
"""

_CLASS_NAME = "OutOfMemoryError"  # the name of torch's class
_MESSAGES = (  # in lower case, in errors of other classes
    "out of memory",  # CUDA's runtime (launches, streams, pinned memory) and driver (compiled kernels)
    "can't allocate memory",  # torch's allocator of the host
    "failed to allocate",  # ONNX Runtime, OpenVINO
    "bad_alloc",  # C++
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no memory left for a tensor or for a library's workspace."""
    if isinstance(error, MemoryError) or any(each.__name__ == _CLASS_NAME for each in type(error).__mro__):
        return True
    text = str(error).lower()
    return any(message in text for message in _MESSAGES)


def first_line(error: BaseException) -> str:
    """Return what a library's error says, without what follows its first line; without words, the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0]
