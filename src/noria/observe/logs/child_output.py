"""Splits what comes out of a child's pipe into Noria's log lines and everything else the process printed. Pure.

A log line begins with a mark (`setup.new_mark`) and ends at the line end. Everything else is text: output of a C
library, a faulthandler dump, the traceback of an interpreter that did not start. The lines of a traceback become one
output.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from noria.observe.logs.log_record import MAX_LINE_BYTES

_TRACEBACK_STARTS = (
    "Traceback (most recent call last)",
    "Fatal Python error",
    "Exception in thread",
    "Exception ignored in",
)
# The part of a longer line that is kept. A log line is never cut: JSON and mark fit in.
_MAX_READ_BYTES = MAX_LINE_BYTES + 1024


@dataclass(frozen=True)
class EncodedLogLine:
    """A log line as the child wrote it, in JSON, without the mark."""

    encoded: bytes


@dataclass(frozen=True)
class RawOutput:
    """Any other output. With `is_traceback` it begins like a traceback and may have several lines."""

    text: str
    is_traceback: bool = False


ChildOutput = EncodedLogLine | RawOutput


class ChildOutputParser:
    """An incremental parser: it buffers an incomplete line, and a traceback that may continue."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._partial_line = b""  # bytes of a line whose end has not come yet
        self._is_skipping = False  # skipping the rest of a line that is too long
        self._traceback_lines: list[str] = []
        self._num_traceback_chars = 0

    @property
    def has_pending(self) -> bool:
        """Whether `flush` would return something."""
        return bool(self._traceback_lines) or self._partial_line_is_text

    @property
    def _partial_line_is_text(self) -> bool:
        return bool(self._partial_line) and not self._is_skipping and self._mark[:1] not in self._partial_line

    def feed(self, data: bytes) -> Iterator[ChildOutput]:
        """Return the outputs that `data` completes."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            yield from self._finish_line(line)
        if len(self._partial_line) > _MAX_READ_BYTES:
            raw, mark, log_line = self._partial_line.partition(self._mark)
            if len(log_line) > _MAX_READ_BYTES:  # not a log line
                raw, mark, log_line = self._partial_line, b"", b""
            if not self._is_skipping:
                yield from self._parse_line(raw)
            # A log line may follow text without a line end, and the buffer may end within its mark.
            self._partial_line, self._is_skipping = mark + log_line or raw[1 - len(self._mark) :], not mark

    def flush(self) -> Iterator[ChildOutput]:
        """Return what is buffered, except an incomplete log line; for a process that has been silent for a while."""
        if self._partial_line_is_text:
            partial_line, self._partial_line = self._partial_line, b""
            yield from self._parse_line(partial_line)
        yield from self._finish_traceback()

    def finish(self) -> Iterator[ChildOutput]:
        """Return all that is buffered, at the end of the input."""
        partial_line, self._partial_line = self._partial_line, b""
        if partial_line:
            yield from self._finish_line(partial_line)
        yield from self._finish_traceback()

    def _finish_line(self, line: bytes) -> Iterator[ChildOutput]:
        """Return the outputs of a complete line; of a line that was too long, only a log line at its end."""
        if self._is_skipping:
            self._is_skipping = False
            _, mark, log_line = line.partition(self._mark)
            line = mark + log_line
            if not mark:
                return
        yield from self._parse_line(line)

    def _parse_line(self, line: bytes) -> Iterator[ChildOutput]:
        # Text without a line end may precede a log line, and so may part of another whose write was interrupted.
        before, *log_lines = line.split(self._mark)
        if text := before[:_MAX_READ_BYTES].decode(errors="backslashreplace").rstrip():
            yield from self._parse_text(text)
        elif not log_lines and self._traceback_lines:
            self._traceback_lines.append("")
        for log_line in log_lines:
            yield from self._finish_traceback()
            yield EncodedLogLine(log_line[:_MAX_READ_BYTES])

    def _parse_text(self, text: str) -> Iterator[ChildOutput]:
        if not self._traceback_lines and not text.startswith(_TRACEBACK_STARTS):
            yield RawOutput(text)
            return
        if self._num_traceback_chars + len(text) > MAX_LINE_BYTES:
            yield from self._finish_traceback()
        self._traceback_lines.append(text)
        self._num_traceback_chars += len(text)

    def _finish_traceback(self) -> Iterator[ChildOutput]:
        if self._traceback_lines:
            yield RawOutput("\n".join(self._traceback_lines).rstrip(), is_traceback=True)
        self._traceback_lines, self._num_traceback_chars = [], 0
