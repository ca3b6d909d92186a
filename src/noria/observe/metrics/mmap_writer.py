"""Writes a process's values into a file, with prometheus_client's code but without its crash on a full disk.

prometheus_client maps a sparse file: writing into a page for which there is no space kills the process (SIGBUS). Here
space is allocated first. A value that finds none is not written, and is tried again when it changes, so it is missing
from `/metrics` until there is space; then it is complete.
"""

import contextlib
import inspect
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from noria.observe.logs.log_record import fields
from noria.observe.metrics.mmap_format import HEADER_BYTES, entry_bytes

_log = logging.getLogger("noria.metrics")
_INITIAL_BYTES = 64 * 1024  # as prometheus_client
BYTES_PER_PROCESS = 2**20
"""Four files of 64 KiB, of which two may double twice: routes, models, outcomes and shapes are bounded."""


class AllocatedMmapDict(MmapedDict):
    """prometheus_client's dict of values in a file, all of whose pages are allocated. Not thread-safe."""

    _has_logged = False

    def __init__(self, filename: str) -> None:
        """Open the file at its first value; a file of an ended process with this process id is continued."""
        self._fname = filename
        self._positions: dict[str, int] = {}
        self._doubles = memoryview(b"").cast("d")  # the mapped file's
        self._capacity, self._used = 0, HEADER_BYTES
        if os.path.exists(filename) and os.path.getsize(filename):
            super().__init__(filename)  # type: ignore[no-untyped-call]
            self._doubles = memoryview(self._m).cast("d")

    def read_value(self, key: str) -> tuple[float, float]:
        """Return the value and its time; 0 and 0 for a new one, also if there is no space for it."""
        if not self._has_space(key):
            return 0.0, 0.0
        value: tuple[float, float] = super().read_value(key)  # type: ignore[no-untyped-call]
        return value

    def write_value(self, key: str, value: float, _timestamp: float) -> None:
        """Write the value if there is space for it; without its time, which no gauge's mode needs."""
        if self._has_space(key):
            if key not in self._positions:
                self._init_value(key)  # type: ignore[no-untyped-call]
            self._doubles[self._positions[key] // 8] = value  # in one step: readers see the old or the new one

    def close(self) -> None:
        """Close the file, if it is open."""
        self._doubles.release()
        if self._capacity:
            super().close()  # type: ignore[no-untyped-call]

    def _has_space(self, key: str) -> bool:
        """Allocate space for a new key; False if that fails, which is logged once in a process."""
        if key in self._positions:
            return True
        try:
            while self._used + entry_bytes(len(key.encode())) > self._capacity:
                self._grow(max(_INITIAL_BYTES, 2 * self._capacity))
        except OSError as error:
            if not AllocatedMmapDict._has_logged:
                AllocatedMmapDict._has_logged = True
                message = "%s cannot be allocated (%s): /metrics lacks values of this process until there is space"
                _log.warning(message, self._fname, error.strerror, extra=fields(event="metrics_not_written"))
            return False
        return True

    def _grow(self, capacity: int) -> None:
        file = self._f if self._capacity else open(self._fname, "a+b")  # noqa: SIM115 - prometheus_client closes it
        try:
            os.posix_fallocate(file.fileno(), 0, capacity)
        except OSError:
            if not self._capacity:
                file.close()
            raise
        self._f, self._capacity = file, capacity
        self._m = mmap.mmap(file.fileno(), capacity)
        self._doubles = memoryview(self._m).cast("d")
        self._m[:4] = struct.pack("i", self._used)


def has_space(folder: str, num_processes: int) -> bool:
    """Whether the files of `num_processes` could be allocated in `folder` now."""
    path = os.path.join(folder, "space.draft")
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_processes * BYTES_PER_PROCESS)
    except OSError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return True


def write_allocated_files() -> Callable[[Iterable[tuple[Any, float]]], None]:
    """Make prometheus_client write its files with `AllocatedMmapDict`; call it before the first metric is made.

    Returns what adds amounts to values.
    """
    values.MmapedDict = AllocatedMmapDict  # type: ignore[attr-defined,assignment]
    lock = None
    if values.ValueClass._multiprocess:
        lock = inspect.getclosurevars(values.ValueClass.inc).nonlocals.get("lock")
    if lock is None:  # values in this process only; or a later prometheus_client, which may have none
        return _add_each
    return _add_without_looking_for_forks(lock)


def _add_each(changes: Iterable[tuple[Any, float]]) -> None:
    for value, amount in changes:
        value.inc(amount)


def _add_without_looking_for_forks(lock: Any) -> Callable[[Iterable[tuple[Any, float]]], None]:
    def add(changes: Iterable[tuple[Any, float]]) -> None:
        """Add amounts. prometheus_client's own asks for the process id each time; no process of ours forks."""
        with lock:
            for value, amount in changes:
                total = value._value = value._value + amount
                try:
                    value._file._doubles[value._place] = total
                except AttributeError:  # its first change, or it had no space before
                    file, key = value._file, value._key
                    file.write_value(key, total, 0.0)
                    if key in file._positions:
                        value._place = file._positions[key] // 8

    return add
