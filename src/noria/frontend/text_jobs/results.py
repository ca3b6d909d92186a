"""The results of a job of texts as files: NumPy's `.npy`, or a line of JSON for each text. Pure, and without NumPy."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from noria.frontend.services.texts.scores import Prediction, predictions
from noria.jobs.stored_request import TextJobRequest

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


class ResultFormat(NamedTuple):
    """A form of the results, and its media type."""

    name: str
    media_type: str


NPY, JSONL = ResultFormat("npy", "application/octet-stream"), ResultFormat("jsonl", "application/jsonl")


def npy_header(request: TextJobRequest) -> bytes:
    """Return what stands before the rows in a `.npy` file of float32."""
    shape = f"({request.num_texts}, {request.num_columns})"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    length = -(-(len(_NPY_MAGIC) + 2 + len(header) + 1) // _NPY_ALIGNMENT) * _NPY_ALIGNMENT - len(_NPY_MAGIC) - 2
    return _NPY_MAGIC + length.to_bytes(2, "little") + header.ljust(length - 1) + b"\n"


def json_lines(part: bytes, first_index: int, request: TextJobRequest) -> bytes:
    """Return the lines of a part whose first text has this index; takes a millisecond for a few thousand numbers."""
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
