"""Reads the lines of a job of texts from the pieces in which they arrive, and writes them in chunks to a file.

A line of plain text is a text. A line of JSON is a text, a pair `["a", "b"]`, or an object whose `text`, and
`text_pair` if there is one, are those; its other fields are ignored. Lines end with a line feed; a carriage return
before it, and the mark that some editors put before the first line, are no part of a text. No line is empty.

Knows no HTTP. Calls take milliseconds and write to a disk: run them in threads.
"""

import hashlib
from dataclasses import dataclass
from typing import IO, Literal

import msgspec
from msgspec import Struct

from noria.errors import EmptyInput, InvalidField
from noria.jobs.text_parts import TextChunk
from noria.models.encoder.tokenizers.tokens import TextInput

LineFormat = Literal["text", "jsonl"]

MAX_CHUNK_TEXTS = 1024
MAX_CHUNK_BYTES = 262_144  # bytes of a chunk's lines, unless one is longer; each chunk is stored at once
_MAX_PART_BYTES = 1_048_576  # bytes of a chunk's results, which are sent at once
_BYTES_PER_NUMBER = 4
# A character of a text is at most six bytes of JSON; the rest is for other fields of an object.
_MAX_BYTES_PER_CHAR, _MAX_OTHER_BYTES = 6, 65_536
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Line(Struct, frozen=True):
    text: str
    text_pair: str | None = None


_DECODER = msgspec.json.Decoder(str | tuple[str, str] | _Line)


@dataclass(frozen=True)
class LineLimits:
    """The limits of a job."""

    max_texts: int
    max_chars: int  # characters of a text, or of each text of a pair
    allows_pairs: bool


class TextLines:
    """The texts of one body. `file` is empty and at its end; each of its lines becomes a chunk, as JSON."""

    def __init__(self, line_format: LineFormat, limits: LineLimits, num_columns: int, file: IO[bytes]) -> None:
        """`num_columns` is how many numbers the result of a text has."""
        self.num_texts = self.num_chunks = 0
        self.stored_bytes = 0  # bytes of all chunks: escapes of JSON may make a body six times as long
        self.digest = hashlib.sha256()  # digest of the body
        self._format, self._limits, self._file = line_format, limits, file
        self._max_line_bytes = _MAX_BYTES_PER_CHAR * limits.max_chars + _MAX_OTHER_BYTES
        self._chunk_texts = min(MAX_CHUNK_TEXTS, max(_MAX_PART_BYTES // (_BYTES_PER_NUMBER * num_columns), 1))
        self._texts: list[TextInput] = []  # texts of the chunk that is not full
        self._text_bytes = 0  # bytes of their lines
        self._rest = b""  # start of a line that has not ended

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the body. Raises InvalidField, which names the line."""
        self.digest.update(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._add(line)
        if len(self._rest) > self._max_line_bytes:
            raise self._line_too_long(self.num_texts + 1)

    def finish(self) -> None:
        """End the body. Raises InvalidField: its last line is invalid, or it has none."""
        if self._rest:
            self._add(self._rest)
        if not self.num_texts:
            raise EmptyInput("the body is empty; send a text in each line.", field="body")
        if self._texts:
            self._write_chunk()
        self._file.seek(0)

    def _add(self, line: bytes) -> None:
        number = self.num_texts + 1
        if number > self._limits.max_texts:
            raise InvalidField(
                f"the body has more than {self._limits.max_texts} lines (jobs.max_job_texts). Send several jobs.",
                field="body",
            )
        if len(line) > self._max_line_bytes:
            raise self._line_too_long(number)
        text = self._decode(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line, number)
        num_chars = len(text) if isinstance(text, str) else max(map(len, text))
        if num_chars > self._limits.max_chars:
            raise InvalidField(
                f"line {number} has a text of {num_chars} characters; allowed are at most {self._limits.max_chars} "
                "(frontend.max_text_chars). Split it.",
                field="body",
            )
        self.num_texts = number
        self._texts.append(text)
        self._text_bytes += len(line)
        if len(self._texts) >= self._chunk_texts or self._text_bytes >= MAX_CHUNK_BYTES:
            self._write_chunk()

    def _decode(self, line: bytes, number: int) -> TextInput:
        line = line.removesuffix(b"\r")
        if not line.strip() if self._format == "jsonl" else not line:
            raise EmptyInput(f"line {number} is empty; each line is a text.", field="body")
        try:
            text = line.decode() if self._format == "text" else _DECODER.decode(line)
        except UnicodeDecodeError as error:
            raise InvalidField(
                f"line {number} is not UTF-8: {error.reason} at byte {error.start}.", field="body"
            ) from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidField(
                f'line {number}: {error}. A line of JSON is a text, a pair ["a", "b"], or an object with `text`.',
                field="body",
            ) from error
        if isinstance(text, _Line):
            text = text.text if text.text_pair is None else (text.text, text.text_pair)
        if not isinstance(text, str) and not self._limits.allows_pairs:
            raise InvalidField(f"line {number} is a pair; an embedding is of one text.", field="body")
        if not text or not all(text):
            raise EmptyInput(f"line {number} has an empty text.", field="body")
        return text

    def _line_too_long(self, number: int) -> InvalidField:
        return InvalidField(f"line {number} is longer than {self._max_line_bytes} bytes. Split it.", field="body")

    def _write_chunk(self) -> None:
        chunk = TextChunk(self.num_texts - len(self._texts) + 1, self._texts)
        self.stored_bytes += self._file.write(msgspec.json.encode(chunk) + b"\n")
        self.num_chunks += 1
        self._texts, self._text_bytes = [], 0
