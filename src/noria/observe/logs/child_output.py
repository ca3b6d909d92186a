"""What comes out of a child's pipe, cut into pieces: lines of our log, and whatever else the process has printed. Pure.

Ours begin with a mark (`logs.new_mark`) and end with the line. All else is text: a C library's print, faulthandler's dump, a traceback of
an interpreter that did not start. A fault's lines are one piece as far as they come in one go.
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
# What of a longer line is read: ours are never cut, since JSON and mark fit in.
_MAX_READ_BYTES = MAX_LINE_BYTES + 1024


@dataclass(frozen=True)
class EncodedLogLine:
    """A line of our log, as the child wrote it: JSON."""

    encoded: bytes


@dataclass(frozen=True)
class RawOutput:
    """Anything else; `is_fault`: it begins like a traceback, and may have several lines."""

    text: str
    is_traceback: bool = False


ChildOutput = EncodedLogLine | RawOutput


class ChildOutputParser:
    """Takes bytes as they come. Between `feed` and `flush` it keeps what may go on."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._partial_line = b""  # of the line that has not ended
        self._is_skipping = False  # the rest of a line that is too long
        self._traceback_lines: list[str] = []
        self._num_traceback_chars = 0

    @property
    def has_pending(self) -> bool:
        """Whether `flush` would give something."""
        return bool(self._traceback_lines) or self._partial_line_is_text

    @property
    def _partial_line_is_text(self) -> bool:
        return bool(self._partial_line) and not self._is_skipping and self._mark[:1] not in self._partial_line

    def feed(self, data: bytes) -> Iterator[ChildOutput]:
        """The pieces that `data` has brought to their end."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            yield from self._finish_line(line)
        if len(self._partial_line) > _MAX_READ_BYTES:
            raw, mark, log_line = self._partial_line.partition(self._mark)
            if len(log_line) > _MAX_READ_BYTES:  # none of ours
                raw, mark, log_line = self._partial_line, b"", b""
            if not self._is_skipping:
                yield from self._parse_line(raw)
            # What is printed without an end may have a line of ours behind it, whose mark may have begun.
            self._partial_line, self._is_skipping = mark + log_line or raw[1 - len(self._mark) :], not mark

    def flush(self) -> Iterator[ChildOutput]:
        """What was kept in the hope of more, but for a line of ours that has begun: its process has said nothing for a while."""
        if self._partial_line_is_text:
            partial_line, self._partial_line = self._partial_line, b""
            yield from self._parse_line(partial_line)
        yield from self._finish_traceback()

    def finish(self) -> Iterator[ChildOutput]:
        """All that is left: nothing more will come."""
        partial_line, self._partial_line = self._partial_line, b""
        if partial_line:
            yield from self._finish_line(partial_line)
        yield from self._finish_traceback()

    def _finish_line(self, line: bytes) -> Iterator[ChildOutput]:
        """The pieces of a line that has ended; of one that was too long, what has not been told of it."""
        if self._is_skipping:
            self._is_skipping = False
            _, mark, log_line = line.partition(self._mark)
            line = mark + log_line
            if not mark:
                return
        yield from self._parse_line(line)

    def _parse_line(self, line: bytes) -> Iterator[ChildOutput]:
        # A print without an end may stand before a line of ours, or the half of another whose writing was interrupted.
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
