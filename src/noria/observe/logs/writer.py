"""Lines on their way out of a process, in the order in which they were said; nobody who logs ever waits for who reads.

An `Outlet` is a thread behind a bounded queue. Who reads too slowly loses lines, and is told how many. Where they go is a `Sink`: the
server's stderr may stand still for as long as it likes, so only the thread writes there; the pipe to the supervisor has room nearly
always, and a line that is in it outlives its process, so whoever logs writes there itself as long as there is room.
"""

import errno
import fcntl
import os
import select
import struct
import termios
import threading
import time
from collections import deque
from typing import Protocol

from noria.observe.logs.log_record import Line, Render, make_line

MAX_BUFFERED_BYTES = 8 * 1024 * 1024
FLUSH_TIMEOUT_S = 2.0  # at the end, for a reader that is slow
_MAX_LINES_PER_WRITE = 64  # lines of one write
_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})  # a disk, which somebody will empty
_RETRY_INTERVAL_S = 0.5
_POLL_INTERVAL_MS = 5  # nothing tells when a pipe is emptied to a certain mark, so one looks


class Sink(Protocol):
    """Where lines go."""

    def try_write(self, data: bytes) -> bool:
        """Write all of `data` if nobody has to be waited for, else nothing; returns which."""

    def write(self, data: bytes) -> None:
        """Write `data`, however long that takes. Raises OSError where nobody can read it any more, or the disk is full."""


class Stream:
    """A terminal, a file, a pipe to who knows whom."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def try_write(self, data: bytes) -> bool:  # noqa: ARG002 - whatever it is
        """Nothing says how long a write will take."""
        return False

    def write(self, data: bytes) -> None:
        """Write it."""
        write_all(self._fd, data)


class SharedPipe:
    """The pipe that is this process's stdout and stderr; the other end is the supervisor's.

    Lines fill a quarter of it. A page of a pipe stays half empty at worst, where the next write did not fit, so a quarter takes half of
    the pages; the other half is for what is printed past the log (a library's message, a crash dump), whose writers would wait.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._share_bytes = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) // 4
        self._hangup_poll = select.poll()
        self._hangup_poll.register(fd, 0)  # of itself it tells only that the other end is closed

    def try_write(self, data: bytes) -> bool:
        """Write it if it is within the share."""
        try:
            return len(data) <= self._free_bytes() and os.write(self._fd, data) == len(data)
        except (BrokenPipeError, BlockingIOError):  # the thread will see for itself
            return False

    def write(self, data: bytes) -> None:
        """Write it as room appears."""
        remaining = memoryview(data)
        while remaining:
            if free_bytes := self._free_bytes():
                write_all(self._fd, remaining[:free_bytes])
                remaining = remaining[free_bytes:]
            elif self._hangup_poll.poll(_POLL_INTERVAL_MS):
                raise BrokenPipeError(errno.EPIPE, "the supervisor is gone")

    def _free_bytes(self) -> int:
        (unread_bytes,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0" * 4))
        return max(0, self._share_bytes - int(unread_bytes))


class NonBlockingWriter(threading.Thread):
    """Writes what is `put` to `sink`; `process` is who tells what was lost."""

    def __init__(self, render: Render, sink: Sink, process: str, max_buffered_bytes: int = MAX_BUFFERED_BYTES) -> None:
        super().__init__(name="outlet", daemon=True)  # a terminal that stands still must not keep the process
        self._render, self._sink, self._process = render, sink, process
        self._max_buffered_bytes = max_buffered_bytes
        self._buffered: deque[bytes] = deque()
        self._buffered_bytes = self._num_lost = 0
        self._num_in_write = 0  # lines that are lost if what was taken last cannot be written
        self._closed = False
        self._changed = threading.Condition()

    def put(self, line: Line) -> None:
        """Have `line` written; never waits. It is counted as lost where too many wait already."""
        rendered = self._render(line) + b"\n"
        with self._changed:
            if self._is_empty and self._sink.try_write(rendered):
                return
            if self._buffered_bytes + len(rendered) > self._max_buffered_bytes:
                self._num_lost += 1
                return
            self._buffered.append(rendered)
            self._buffered_bytes += len(rendered)
            self._changed.notify_all()

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until all is written that was put, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_empty or self._closed, timeout_s)

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write what waits, for so long at most; nothing may be put any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.join(timeout_s)

    def run(self) -> None:
        """Write until `close`, or until nobody can read any more; lines for a disk that is full are lost, and counted."""
        while batch := self._next_batch():
            try:
                self._sink.write(b"".join(batch))
            except OSError as error:
                if error.errno not in _DISK_FULL_ERRNOS:  # the terminal or the pipe is gone: nobody is left to be told
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
        """The next lines; none: it is closed, and all is written."""
        with self._changed:
            self._num_in_write = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._buffered or self._num_lost or self._closed)
            batch = [self._buffered.popleft() for _ in range(min(len(self._buffered), _MAX_LINES_PER_WRITE))]
            self._buffered_bytes -= sum(map(len, batch))
            num_lost = 0
            if not self._buffered:  # else they are missing further on
                num_lost, self._num_lost = self._num_lost, 0
            self._num_in_write = len(batch) + num_lost
        if num_lost:
            message = (
                f"{num_lost} lines of the log were lost here: they could not be written, or not as fast as they came"
            )
            loss_line = make_line(time.time(), "warning", "noria.log_collector", self._process, message) | {
                "lost": num_lost
            }
            batch.append(self._render(loss_line) + b"\n")
        return batch


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, also where another program has made the terminal non-blocking."""
    remaining = memoryview(data)
    while remaining:
        try:
            remaining = remaining[os.write(fd, remaining) :]
        except BlockingIOError:
            select.select([], [fd], [])
