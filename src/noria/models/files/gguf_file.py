"""Reads the header of a GGUF file: names, shapes and types of its tensors. Neither torch nor the library `gguf`.

That library trusts the counts and lengths in a file; here each is bounded and compared with the file's size, before
diffusers reads the file with it. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import pathlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from noria.errors import ModelError, short_repr

SUFFIX = ".gguf"

_MAX_HEADER_BYTES = 2**24  # FLUX.1's 780 tensors take 60 kB
_MAX_TENSORS, _MAX_FIELDS, _MAX_AXES = 65_536, 4096, 4
_MAX_ITEMS = 65_536  # items of all arrays; only language models, with their vocabularies, have more
_FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type
_UINT32, _STRING, _ARRAY = 4, 8, 9
_PREFIX = "model.diffusion_model."  # the prefix in checkpoints with all parts of a model, which diffusers removes, too


class _Type(NamedTuple):
    """How numbers are stored: so many in a block of so many bytes."""

    name: str
    block: int
    block_bytes: int


# What diffusers computes with, by the number in the file.
_TYPES: Mapping[int, _Type] = {
    0: _Type("F32", 1, 4),
    1: _Type("F16", 1, 2),
    2: _Type("Q4_0", 32, 18),
    3: _Type("Q4_1", 32, 20),
    6: _Type("Q5_0", 32, 22),
    7: _Type("Q5_1", 32, 24),
    8: _Type("Q8_0", 32, 34),
    10: _Type("Q2_K", 256, 84),
    11: _Type("Q3_K", 256, 110),
    12: _Type("Q4_K", 256, 144),
    13: _Type("Q5_K", 256, 176),
    14: _Type("Q6_K", 256, 210),
    20: _Type("IQ4_NL", 32, 18),
    23: _Type("IQ4_XS", 256, 136),
    30: _Type("BF16", 1, 2),
}
_PLAIN = ("F32", "F16")  # which diffusers converts to the model's precision; all others it computes with as they are


class GgufTensor(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]  # as torch has it: the last axis is contiguous
    type_name: str
    stored_bytes: int

    def loaded_bytes(self, item_bytes: int) -> int:
        """Return its bytes in a model whose numbers have `item_bytes`."""
        return item_bytes * math.prod(self.shape) if self.type_name in _PLAIN else self.stored_bytes


@dataclass(frozen=True)
class GgufHeader:
    """The part of a file before the tensors' data."""

    num_bytes: int
    architecture: str  # what the file calls its model; empty: nothing
    tensors: Mapping[str, GgufTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' shapes by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def read_gguf_header(file: pathlib.Path) -> GgufHeader:
    """Return the header of a file, having checked that its tensors are in it and of types that diffusers knows.

    Raises ModelError: it is missing, damaged, truncated, or has other types or sizes.
    """
    try:
        with file.open("rb") as opened:
            return _Reader(opened, file.stat().st_size).header()
    except (ModelError, UnicodeDecodeError) as error:
        reason = error.message if isinstance(error, ModelError) else f"damaged: {error}."
        raise ModelError(f"{file}: {reason} Copy or download it again, or another quantization of it.") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error


class _Reader:
    """Reads numbers and strings in order, all little-endian."""

    def __init__(self, opened: BinaryIO, size_bytes: int) -> None:
        self._opened, self._size_bytes = opened, size_bytes
        self._position = self._num_items = 0
        self._alignment, self._architecture = 32, ""

    def header(self) -> GgufHeader:
        """Read all of it."""
        magic = self._take(4)
        if magic != b"GGUF":
            is_pointer = magic == b"vers"  # "version https://git-lfs…"
            raise ModelError("a Git LFS pointer, not the weights." if is_pointer else "not a GGUF file.")
        if (version := self._number("I")) not in (2, 3):
            raise ModelError(f"a GGUF file of version {version}; read are 2 and 3.")
        num_tensors = self._bounded("tensors", self._number("Q"), _MAX_TENSORS)
        for _ in range(self._bounded("fields", self._number("Q"), _MAX_FIELDS)):
            self._read_field()
        found = [self._read_tensor() for _ in range(num_tensors)]
        start = -(-self._position // self._alignment) * self._alignment
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor, _ in found}
        if len(tensors) < num_tensors or not tensors:
            raise ModelError("has no tensors, or two of one name.")
        end = start + max(offset + tensor.stored_bytes for _, tensor, offset in found)
        if end > self._size_bytes:
            raise ModelError(f"truncated: its tensors end at byte {end}, the file has {self._size_bytes}.")
        if start + sum(tensor.stored_bytes for _, tensor, _ in found) > self._size_bytes:
            raise ModelError("damaged: its tensors overlap.")
        return GgufHeader(self._position, self._architecture, tensors)

    def _read_field(self) -> None:
        key, kind = self._string(), self._number("I")
        value = self._value(kind)
        if key == "general.alignment":
            if kind != _UINT32 or not isinstance(value, bytes):
                raise ModelError("damaged: general.alignment is no number of 32 bits.")
            self._alignment = int.from_bytes(value, "little")
            if self._alignment.bit_count() != 1:
                raise ModelError(f"damaged: general.alignment is {self._alignment}, no power of two.")
        elif key == "general.architecture" and isinstance(value, str):
            self._architecture = value

    def _value(self, kind: int) -> bytes | str | None:
        """Return a value of this type; None of an array, which is read over."""
        if kind in _FIXED_BYTES:
            return self._take(_FIXED_BYTES[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelError(f"damaged: a field of type {kind}, which the format does not have.")
        item_kind, num_items = self._number("I"), self._number("Q")
        self._num_items = self._bounded("items of arrays", self._num_items + num_items, _MAX_ITEMS)
        if item_kind == _ARRAY:
            raise ModelError("has arrays of arrays, which are not read.")
        for _ in range(num_items):
            self._value(item_kind)
        return None

    def _read_tensor(self) -> tuple[str, GgufTensor, int]:
        """Return the name of a tensor, what it is, and its offset in the data."""
        name, num_axes = self._string(), self._bounded("axes of a tensor", self._number("I"), _MAX_AXES)
        shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]  # the file has the contiguous axis first
        kind, offset = self._number("I"), self._number("Q")
        found = _TYPES.get(kind)
        where = short_repr(name)
        if found is None:
            known = ", ".join(each.name for each in _TYPES.values())
            raise ModelError(f"{where} has type {kind} of GGML; diffusers computes with {known}.")
        if not shape or min(shape) < 1 or math.prod(shape) > 8 * self._size_bytes or shape[-1] % found.block:
            raise ModelError(f"damaged: {where} has the shape {list(shape)} in {found.name}.")
        if found.name not in _PLAIN and len(shape) != 2:
            raise ModelError(f"{where} of shape {list(shape)} is in {found.name}; only matrices can be quantized.")
        if offset % self._alignment:
            raise ModelError(f"damaged: {where} is at {offset}, no multiple of {self._alignment}.")
        return name, GgufTensor(shape, found.name, math.prod(shape) // found.block * found.block_bytes), offset

    def _bounded(self, what: str, value: int, limit: int) -> int:
        if value > limit:
            raise ModelError(f"damaged, or no image model: it would have {value} {what}; at most {limit} are read.")
        return value

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, code: str) -> int:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(code)))
        return int(value)

    def _take(self, num_bytes: int) -> bytes:
        self._position += num_bytes
        if self._position > min(self._size_bytes, _MAX_HEADER_BYTES):
            raise ModelError(
                f"truncated or damaged: its header goes on after byte {self._position - num_bytes}; the file has "
                f"{self._size_bytes}, and at most {_MAX_HEADER_BYTES} are read."
            )
        return self._opened.read(num_bytes)
