"""All processes' lines, brought together at the supervisor: read from its children's pipes, written to its stderr.

Each life of a child writes stdout and stderr into one pipe of its own, so its lines keep their order, and what it wrote before it was
killed is still there to be read. Reading waits for nobody: the lines go to the *outlet*, a thread behind a bounded queue. Whoever reads
the log too slowly loses lines, and is told how many; the supervisor's event loop is never held up by it, and no child, which has an outlet
of its own, by either.
"""

import asyncio
import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from noria.config import Config
from noria.observe.lines import Line, fault_line
from noria.observe.logs import LineHandler, logging_to, new_mark, render_for
from noria.observe.outlet import Outlet, Stream, write_all
from noria.observe.pieces import OwnLine, Piece, Pieces

_QUIET_S = 0.5  # so long may a traceback pause, and a printed line lack its end
_PIPE_BYTES = 1024 * 1024  # what Linux allows everybody (/proc/sys/fs/pipe-max-size), instead of 64 KiB
_READ_BYTES = 4096  # a turn of the loop: even if all of it is short lines, the loop has its turn soon
_STDOUT, _STDERR = 1, 2


def greet(text: str) -> None:
    """Print `text` to stdout, from a thread of its own: whoever reads that may be as slow as a reader of the log, or gone."""

    def write() -> None:
        with contextlib.suppress(OSError):
            write_all(_STDOUT, text.encode())

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
        with contextlib.suppress(
            OSError
        ):  # its user has too many of that size: then children keep more of it themselves
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
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
        """Take some of what there is; returns whether there may be more."""
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
    outlet = Outlet(render_for(config.log_format, sys.stderr, os.environ), Stream(_STDERR), "supervisor")
    outlet.start()
    try:
        with logging_to(LineHandler("supervisor", outlet.put), config.log_level):
            yield Relay(outlet)
    finally:
        outlet.close()
