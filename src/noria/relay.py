"""All processes' lines, brought together at the supervisor: read from its children's pipes, written to its stderr.

Each life of a child writes stdout and stderr into one pipe of its own, so its lines keep their order, and what it wrote before it was
killed is still there to be read. Reading waits for nobody: the lines go to the *outlet*, a thread behind a bounded queue. Whoever reads
the log too slowly loses lines, and is told how many; no child and not the supervisor's event loop is ever held up by it.
"""

import asyncio
import contextlib
import errno
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from noria.config import Config
from noria.observe.lines import Line, Render, fault_line, new_line
from noria.observe.logs import LineHandler, logging_to, new_mark, render_for
from noria.observe.pieces import OwnLine, Piece, Pieces

_QUIET_S = 0.5  # so long may a traceback pause, and a printed line lack its end
_MOST_WAITING_BYTES = 8 * 1024 * 1024
_READ_BYTES = 65_536
_LAST_WORDS_S = 2.0  # at the end, for a reader that is slow
_AT_ONCE = 64  # lines of one write
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # a disk, which somebody will empty
_BETWEEN_TRIES_S = 0.5
_STDOUT, _STDERR = 1, 2


class Outlet(threading.Thread):
    """Writes lines to a file descriptor, in the order in which they are `put`, from a thread of its own."""

    def __init__(self, render: Render, fd: int = _STDERR, most_waiting_bytes: int = _MOST_WAITING_BYTES) -> None:
        super().__init__(name="outlet", daemon=True)  # a terminal that stands still must not keep the process
        self._render, self._fd, self._most_waiting_bytes = render, fd, most_waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._num_lost = 0
        self._num_at_stake = 0  # lines that are lost if what was taken last cannot be written
        self._closed = False
        self._changed = threading.Condition()

    def put(self, line: Line) -> None:
        """Have `line` written; never waits. It is counted as lost where too many wait already."""
        written = self._render(line) + b"\n"
        with self._changed:
            if self._waiting_bytes + len(written) > self._most_waiting_bytes:
                self._num_lost += 1
                return
            self._waiting.append(written)
            self._waiting_bytes += len(written)
            self._changed.notify()

    def close(self, patience_s: float = _LAST_WORDS_S) -> None:
        """Write what waits, for so long at most; nothing may be put any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.join(patience_s)

    def run(self) -> None:
        """Write until `close`, or until nobody can read any more; lines for a disk that is full are lost, and counted."""
        while taken := self._take():
            try:
                _write_all(self._fd, b"".join(taken))
            except OSError as error:
                if error.errno not in _FULL:  # the terminal or the pipe is gone: nobody is left to be told
                    with self._changed:
                        self._most_waiting_bytes = 0
                        self._waiting.clear()
                    return
                with self._changed:
                    self._num_lost += self._num_at_stake
                    if self._closed:
                        return
                time.sleep(_BETWEEN_TRIES_S)

    def _take(self) -> list[bytes]:
        """The next lines; none: it is closed, and all is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._num_lost or self._closed)
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), _AT_ONCE))]
            self._waiting_bytes -= sum(map(len, taken))
            lost = 0
            if not self._waiting:  # else they are missing further on
                lost, self._num_lost = self._num_lost, 0
        self._num_at_stake = len(taken) + lost
        if lost:
            words = f"{lost} lines of the log were lost here: they could not be written, or not as fast as they came"
            taken.append(
                self._render(new_line(time.time(), "warning", "noria.relay", "supervisor", words) | {"lost": lost})
                + b"\n"
            )
        return taken


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another program has made the terminal non-blocking
            select.select([], [fd], [])


def greet(text: str) -> None:
    """Print `text` to stdout, from a thread of its own: whoever reads that may be as slow as a reader of the log, or gone."""

    def write() -> None:
        with contextlib.suppress(OSError):
            _write_all(_STDOUT, text.encode())

    threading.Thread(target=write, name="greeting", daemon=True).start()


@dataclass(eq=False)
class _Source:
    """One life of a child: the reading end of its pipe."""

    name: str
    fd: int
    pieces: Pieces
    quiet: asyncio.TimerHandle | None = None


class Relay:
    """Reads the pipes of children in the running event loop."""

    def __init__(self, outlet: Outlet) -> None:
        self.mark = new_mark()
        self._outlet = outlet
        self._sources: set[_Source] = set()

    @contextlib.contextmanager
    def pipe(self, name: str) -> Iterator[int]:
        """The end of a new pipe into which the child `name` is to write; it is to inherit it before the context ends."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        source = _Source(name, reading, Pieces(self.mark))
        self._sources.add(source)
        asyncio.get_running_loop().add_reader(reading, self._read, source)
        try:
            yield writing
        finally:
            os.close(writing)

    def close(self) -> None:
        """Read what the children, all ended by now, have left in their pipes."""
        for source in list(self._sources):
            while self._read(source):
                pass
            if source in self._sources:  # a grandchild lives on, and holds its pipe open
                self._end(source)

    def _read(self, source: _Source) -> bool:
        """Take what there is, in one go; returns whether there may be more."""
        try:
            data = os.read(source.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end(source)
            return False
        self._tell(source, source.pieces.feed(data))
        if source.quiet is not None:
            source.quiet.cancel()
            source.quiet = None
        if source.pieces.holds:
            source.quiet = asyncio.get_running_loop().call_later(_QUIET_S, self._flush, source)
        return True

    def _flush(self, source: _Source) -> None:
        self._tell(source, source.pieces.flush())

    def _end(self, source: _Source) -> None:
        asyncio.get_running_loop().remove_reader(source.fd)
        if source.quiet is not None:
            source.quiet.cancel()
        self._tell(source, source.pieces.end())
        os.close(source.fd)
        self._sources.discard(source)

    def _tell(self, source: _Source, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._outlet.put(_line_of(piece, source.name))


def _line_of(piece: Piece, process: str) -> Line:
    if not isinstance(piece, OwnLine):
        return fault_line(time.time(), process, piece.text, is_fault=piece.is_fault)
    try:
        line = msgspec.json.decode(piece.encoded, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError):  # its process was killed while it wrote
        return fault_line(time.time(), process, piece.encoded.decode(errors="backslashreplace"), is_fault=False)
    return line | {"process": process}


@contextlib.contextmanager
def relaying(config: Config) -> Iterator[Relay]:
    """Meanwhile this process logs as the supervisor, and a relay is at hand for its children; both write to stderr as `config` says."""
    outlet = Outlet(render_for(config.log_format, sys.stderr, os.environ))
    outlet.start()
    try:
        with logging_to(LineHandler("supervisor", outlet.put), config.log_level):
            yield Relay(outlet)
    finally:
        outlet.close()
