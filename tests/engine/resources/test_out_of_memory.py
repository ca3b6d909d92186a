import pytest
import torch

from noria.engine.resources.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        type("DeviceError", (torch.OutOfMemoryError,), {})("a subclass"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Failed to allocate memory for requested buffer of size 4"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=repr,
)
def test_errors_of_memory_are_recognized_by_class_and_by_message(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), ValueError("no")], ids=repr)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)
