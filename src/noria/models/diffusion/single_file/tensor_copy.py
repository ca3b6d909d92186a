"""Writes the weights of one part, whose tensors are in a checkpoint under other names.

Most are copied byte by byte, whatever their precision; float8 becomes float16, which has all of its numbers, times its
scale. The file is read tensor by tensor.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from noria.errors import ModelError, short_repr
from noria.models.diffusion.single_file.checkpoint_header import ITEM_BYTES, CheckpointHeader, StoredTensor
from noria.models.diffusion.single_file.part_names import Origin, Origins, Pieces
from noria.models.diffusion.single_file.stored_numbers import (
    FLOAT8,
    FLOATS,
    SCALES,
    as_float32,
    raw_numbers,
    read_floats,
)

_CHUNK_BYTES = 2**24
_MAX_HALF = 65504.0  # the largest number in float16

OnWritten = Callable[[int], None]
"""Gets the number of bytes that were written."""


class _Copy(NamedTuple):
    """A tensor that is written."""

    origin: Origin
    stored: StoredTensor
    scale: StoredTensor | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class WeightsPlan:
    """The weights of a part: which bytes of which checkpoint its file will have."""

    def __init__(self, header: CheckpointHeader, prefix: str, origins: Origins) -> None:
        """Plan the part whose tensors have `prefix`.

        Raises ModelError: one is not in the checkpoint, or of a shape, type or scale that it cannot have.
        """
        self._file = header.file
        missing = sorted(origin.name for origin in origins.values() if prefix + origin.name not in header.tensors)
        if missing:
            raise ModelError(
                f"{header.file}: {len(missing)} tensors are missing, the first is {prefix}{missing[0]}. Take a "
                "complete checkpoint."
            )
        self._copies = {name: _plan(header, prefix + origin.name, origin) for name, origin in sorted(origins.items())}

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(copy.num_bytes for copy in self._copies.values())

    def write(self, target: pathlib.Path, on_written: OnWritten) -> None:
        """Write the part's file.

        Raises:
            ModelError: the checkpoint has become shorter, or a number with its scale is too large for float16.
            OSError: a file cannot be read or written.
        """
        with self._file.open("rb") as opened, target.open("wb") as writing:
            writing.write(_header(self._copies))
            for name, copy in self._copies.items():
                for data in _data(self._file, opened, name, copy):
                    writing.write(data)
                    on_written(len(data))


def _plan(header: CheckpointHeader, name: str, origin: Origin) -> _Copy:
    stored = header.tensors[name]
    shape, where = stored.shape, f"{header.file}: {short_repr(name)} of shape {list(stored.shape)}"
    if stored.dtype not in FLOATS:
        raise ModelError(f"{where} is in {stored.dtype}; read are {', '.join(FLOATS)}. Take the checkpoint in 16 bits.")
    if origin.pieces is not None:
        count, taken = origin.pieces
        if not shape or shape[0] % count:
            raise ModelError(f"{where} is not several matrices in one, whose rows are {count} equal pieces.")
        shape = (shape[0] // count * len(taken), *shape[1:])
    if origin.is_matrix and shape[2:] == (1, 1):
        shape = shape[:2]
    if origin.is_transposed:
        if len(shape) != 2:
            raise ModelError(f"{where} is no matrix.")
        shape = shape[::-1]
    stem = name.removesuffix(".weight")
    scale = next((header.tensors[stem + end] for end in SCALES if stem + end in header.tensors), None)
    if scale is not None:
        num_scales = math.prod(scale.shape)
        by_row = len(stored.shape) > 1 and num_scales == stored.shape[0]
        if scale.dtype not in FLOATS or stored.dtype not in FLOAT8 or not (num_scales == 1 or by_row):
            raise ModelError(
                f"{where} in {stored.dtype} has scales of shape {list(scale.shape)} in {scale.dtype}; read are float8 "
                "with one scale, or one for each row. Take the checkpoint in 16 bits."
            )
    return _Copy(origin, stored, scale, "F16" if stored.dtype in FLOAT8 else stored.dtype, shape)


def _header(copies: Mapping[str, _Copy]) -> bytes:
    tree: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, copy in copies.items():
        start, end = end, end + copy.num_bytes
        tree[name] = {"dtype": copy.dtype, "shape": copy.shape, "data_offsets": (start, end)}
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _data(file: pathlib.Path, opened: BinaryIO, name: str, copy: _Copy) -> Iterator[bytes]:
    stored = copy.stored
    if stored.dtype not in FLOAT8 and not copy.origin.is_transposed:
        for start, num_bytes in _stretches(stored, copy.origin.pieces):
            yield from _chunks(file, opened, start, num_bytes)
        return
    data = b"".join(_chunks(file, opened, stored.start, stored.num_bytes))
    if stored.dtype in FLOAT8:
        data = _dequantized(file, name, data, copy).tobytes()
    whole = stored._replace(start=0, num_bytes=len(data))
    data = b"".join(data[start : start + num_bytes] for start, num_bytes in _stretches(whole, copy.origin.pieces))
    if copy.origin.is_transposed:
        data = raw_numbers(data, copy.dtype).reshape(copy.shape[::-1]).T.tobytes()
    yield data


def _stretches(stored: StoredTensor, pieces: Pieces | None) -> list[tuple[int, int]]:
    """Return the first byte and the number of bytes of each piece of a tensor, or of all of it."""
    count, taken = pieces or (1, (0,))
    num_bytes = stored.num_bytes // count
    return [(stored.start + number * num_bytes, num_bytes) for number in taken]


def _chunks(file: pathlib.Path, opened: BinaryIO, start: int, num_bytes: int) -> Iterator[bytes]:
    opened.seek(start)
    while num_bytes:
        chunk = opened.read(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise ModelError(f"{file}: became shorter while it was read.")
        num_bytes -= len(chunk)
        yield chunk


def _dequantized(file: pathlib.Path, name: str, data: bytes, copy: _Copy) -> npt.NDArray[np.float16]:
    numbers = as_float32(data, copy.stored.dtype)
    if copy.scale is not None:
        scales = read_floats(file, copy.scale)
        numbers = (numbers.reshape(len(scales), -1) * scales[:, None]).ravel()
    if np.abs(numbers).max(initial=0.0) > _MAX_HALF:
        raise ModelError(
            f"{file}: {name} has numbers above {_MAX_HALF:g} with its scale. Take the checkpoint in 16 bits."
        )
    return numbers.astype("<f2")
