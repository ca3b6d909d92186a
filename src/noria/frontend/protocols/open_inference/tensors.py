"""Tensors of the Open Inference Protocol: their values, as JSON, as bytes and as a message of gRPC has them. Pure.

Of the protocol's datatypes only those of text encoders: BYTES (texts in UTF-8), INT32, INT64, FP32. In binary form
numbers are little-endian, and each element of BYTES follows its length, four little-endian bytes.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noria.errors import InvalidField, short_repr

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_INTEGER_TYPES = {"INT32": "<i4", "INT64": "<i8"}


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor of a request, as it was received; nothing of it is checked."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Sequence[Any]  # binary form; or values, flat or nested as the shape says


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of a response."""

    name: str
    values: "NDArray[np.float32] | NDArray[np.int32]"

    @property
    def datatype(self) -> str:
        """The protocol's name of the type."""
        return "FP32" if self.values.dtype == "float32" else "INT32"

    @property
    def binary(self) -> bytes:
        """The values in binary form."""
        return self.values.tobytes()


def invalid_inputs(message: str) -> InvalidField:
    """Return the error of the tensors of a request."""
    return InvalidField(message, field="inputs")


def texts_of(tensor: InputTensor) -> list[str]:
    """Return the elements of a tensor of BYTES, in the order of rows.

    Raises InvalidField: it has another datatype, not as many elements as its shape says, or one that is not UTF-8.
    """
    if tensor.datatype != "BYTES":
        raise _wrong_datatype(tensor, ["BYTES"])
    count = math.prod(tensor.shape)
    if isinstance(tensor.data, bytes | memoryview):
        elements: Sequence[Any] = _split(tensor.name, bytes(tensor.data), count)
    else:
        elements = _flatten(tensor, tensor.data)
    return [_as_text(tensor.name, index, element) for index, element in enumerate(elements)]


def integers_of(tensor: InputTensor) -> "NDArray[np.int64]":
    """Return the values of a tensor of integers, in its shape.

    Raises InvalidField: it has another datatype, or not as many integers of that type as its shape says.
    """
    import numpy as np

    if tensor.datatype not in _INTEGER_TYPES:
        raise _wrong_datatype(tensor, list(_INTEGER_TYPES))
    dtype, count = np.dtype(_INTEGER_TYPES[tensor.datatype]), math.prod(tensor.shape)
    if isinstance(tensor.data, bytes | memoryview):
        if len(tensor.data) != count * dtype.itemsize:
            raise invalid_inputs(
                f"input {short_repr(tensor.name)} has {len(tensor.data)} bytes; its shape {_format(tensor.shape)} of "
                f"{tensor.datatype} needs {short_repr(count * dtype.itemsize)}."
            )
        return np.frombuffer(tensor.data, dtype).astype(np.int64).reshape(tensor.shape)
    values, bounds = _flatten(tensor, tensor.data), np.iinfo(dtype)
    for value in values:
        if type(value) is not int or not bounds.min <= value <= bounds.max:
            raise invalid_inputs(
                f"input {short_repr(tensor.name)} has the value {short_repr(value)}; allowed are integers of "
                f"{tensor.datatype}."
            )
    return np.array(values, np.int64).reshape(tensor.shape)


def _wrong_datatype(tensor: InputTensor, allowed: Sequence[str]) -> InvalidField:
    return invalid_inputs(
        f"input {short_repr(tensor.name)} has the datatype {short_repr(tensor.datatype)}; allowed is "
        f"{' or '.join(allowed)}."
    )


def _wrong_count(tensor: InputTensor, got: str) -> InvalidField:
    return invalid_inputs(
        f"input {short_repr(tensor.name)} has {got}; its shape {_format(tensor.shape)} needs "
        f"{short_repr(math.prod(tensor.shape))} values, flat or in nested lists of that shape."
    )


def _flatten(tensor: InputTensor, data: Sequence[Any]) -> Sequence[Any]:
    """Return the values of `data`, which are flat, or nested as the shape says. Raises InvalidField."""
    if not any(isinstance(each, list) for each in data):
        if len(data) != math.prod(tensor.shape):
            raise _wrong_count(tensor, f"{len(data)} values")
        return data
    if len(data) != tensor.shape[0]:
        raise _wrong_count(tensor, f"{len(data)} lists")
    level = data
    for size in tensor.shape[1:]:
        if not all(isinstance(each, list) and len(each) == size for each in level):
            raise _wrong_count(tensor, "lists of other lengths")
        level = [value for each in level for value in each]
    return level


def _split(name: str, data: bytes, count: int) -> list[bytes]:
    """Return the elements of BYTES in binary form. Raises InvalidField if they are not `count`."""
    elements: list[bytes] = []
    at = 0
    while at < len(data) and len(elements) <= count:
        end_of_length = at + 4
        end = end_of_length + struct.unpack_from("<I", data, at)[0] if end_of_length <= len(data) else len(data) + 1
        if end > len(data):
            raise invalid_inputs(
                f"input {short_repr(name)}: its {len(data)} bytes end within element {len(elements)}. Each element "
                "is its length in four little-endian bytes, then so many bytes."
            )
        elements.append(data[end_of_length:end])
        at = end
    if len(elements) != count:
        got = f"more than {count}" if len(elements) > count else len(elements)
        raise invalid_inputs(f"input {short_repr(name)} has {got} elements in its bytes; its shape needs {count}.")
    return elements


def _as_text(name: str, index: int, element: Any) -> str:
    if isinstance(element, str):
        return element
    if isinstance(element, bytes):
        try:
            return element.decode()
        except UnicodeDecodeError as error:
            raise invalid_inputs(
                f"input {short_repr(name)}: element {index} is not UTF-8: {error.reason} at byte {error.start}."
            ) from error
    raise invalid_inputs(f"input {short_repr(name)}: element {index} is {short_repr(element)}; allowed are strings.")


def _format(shape: Sequence[int]) -> str:
    return short_repr(list(shape))
