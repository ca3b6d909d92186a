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
from noria.observe.logs.child_output import ChildOutput, ChildOutputParser, EncodedLogLine
from noria.observe.logs.log_record import Line, unstructured_line
from noria.observe.logs.setup import LineHandler, logging_to, new_mark, render_for
from noria.observe.logs.writer import NonBlockingWriter, Stream, write_all

_FLUSH_AFTER_S = 0.5  # so long may a traceback pause, and a printed line lack its end
_PIPE_BYTES = 1024 * 1024  # what Linux allows everybody (/proc/sys/fs/pipe-max-size), instead of 64 KiB
_READ_BYTES = 4096  # a turn of the loop: even if all of it is short lines, the loop has its turn soon
_STDOUT, _STDERR = 1, 2


def print_ready_banner(text: str) -> None:
    """Print `text` to stdout, from a thread of its own: whoever reads that may be as slow as a reader of the log, or gone."""

    def write() -> None:
        with contextlib.suppress(OSError):
            write_all(_STDOUT, text.encode())

    threading.Thread(target=write, name="greeting", daemon=True).start()


@dataclass(eq=False)
class _ChildPipe:
    """One life of a child: the reading end of its pipe."""

    name: str
    fd: int
    parser: ChildOutputParser
    flush_timer: asyncio.TimerHandle | None = None


class LogCollector:
    """Reads the pipes of children in the running event loop."""

    def __init__(self, writer: NonBlockingWriter) -> None:
        self.mark = new_mark()
        self._writer = writer
        self._pipes: set[_ChildPipe] = set()

    @contextlib.contextmanager
    def open_pipe(self, name: str) -> Iterator[int]:
        """The end of a new pipe into which the child `name` is to write; it is to inherit it before the context ends."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        with contextlib.suppress(
            OSError
        ):  # its user has too many of that size: then children keep more of it themselves
            fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        child_pipe = _ChildPipe(name, read_fd, ChildOutputParser(self.mark))
        self._pipes.add(child_pipe)
        asyncio.get_running_loop().add_reader(read_fd, self._read, child_pipe)
        try:
            yield write_fd
        finally:
            os.close(write_fd)

    def close(self) -> None:
        """Read what the children, all ended by now, have left in their pipes."""
        for child_pipe in list(self._pipes):
            while self._read(child_pipe):
                pass
            if child_pipe in self._pipes:  # a grandchild lives on, and holds its pipe open
                self._close_pipe(child_pipe)

    def _read(self, child_pipe: _ChildPipe) -> bool:
        """Take some of what there is; returns whether there may be more."""
        try:
            data = os.read(child_pipe.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(child_pipe)
            return False
        self._forward(child_pipe, child_pipe.parser.feed(data))
        if child_pipe.flush_timer is not None:
            child_pipe.flush_timer.cancel()
            child_pipe.flush_timer = None
        if child_pipe.parser.has_pending:
            child_pipe.flush_timer = asyncio.get_running_loop().call_later(_FLUSH_AFTER_S, self._flush, child_pipe)
        return True

    def _flush(self, child_pipe: _ChildPipe) -> None:
        self._forward(child_pipe, child_pipe.parser.flush())

    def _close_pipe(self, child_pipe: _ChildPipe) -> None:
        asyncio.get_running_loop().remove_reader(child_pipe.fd)
        if child_pipe.flush_timer is not None:
            child_pipe.flush_timer.cancel()
        self._forward(child_pipe, child_pipe.parser.finish())
        os.close(child_pipe.fd)
        self._pipes.discard(child_pipe)

    def _forward(self, child_pipe: _ChildPipe, outputs: Iterable[ChildOutput]) -> None:
        for output in outputs:
            self._writer.put(_output_to_line(output, child_pipe.name))


def _output_to_line(output: ChildOutput, process: str) -> Line:
    if not isinstance(output, EncodedLogLine):
        return unstructured_line(time.time(), process, output.text, is_traceback=output.is_traceback)
    try:
        line = msgspec.json.decode(output.encoded, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError):  # its process was killed while it wrote
        return unstructured_line(
            time.time(), process, output.encoded.decode(errors="backslashreplace"), is_traceback=False
        )
    return line | {"process": process}


@contextlib.contextmanager
def collecting_logs(config: Config) -> Iterator[LogCollector]:
    """Meanwhile this process logs as the supervisor, and a relay is at hand for its children; both write to stderr as `config` says."""
    writer = NonBlockingWriter(render_for(config.log_format, sys.stderr, os.environ), Stream(_STDERR), "supervisor")
    writer.start()
    try:
        with logging_to(LineHandler("supervisor", writer.put), config.log_level):
            yield LogCollector(writer)
    finally:
        writer.close()
