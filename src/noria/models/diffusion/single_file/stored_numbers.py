"""Reads the numbers of a file as numpy has them, which knows neither bfloat16 nor float8."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.errors import ModelError
from noria.models.diffusion.single_file.checkpoint_header import ITEM_BYTES, StoredTensor

FLOATS: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "F8_E5M2": "float8",
}
"""The types of floating-point numbers in a file, and what they are called."""

FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALES = (".scale_weight", ".weight_scale")
"""The ends of the names of scales: of ComfyUI's older and newer form, instead of `.weight`."""

BESIDE_LAYERS = (*SCALES, ".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""The ends of the names of all tensors that say how others are quantized."""


def _float8_values(num_exponent_bits: int) -> npt.NDArray[np.float32]:
    """Return the value of each byte: of float8_e4m3fn without infinities, of float8_e5m2 with them."""
    byte = np.arange(256)
    num_mantissa_bits = 7 - num_exponent_bits
    exponent, mantissa = (byte & 127) >> num_mantissa_bits, byte & (2**num_mantissa_bits - 1)
    bias = 2 ** (num_exponent_bits - 1) - 1
    fraction = mantissa / 2**num_mantissa_bits + (exponent > 0)
    sign, power = np.where(byte < 128, 1.0, -1.0), np.maximum(exponent, 1) - bias
    values: npt.NDArray[np.float32] = np.asarray(sign * fraction * 2.0**power, np.float32)
    if num_exponent_bits == 4:
        values[[127, 255]] = np.nan
    else:
        values[exponent == 31] = np.nan
        values[[124, 252]] = np.inf, -np.inf
    return values


_FLOAT8_VALUES = {"F8_E4M3": _float8_values(4), "F8_E5M2": _float8_values(5)}
_NUMPY: Mapping[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def raw_numbers(data: bytes, dtype: str) -> npt.NDArray[Any]:
    """Return bytes as numbers of the right size, whose values may be others: for moving them."""
    return np.frombuffer(data, f"<u{ITEM_BYTES[dtype]}")


def as_float32(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Return bytes of one of `FLOATS` as float32."""
    if dtype in _FLOAT8_VALUES:
        return _FLOAT8_VALUES[dtype][np.frombuffer(data, np.uint8)]
    if dtype == "BF16":
        upper: npt.NDArray[np.uint32] = np.frombuffer(data, "<u2").astype(np.uint32)
        return (upper << 16).view(np.float32)
    numbers: npt.NDArray[np.float32] = np.frombuffer(data, _NUMPY[dtype]).astype(np.float32)
    return numbers


def read_floats(file: pathlib.Path, tensor: StoredTensor | None) -> npt.NDArray[np.float32]:
    """Return the numbers of a tensor, in a row. Raises ModelError: the file cannot be read, or has become shorter."""
    assert tensor is not None
    try:
        with file.open("rb") as opened:
            opened.seek(tensor.start)
            data = opened.read(tensor.num_bytes)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error
    if len(data) < tensor.num_bytes:
        raise ModelError(f"{file}: became shorter while it was read.")
    return as_float32(data, tensor.dtype)
