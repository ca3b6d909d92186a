"""Collects the log lines of all processes in the supervisor: reads its children's pipes and writes to its stderr.

Each run of a child writes stdout and stderr to one pipe of its own, so its lines keep their order, and what it wrote
before it was killed can still be read. The lines go to a `NonBlockingWriter`, a thread with a bounded queue. If stderr
is read too slowly, lines are lost and counted in the log; neither the supervisor's event loop nor a child, which has
such a writer of its own, ever waits for it.
"""

import asyncio
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from noria.config import Config
from noria.observe.logs.child_output import ChildOutput, ChildOutputParser, EncodedLogLine
from noria.observe.logs.log_record import Line, unstructured_line
from noria.observe.logs.setup import LineHandler, logging_to, new_mark, render_for
from noria.observe.logs.writer import NonBlockingWriter, Stream

# The most that Linux allows every user (/proc/sys/fs/pipe-max-size), instead of 64 KiB.
_PIPE_BYTES = 1024 * 1024
# Read in one pass of the event loop: small, so that even short lines do not block the loop for long.
_READ_BYTES = 4096
_STDERR = 2


@dataclass(eq=False)
class _ChildPipe:
    """The read end of the pipe of one run of a child."""

    name: str
    fd: int
    parser: ChildOutputParser
    flush_timer: asyncio.TimerHandle | None = None


class LogCollector:
    """Reads the pipes of the children in the running event loop."""

    def __init__(self, writer: NonBlockingWriter, flush_after_s: float = 0.5) -> None:
        """`flush_after_s` is how long a pause in a traceback, or in a printed line without its end, may last."""
        self.mark = new_mark()
        self.given_up: tuple[str | None, str] | None = None  # the child because of which the server ends, and why
        self._last_errors: dict[str, str] = {}  # messages, by process
        self._writer, self._flush_after_s = writer, flush_after_s
        self._pipes: set[_ChildPipe] = set()

    @contextlib.contextmanager
    def open_pipe(self, name: str) -> Iterator[int]:
        """Yield the write end of a new pipe for the child `name`, which must inherit it before the context ends."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        # OSError: the user's limit of pipe memory is reached. Then children buffer more themselves.
        with contextlib.suppress(OSError):
            fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        child_pipe = _ChildPipe(name, read_fd, ChildOutputParser(self.mark))
        self._pipes.add(child_pipe)
        asyncio.get_running_loop().add_reader(read_fd, self._read, child_pipe)
        try:
            yield write_fd
        finally:
            os.close(write_fd)

    @property
    def failure(self) -> str:
        """Why the server ended by itself, once the pipes are closed; empty if it did not."""
        if self.given_up is None:
            return ""
        name, reason = self.given_up
        if name is None:
            return reason
        return self._last_errors.get(name) or f"{name} was given up: {reason}. The log above may say why."

    def close(self) -> None:
        """Read what is left in the pipes. All children must have ended."""
        for child_pipe in list(self._pipes):
            while self._read(child_pipe):
                pass
            if child_pipe in self._pipes:  # a grandchild still runs and holds the pipe open
                self._close_pipe(child_pipe)

    def _read(self, child_pipe: _ChildPipe) -> bool:
        """Read up to `_READ_BYTES`; return whether there may be more."""
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
            loop = asyncio.get_running_loop()
            child_pipe.flush_timer = loop.call_later(self._flush_after_s, self._flush, child_pipe)
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
        lines = [_output_to_line(output, child_pipe.name) for output in outputs]
        for line in lines:
            if line["level"] in ("error", "critical"):
                self._last_errors[child_pipe.name] = str(line["message"])
        self._writer.put_all(lines)


def _output_to_line(output: ChildOutput, process: str) -> Line:
    if not isinstance(output, EncodedLogLine):
        return unstructured_line(time.time(), process, output.text, is_traceback=output.is_traceback)
    try:
        line = msgspec.json.decode(output.encoded, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError):  # the process was killed while writing
        return unstructured_line(
            time.time(), process, output.encoded.decode(errors="backslashreplace"), is_traceback=False
        )
    return line | {"process": process}


@contextlib.contextmanager
def collecting_logs(config: Config) -> Iterator[LogCollector]:
    """In this context the process logs as the supervisor.

    Yields the collector for its children; both write to stderr.
    """
    writer = NonBlockingWriter(render_for(config.log_format, sys.stderr, os.environ), Stream(_STDERR), "supervisor")
    writer.start()
    try:
        with logging_to(LineHandler("supervisor", writer.put), config.log_level):
            yield LogCollector(writer)
    finally:
        writer.close()
