"""The results of a job of texts as files: NumPy's `.npy` and `.npz`, or a line of JSON for each text; without NumPy.

If texts have different numbers of rows, a part begins with these numbers (`text_parts.py`).
"""

import array
import asyncio
import io
import itertools
import zipfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from noria.frontend.services.texts.scores import Prediction, predictions
from noria.jobs.stored_request import TextJobRequest
from noria.jobs.text_parts import TextPart

# https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
_NPY_MAGIC, _NPY_ALIGNMENT = b"\x93NUMPY\x01\x00", 64


class EmbeddingLine(Struct, frozen=True):
    """A line of the embeddings; `index` counts from 0."""

    index: int
    embedding: Sequence[float]


class LabelsLine(Struct, frozen=True):
    """A line of the results of a model with labels, the best label first."""

    index: int
    labels: list[Prediction]


class SparseLine(Struct, frozen=True):
    """A line of sparse embeddings: the tokens' ids, and their numbers."""

    index: int
    indices: Sequence[int]
    values: Sequence[float]


class TokensLine(Struct, frozen=True):
    """A line of embeddings of tokens."""

    index: int
    embeddings: Sequence[Sequence[float]]


class ResultFormat(NamedTuple):
    """A form of the results, and its media type."""

    name: str
    media_type: str


NPZ = ResultFormat("npz", "application/octet-stream")
NPY, JSONL = ResultFormat("npy", "application/octet-stream"), ResultFormat("jsonl", "application/jsonl")


def npy_header(request: TextJobRequest) -> bytes:
    """Return what stands before the rows in a `.npy` file of float32."""
    return _npy_header("<f4", (request.num_texts, request.num_columns))


def _npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    length = -(-(len(_NPY_MAGIC) + 2 + len(header) + 1) // _NPY_ALIGNMENT) * _NPY_ALIGNMENT - len(_NPY_MAGIC) - 2
    return _NPY_MAGIC + length.to_bytes(2, "little") + header.ljust(length - 1) + b"\n"


def json_lines(part: bytes, first_index: int, request: TextJobRequest) -> bytes:
    """Return the lines of texts, the first of which has this index; takes a millisecond for a few thousand numbers."""
    if request.is_ragged:
        texts = enumerate(_texts(part, request), first_index)
        return b"".join(msgspec.json.encode(_ragged_line(index, rows, request)) + b"\n" for index, rows in texts)
    numbers, width = memoryview(part).cast("f"), request.num_columns  # both little-endian
    starts = range(0, len(numbers), width)
    return b"".join(
        msgspec.json.encode(_line(index, numbers[start : start + width].tolist(), request.labels)) + b"\n"
        for index, start in enumerate(starts, first_index)
    )


def _line(index: int, row: Sequence[float], labels: Sequence[str]) -> EmbeddingLine | LabelsLine:
    if not labels:
        return EmbeddingLine(index, row)
    return LabelsLine(index, predictions(row, labels, "identity"))


def pieces_of_texts(
    part: bytes, num_texts: int, request: TextJobRequest, max_numbers: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the next texts of a part, with at most `max_numbers`: how many they are, and what `json_lines` takes."""
    if not request.is_ragged:
        row_bytes = 4 * request.num_columns
        step = row_bytes * max(max_numbers // request.num_columns, 1)
        for start in range(0, len(part), step):
            piece = part[start : start + step]
            yield len(piece) // row_bytes, piece
        return
    counts, rows = split_part(part, num_texts)
    row_bytes, first, start = 4 * request.row_width, 0, 0
    sizes = [count * request.row_width for count in counts]
    while first < num_texts:
        last, total = first + 1, sizes[first]
        while last < num_texts and total + sizes[last] <= max_numbers:
            total += sizes[last]
            last += 1
        end = start + sum(counts[first:last]) * row_bytes
        yield last - first, array.array("f", [last - first, *counts[first:last]]).tobytes() + rows[start:end]
        first, start = last, end


def split_part(part: bytes, num_texts: int) -> tuple[list[int], bytes]:
    """Return the numbers of rows that a part begins with, and the rows."""
    counts = memoryview(part)[: 4 * num_texts].cast("f")
    return list(map(int, counts)), part[4 * num_texts :]


def _texts(piece: bytes, request: TextJobRequest) -> Iterator[list[list[float]]]:
    """Yield the rows of each text of what `pieces_of_texts` has yielded."""
    num_texts = int(memoryview(piece)[:4].cast("f")[0])
    counts, content = split_part(piece[4:], num_texts)
    numbers: memoryview[float] = memoryview(content).cast("f")
    width = request.row_width
    rows = (list(numbers[start : start + width]) for start in range(0, len(numbers), width))
    return (list(itertools.islice(rows, count)) for count in counts)


def _ragged_line(index: int, rows: Sequence[Sequence[float]], request: TextJobRequest) -> SparseLine | TokensLine:
    if request.task == "sparse_embedding":
        return SparseLine(index, [int(token) for token, _ in rows], [number for _, number in rows])
    return TokensLine(index, rows)


class _Sink(io.RawIOBase):
    """A file that can only be written; `take` empties it."""

    def __init__(self) -> None:
        self._content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._content += data
        return len(data)

    def take(self) -> bytes:
        content, self._content = bytes(self._content), bytearray()
        return content


async def npz_pieces(
    read: Callable[[TextPart], Awaitable[bytes]], parts: Sequence[TextPart], request: TextJobRequest
) -> AsyncGenerator[bytes, None]:
    """Yield a `.npz` file: of sparse embeddings as scipy.sparse.load_npz reads it, of tokens `data` and `indptr`.

    Text i has the rows from `indptr[i]` up to but not including `indptr[i + 1]`.
    """
    counts: list[int] = []
    for part in parts:
        counts += split_part(await read(part), part.num_texts)[0]
    indptr = array.array("q", itertools.accumulate(counts, initial=0))
    is_sparse, total = request.task == "sparse_embedding", indptr[-1]
    sink = _Sink()
    archive = zipfile.ZipFile(sink, "w")
    small = {"indptr": _npy_header("<i8", (len(indptr),)) + indptr.tobytes()}
    if is_sparse:
        small["shape"] = _npy_header("<i8", (2,)) + array.array("q", [len(counts), request.num_columns]).tobytes()
        small["format"] = _npy_header("|S3", ()) + b"csr"
    for name, content in small.items():
        archive.writestr(f"{name}.npy", content)
    members = {"indices": ("<i4", (total,)), "data": ("<f4", (total,))} if is_sparse else {
        "data": ("<f4", (total, request.num_columns))
    }  # fmt: skip
    for name, (descr, shape) in members.items():
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            member.write(_npy_header(descr, shape))
            for part in parts:
                rows = split_part(await read(part), part.num_texts)[1]
                member.write(await asyncio.to_thread(_column, name, rows) if is_sparse else rows)
                yield sink.take()
    archive.close()
    yield sink.take()


def _column(name: str, pairs: bytes) -> bytes:
    """Return the ids or the numbers of sparse embeddings; takes some milliseconds for a part."""
    numbers = memoryview(pairs).cast("f")
    return array.array("i", map(int, numbers[::2])).tobytes() if name == "indices" else numbers[1::2].tobytes()
