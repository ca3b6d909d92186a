"""Keeps the requests in flight in a file, from which the next process reads which ones may have caused a crash.

One small file per engine, in the server's private folder. The kernel holds what a process has written, so it survives
SIGKILL and SIGSEGV. Nothing is synced to disk, because the file is not needed after the machine restarts. While the
disk is full, requests in flight are unknown after a crash.
"""

import contextlib
import logging
import os
import pathlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from noria.observe.logs.log_record import fields

_log = logging.getLogger("noria.engine")
_LENGTH_BYTES = 4
# On a GPU the loop is up to two iterations ahead of the device, so the iteration that fails may be that long ago.
_RUN_AHEAD = 3


class CrashJournal:
    """The journal of one engine. `previous_in_flight` holds the attempts that the previous process left in the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file at `path`, or create it. Its content stays until the first request arrives."""
        self.previous_in_flight: tuple[str, ...] = read_in_flight(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._iterations: deque[frozenset[str]] = deque(maxlen=_RUN_AHEAD)
        self._preparing: set[str] = set()
        self._written: frozenset[str] | None = None
        self._is_full = self._is_paused = False
        self._lock = threading.Lock()  # used by the loop, the transport, the compiler and the mounter

    def record_iteration(self, attempt_ids: Iterable[str]) -> None:
        """Record that an iteration with these attempts is about to begin."""
        with self._lock:
            self._iterations.append(frozenset(attempt_ids))
            self._write()

    def record_in_flight(self, attempt_ids: Iterable[str]) -> None:
        """Record that these attempts are in flight, and no others: batches do not end in the order of their starts."""
        with self._lock:
            self._iterations.clear()
            self._iterations.append(frozenset(attempt_ids))
            self._write()

    @contextlib.contextmanager
    def preparing(self, attempt_id: str) -> Iterator[None]:
        """A context during which the request is in flight because it is being prepared: a compiler can crash too."""
        with self._lock:
            self._preparing.add(attempt_id)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                # Written with the next change: an extra id does no harm.
                self._preparing.discard(attempt_id)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context during which the file lists no request, because what is done in it is likelier to crash the engine.

        Requests lost in such a crash count as `not_at_fault`: they are retried with others. One that does crash the
        engine does so again, and is found then.
        """
        self._set_paused(is_paused=True)
        try:
            yield
        finally:
            self._set_paused(is_paused=False)

    def _set_paused(self, *, is_paused: bool) -> None:
        with self._lock:
            self._is_paused = is_paused
            self._write()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self) -> None:
        in_flight = self._preparing.union(*self._iterations)
        attempt_ids = frozenset[str]() if self._is_paused else frozenset(in_flight)
        if attempt_ids != self._written:
            self._written = attempt_ids
            text = msgspec.json.encode(sorted(attempt_ids))
            try:
                os.pwrite(self._file, len(text).to_bytes(_LENGTH_BYTES, "little") + text, 0)
            except OSError as error:
                if not self._is_full:
                    message = "the requests in flight cannot be written: %s"
                    _log.warning(message, error, extra=fields(event="crash_journal_not_written"))
                self._is_full = True


def read_in_flight(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The attempts in flight when the file at `path` was last written; empty if it is missing or unreadable.

    SIGKILL can interrupt a write longer than a page, which leaves a new head with an old tail.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        return ()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        return tuple(msgspec.json.decode(content[_LENGTH_BYTES:][:length], type=list[str])) if length else ()
    except (msgspec.DecodeError, UnicodeDecodeError):
        _log.warning("%s was written only in part: the requests in flight are unknown", path)
        return ()
