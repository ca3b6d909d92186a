"""Reads the vocabulary of T5 in SentencePiece's own file, `spiece.model`, without its package. No torch.

The file is a message of protocol buffers (https://protobuf.dev/programming-guides/encoding/), whose fields are those of
sentencepiece_model.proto: 1 the pieces, each with 1 its text and 2 its score; 2 how it was trained, with 3 the kind of
model; 3 how texts are normalised, with 2 the table that `tokenizers` calls a precompiled one.
"""

import pathlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from noria.errors import ModelError
from noria.models.files.weights import REDOWNLOAD_HINT, read_text

SPIECE = "spiece.model"

_UNIGRAM = 1  # the kind of T5, and of a file that names none
_UNKNOWN = 2  # the number of T5's piece for what has none
_ZERO = memoryview(b"\0\0\0\0")  # a score, if there is none
# All messages in the file: a piece is a field with three. T5 has 32,000 pieces, multilingual models 256,000.
_MAX_FIELDS = 2_000_000


@dataclass(frozen=True)
class Vocabulary:
    """The pieces by their numbers, with their scores, and the table of normalisation, empty if there is none."""

    pieces: tuple[tuple[str, float], ...]
    normalization: bytes


def needs_pieces(tokenizer: pathlib.Path) -> bool:
    """Whether the vocabulary of a tokenizer's folder is in `spiece.model` alone."""
    return (tokenizer / SPIECE).exists() and not (tokenizer / "tokenizer.json").exists()


def read_vocabulary(file: pathlib.Path) -> Vocabulary:
    """Return the vocabulary of T5 in a file. Raises ModelError if it is none, or damaged."""
    raw = read_text(file)
    try:
        return _parse(memoryview(raw))
    except (ValueError, TypeError, IndexError, struct.error) as error:  # the last three: of a field of another type
        raise ModelError(f"{file}: contains no vocabulary of T5: {error}. {REDOWNLOAD_HINT}") from error


def _parse(data: memoryview) -> Vocabulary:
    pieces: list[tuple[str, float]] = []
    normalization, kind = b"", _UNIGRAM
    budget = iter(range(_MAX_FIELDS))
    for number, value in _fields(data, budget):
        if number == 1:
            piece = dict(_fields(_message(value), budget))
            (score,) = struct.unpack("<f", _message(piece.get(2, _ZERO)))
            pieces.append((bytes(_message(piece.get(1))).decode(), score))
        elif number == 2:
            named = dict(_fields(_message(value), budget)).get(3, kind)
            kind = named if isinstance(named, int) else 0
        elif number == 3:
            normalization = bytes(_message(dict(_fields(_message(value), budget)).get(2, memoryview(b""))))
    if kind != _UNIGRAM:
        raise ValueError("it is no unigram model")
    if len(pieces) <= _UNKNOWN or pieces[_UNKNOWN][0] != "<unk>":
        raise ValueError(f"piece {_UNKNOWN} is not <unk>")
    return Vocabulary(tuple(pieces), normalization)


def _message(value: "int | memoryview | None") -> memoryview:
    if not isinstance(value, memoryview):
        raise TypeError("a field has another type")
    return value


def _fields(data: memoryview, budget: Iterator[int]) -> Iterator[tuple[int, "int | memoryview"]]:
    """Yield number and value of each field of a message, each of which uses up one of the `budget` of a file.

    Raises ValueError, IndexError: it is damaged, or has more fields.
    """
    at = 0
    while at < len(data):
        if next(budget, None) is None:
            raise ValueError(f"it has more than {_MAX_FIELDS} entries")
        tag, at = _read_varint(data, at)
        value: int | memoryview
        if tag & 7 == 0:
            value, at = _read_varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(tag & 7)
            if tag & 7 == 2:
                size, at = _read_varint(data, at)
            if size is None or size > len(data) - at:
                raise ValueError("it is truncated or damaged")
            value, at = data[at : at + size], at + size
        yield tag >> 3, value


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position behind it."""
    number = 0
    for shift in range(0, 64, 7):
        number |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return number, at
    raise ValueError("a number is too long")
