"""Who is aboard, written where it outlives the process: so that after a crash it is known which requests may be guilty of it.

One small file an engine, in the server's private folder. What a process has written is the kernel's, so it is there after SIGKILL and
SIGSEGV alike; nothing is synced, for nobody asks after the machine has ended.
"""

import contextlib
import logging
import os
import pathlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

_log = logging.getLogger("noria.engine")
_LENGTH_BYTES = 4
_RUN_AHEAD = 3  # turns: on a GPU the wheel is two ahead of the device, so the turn that fails may be that long ago


class CrashJournal:
    """One engine's. `before` is what the life before this one left."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file at `path`, which need not exist yet. It is not touched before the first request is."""
        self.previous_in_flight: tuple[str, ...] = read_in_flight(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._iterations: deque[frozenset[str]] = deque(maxlen=_RUN_AHEAD)
        self._preparing: set[str] = set()
        self._written: frozenset[str] | None = None
        self._lock = threading.Lock()  # the wheel, the desk and the compiler

    def record_iteration(self, request_ids: Iterable[str]) -> None:
        """A turn with these requests is about to begin."""
        with self._lock:
            self._iterations.append(frozenset(request_ids))
            self._write()

    @contextlib.contextmanager
    def preparing(self, request_id: str) -> Iterator[None]:
        """Inside, this request is being prepared: compilers crash, too."""
        with self._lock:
            self._preparing.add(request_id)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._preparing.discard(
                    request_id
                )  # it is written at the next occasion: one name too many harms nobody

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self) -> None:
        request_ids = frozenset(self._preparing.union(*self._iterations))
        if request_ids != self._written:
            self._written = request_ids
            text = msgspec.json.encode(sorted(request_ids))
            os.pwrite(self._file, len(text).to_bytes(_LENGTH_BYTES, "little") + text, 0)


def read_in_flight(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The requests that were aboard when the file at `path` was last written; none where there is no file, or nothing to be read.

    SIGKILL can cut a write that is longer than a page, so that the file has its new head and its old tail.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        return ()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        return tuple(msgspec.json.decode(content[_LENGTH_BYTES:][:length], type=list[str])) if length else ()
    except (msgspec.DecodeError, UnicodeDecodeError):
        _log.warning("%s was cut while it was written: nobody knows who was aboard", path)
        return ()
