"""What comes out of a child's pipe, cut into pieces: lines of our log, and whatever else the process has printed. Pure.

Ours begin with a mark (`logs.new_mark`) and end with the line. All else is text: a C library's print, faulthandler's dump, a traceback of
an interpreter that did not start. A fault's lines are one piece as far as they come in one go.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from noria.observe.lines import LONGEST_LINE_BYTES

_FAULTS = ("Traceback (most recent call last)", "Fatal Python error", "Exception in thread", "Exception ignored in")
# What of a longer line is read: ours are never cut, since JSON and mark fit in.
_LONGEST = LONGEST_LINE_BYTES + 1024


@dataclass(frozen=True)
class OwnLine:
    """A line of our log, as the child wrote it: JSON."""

    encoded: bytes


@dataclass(frozen=True)
class Printed:
    """Anything else; `is_fault`: it begins like a traceback, and may have several lines."""

    text: str
    is_fault: bool = False


Piece = OwnLine | Printed


class Pieces:
    """Takes bytes as they come. Between `feed` and `flush` it keeps what may go on."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._tail = b""  # of the line that has not ended
        self._skips = False  # the rest of a line that is too long
        self._fault: list[str] = []
        self._fault_chars = 0

    @property
    def holds(self) -> bool:
        """Whether `flush` would give something."""
        return bool(self._fault) or self._tail_is_text

    @property
    def _tail_is_text(self) -> bool:
        return bool(self._tail) and not self._skips and self._mark[:1] not in self._tail

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that `data` has brought to their end."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            yield from self._end_line(line)
        if len(self._tail) > _LONGEST:
            printed, mark, own = self._tail.partition(self._mark)
            if len(own) > _LONGEST:  # none of ours
                printed, mark, own = self._tail, b"", b""
            if not self._skips:
                yield from self._line(printed)
            # What is printed without an end may have a line of ours behind it, whose mark may have begun.
            self._tail, self._skips = mark + own or printed[1 - len(self._mark) :], not mark

    def flush(self) -> Iterator[Piece]:
        """What was kept in the hope of more, but for a line of ours that has begun: its process has said nothing for a while."""
        if self._tail_is_text:
            tail, self._tail = self._tail, b""
            yield from self._line(tail)
        yield from self._end_fault()

    def end(self) -> Iterator[Piece]:
        """All that is left: nothing more will come."""
        tail, self._tail = self._tail, b""
        if tail:
            yield from self._end_line(tail)
        yield from self._end_fault()

    def _end_line(self, line: bytes) -> Iterator[Piece]:
        """The pieces of a line that has ended; of one that was too long, what has not been told of it."""
        if self._skips:
            self._skips = False
            _, mark, own = line.partition(self._mark)
            line = mark + own
            if not mark:
                return
        yield from self._line(line)

    def _line(self, line: bytes) -> Iterator[Piece]:
        # A print without an end may stand before a line of ours, or the half of another whose writing was interrupted.
        before, *owns = line.split(self._mark)
        if text := before[:_LONGEST].decode(errors="backslashreplace").rstrip():
            yield from self._text(text)
        elif not owns and self._fault:
            self._fault.append("")
        for own in owns:
            yield from self._end_fault()
            yield OwnLine(own[:_LONGEST])

    def _text(self, text: str) -> Iterator[Piece]:
        if not self._fault and not text.startswith(_FAULTS):
            yield Printed(text)
            return
        if self._fault_chars + len(text) > LONGEST_LINE_BYTES:
            yield from self._end_fault()
        self._fault.append(text)
        self._fault_chars += len(text)

    def _end_fault(self) -> Iterator[Piece]:
        if self._fault:
            yield Printed("\n".join(self._fault).rstrip(), is_fault=True)
        self._fault, self._fault_chars = [], 0
