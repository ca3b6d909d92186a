"""Reads the header of a safetensors file that may be hostile: names, types, shapes and places of its tensors.

The library `safetensors` maps a file into memory, so that one that shrinks meanwhile would end the process, and it says
no places. Each number here is bounded and compared with the file's size; the tensors must fill the file exactly.
"""

import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from noria.errors import ModelError, short_repr
from noria.models.files.weights import REDOWNLOAD_HINT, file_size_bytes, short_digest

SUFFIX = ".safetensors"

_MAX_HEADER_BYTES = 2**24  # SDXL's 2,500 tensors take 0.4 MB, kohya's statistics of the training images a few more
_MAX_TENSORS = 20_000
_MAX_STRINGS = 5 * _MAX_TENSORS + 10_000  # 5 of each tensor, and metadata has some hundred
_SAMPLED_BYTES = 1024
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes of a number, by the type's name in a file."""

_Size = Annotated[int, Meta(ge=0, le=2**48)]


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the JSON of a header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    data_offsets: Annotated[tuple[_Size, ...], Meta(min_length=2, max_length=2)]


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    dtype: str  # a key of `ITEM_BYTES`
    shape: tuple[int, ...]
    start: int  # its first byte, counted from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class CheckpointHeader:
    """A checked header."""

    file: pathlib.Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def starting(self, prefix: str) -> dict[str, StoredTensor]:
        """Return the tensors whose names start so, by the rest of the name."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def read_checkpoint_header(file: pathlib.Path) -> CheckpointHeader:
    """Return the header of a file; nothing behind it is read.

    Raises ModelError: the file is missing, truncated, damaged or no safetensors file.
    """
    try:
        size_bytes = file_size_bytes(file)
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{file}: {_describe(header_bytes, size_bytes)}. {REDOWNLOAD_HINT}")
            header = opened.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error
    try:
        return _parse(file, header, size_bytes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(
            f"{file}: not a safetensors file, or its header is damaged: {short_repr(str(error))}. {REDOWNLOAD_HINT}"
        ) from error


def _describe(header_bytes: int, size_bytes: int) -> str:
    """Say why no header can be read."""
    if header_bytes.to_bytes(8, "little") == b"version ":
        return "a Git LFS pointer, not the weights"
    what = "truncated" if header_bytes <= _MAX_HEADER_BYTES else "not a safetensors file"
    return (
        f"{what}: its header would have {header_bytes} bytes, the file has {size_bytes}, and at most "
        f"{_MAX_HEADER_BYTES} are read"
    )


def _parse(file: pathlib.Path, header: bytes, size_bytes: int) -> CheckpointHeader:
    if (header.count(b'"') - header.count(b'\\"')) // 2 > _MAX_STRINGS:
        raise ModelError(f"{file}: its header has more than {_MAX_STRINGS} names and texts, which are allowed.")
    entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str] | None)
    if not 0 < len(entries) <= _MAX_TENSORS:
        raise ModelError(f"{file}: has {len(entries)} tensors; allowed are 1 to {_MAX_TENSORS}.")
    start = 8 + len(header)
    tensors = {
        name: _checked(file, name, msgspec.json.decode(entry, type=_Entry), start) for name, entry in entries.items()
    }
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != end:
            raise ModelError(f"{file}: damaged: its tensors overlap, or bytes between them are none's.")
        end += tensor.num_bytes
    if end != size_bytes:
        what = "truncated" if size_bytes < end else "too long"
        raise ModelError(f"{file}: {what}: expected {end} bytes, the file has {size_bytes}. {REDOWNLOAD_HINT}")
    return CheckpointHeader(file, tensors, metadata or {})


def _checked(file: pathlib.Path, name: str, entry: _Entry, data_start: int) -> StoredTensor:
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise ModelError(
            f"{file}: {short_repr(name)} has numbers of type {short_repr(entry.dtype)}; read are "
            f"{', '.join(ITEM_BYTES)}. Take another version of the file, in 16 bits."
        )
    start, end = entry.data_offsets
    if end - start != item_bytes * math.prod(entry.shape):
        raise ModelError(
            f"{file}: damaged: {short_repr(name)} has the shape {list(entry.shape)} in {end - start} bytes."
        )
    return StoredTensor(entry.dtype, entry.shape, data_start + start, end - start)


def content_digest(headers: Iterable[CheckpointHeader]) -> str:
    """Return 12 digits of a SHA-256 over the headers of files and the start of each tensor, which training changes.

    Not over all bytes, which would take minutes. Raises ModelError: a file cannot be read.
    """
    return short_digest(each for header in headers for each in _identifying(header))


def _identifying(header: CheckpointHeader) -> Iterator[bytes]:
    try:
        with header.file.open("rb") as opened:
            yield opened.read(min(tensor.start for tensor in header.tensors.values()))
            for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.start):
                opened.seek(tensor.start)
                yield opened.read(min(tensor.num_bytes, _SAMPLED_BYTES))
    except OSError as error:
        raise ModelError(f"{header.file}: cannot be read: {error.strerror}.") from error
