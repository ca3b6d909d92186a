"""Writes log lines in order, without ever blocking the code that logs.

A `NonBlockingWriter` is a thread with a bounded queue. When the reader is too slow, lines are lost and their number is
logged. Lines go to a `Sink`: the server's stderr may block for any time, so only the thread writes there; the pipe to
the supervisor nearly always has room, and a line in it outlives its process, so the logging code writes there directly
while there is room. The lines of requests that end in an event loop within some milliseconds are written together: each
write wakes the reader. A process that is killed before loses them, as does one whose loop is blocked meanwhile.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from noria.observe.logs.log_record import Line, Render, line_of

MAX_BUFFERED_BYTES = 8 * 1024 * 1024
FLUSH_TIMEOUT_S = 2.0  # at the end of the process, for a slow reader
_MAX_LINES_PER_WRITE = 64
# Errors that may pass; after any other the sink is gone.
_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_RETRY_INTERVAL_S = 0.5
# Lines of requests that have ended. Any other may be the last of a process, and say what it was doing.
_GATHERED_LOGGERS, _GATHERED_LEVELS = frozenset({"noria.requests", "noria.access"}), frozenset({"debug", "info"})
_GATHER_S = 0.005  # these lines wait for others, so that a busy process writes once for many
_POLL_INTERVAL_MS = 5  # there is no event for "a pipe has this much room"


class Sink(Protocol):
    """The destination of the lines."""

    def try_write(self, data: bytes) -> bool:
        """Write all of `data` if that cannot block, else nothing; return whether it was written."""

    def write(self, data: bytes) -> None:
        """Write `data`, blocking as long as needed. Raises OSError if the reader is gone or the disk is full."""


class Stream:
    """A terminal, a file, or a pipe to any program."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def try_write(self, data: bytes) -> bool:  # noqa: ARG002
        """Return False: a write to it may always block."""
        return False

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        write_all(self._fd, data)


class SharedPipe:
    """The pipe to the supervisor, which is this process's stdout and stderr.

    Log lines fill at most a quarter of its bytes. A page of a pipe may stay half empty, where the next write did not
    fit, so a quarter of the bytes takes at most half of the pages. The other half is left for output that bypasses the
    log (a library's message, a crash dump), whose writers would block.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._share_bytes = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) // 4
        self._hangup_poll = select.poll()
        self._hangup_poll.register(fd, 0)  # with no events: it reports only that the other end is closed

    def try_write(self, data: bytes) -> bool:
        """Write `data` if it fits into the share for log lines."""
        try:
            return len(data) <= self._free_bytes() and os.write(self._fd, data) == len(data)
        except (BrokenPipeError, BlockingIOError):  # the thread handles it
            return False

    def write(self, data: bytes) -> None:
        """Write `data` as room appears."""
        remaining = memoryview(data)
        while remaining:
            if free_bytes := self._free_bytes():
                write_all(self._fd, remaining[:free_bytes])
                remaining = remaining[free_bytes:]
            elif self._hangup_poll.poll(_POLL_INTERVAL_MS):
                raise BrokenPipeError(errno.EPIPE, "the supervisor has ended")

    def _free_bytes(self) -> int:
        (unread_bytes,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0" * 4))
        return max(0, self._share_bytes - int(unread_bytes))


class NonBlockingWriter(threading.Thread):
    """Writes the lines given to `put` to `sink`; `process` is the process name in the line that reports losses."""

    def __init__(self, render: Render, sink: Sink, process: str, max_buffered_bytes: int = MAX_BUFFERED_BYTES) -> None:
        # A daemon: a blocked terminal must not keep the process from ending.
        super().__init__(name="log writer", daemon=True)
        self._render, self._sink, self._process = render, sink, process
        self._max_buffered_bytes = max_buffered_bytes
        self._buffered: deque[bytes] = deque()
        self._buffered_bytes = self._num_lost = 0
        self._num_in_write = 0  # lines in the current write, including the lost ones that it reports
        self._closed = False
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None  # id of the thread of `_loop`
        self._gathered: list[bytes] = []
        self._gather_timer: asyncio.TimerHandle | None = None  # while lines are gathered

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """In this context, lines of requests that the running event loop puts are written together, some ms later."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        try:
            yield
        finally:
            self._loop_thread = None
            self._write_gathered()

    def put(self, line: Line) -> None:
        """Queue `line`; never blocks. The line is lost and counted if the queue is full."""
        rendered = self._render(line) + b"\n"
        if threading.get_ident() != self._loop_thread:
            self._queue([rendered])
            return
        self._gathered.append(rendered)
        is_gathered = line["logger"] in _GATHERED_LOGGERS and line["level"] in _GATHERED_LEVELS
        if not is_gathered or len(self._gathered) == _MAX_LINES_PER_WRITE:
            self._write_gathered()
        elif len(self._gathered) == 1:
            assert self._loop is not None
            self._gather_timer = self._loop.call_later(_GATHER_S, self._write_gathered)

    def put_all(self, lines: Iterable[Line]) -> None:
        """Queue lines together, as `put` does one."""
        self._queue([self._render(line) + b"\n" for line in lines])

    def _queue(self, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        with self._changed:
            if self._is_empty and self._sink.try_write(lines[0] if len(lines) == 1 else b"".join(lines)):
                return
            for line in lines:
                if self._buffered_bytes + len(line) > self._max_buffered_bytes:
                    self._num_lost += 1
                else:
                    self._buffered.append(line)
                    self._buffered_bytes += len(line)
            self._changed.notify_all()

    def _write_gathered(self) -> None:
        if self._gather_timer is not None:
            self._gather_timer.cancel()
            self._gather_timer = None
        gathered, self._gathered = self._gathered, []
        self._queue(gathered)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until all queued lines are written, for at most `timeout_s`."""
        if threading.get_ident() == self._loop_thread:
            self._write_gathered()
        with self._changed:
            self._changed.wait_for(lambda: self._is_empty or self._closed, timeout_s)

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write the queued lines, for at most `timeout_s`; `put` must not be called any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.join(timeout_s)

    def run(self) -> None:
        """Write until `close`, or until the reader is gone. Lines for a full disk are lost and counted."""
        while batch := self._next_batch():
            try:
                self._sink.write(b"".join(batch))
            except OSError as error:
                if error.errno not in _DISK_FULL_ERRNOS:  # the terminal or the pipe is gone
                    with self._changed:
                        self._closed, self._max_buffered_bytes = True, 0
                        self._buffered.clear()
                        self._changed.notify_all()
                    return
                with self._changed:
                    self._num_lost += self._num_in_write
                    if self._closed:
                        return
                time.sleep(_RETRY_INTERVAL_S)

    @property
    def _is_empty(self) -> bool:
        return not (self._buffered or self._num_in_write or self._num_lost)

    def _next_batch(self) -> list[bytes]:
        """Wait for the next lines and return them; none if the writer is closed and all is written."""
        with self._changed:
            self._num_in_write = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._buffered or self._num_lost or self._closed)
            batch = [self._buffered.popleft() for _ in range(min(len(self._buffered), _MAX_LINES_PER_WRITE))]
            self._buffered_bytes -= sum(map(len, batch))
            num_lost = 0
            if not self._buffered:  # else the lost lines came after those still in the queue
                num_lost, self._num_lost = self._num_lost, 0
            self._num_in_write = len(batch) + num_lost
        if num_lost:
            message = f"{num_lost} log lines were lost here: they could not be written, or not as fast as they came"
            loss_line = line_of(time.time(), "warning", "noria.log_collector", self._process, message) | {
                "num_lost": num_lost
            }
            batch.append(self._render(loss_line) + b"\n")
        return batch


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, even if another program has made the terminal non-blocking."""
    remaining = memoryview(data)
    while remaining:
        try:
            remaining = remaining[os.write(fd, remaining) :]
        except BlockingIOError:
            select.select([], [fd], [])
