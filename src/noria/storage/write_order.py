"""The order of the writers of a SQLite file, in all processes of this machine: those that yield come after all others.

SQLite has one writer at a time and no queue: those that wait ask again after growing pauses, so a loop of writers holds
up the others for as long as it likes. Here at most one writer that yields writes or asks, and it begins when no other
does. So the others wait for one transaction of such a writer at most.
"""

import contextlib
import fcntl
import os
import pathlib
import threading
from collections.abc import Iterator

from noria.storage.private_files import create_private_file

_TIMEOUT_S = 20.0  # as long as SQLite itself waits for a writer
_MAX_WAITING = 16  # threads that wait for locks, of a process: those of calls that gave up wait on

_may_wait = threading.BoundedSemaphore(_MAX_WAITING)


class WriteOrder:
    """The order of the writers of one file, by locks on two files beside it, which the kernel drops with a process."""

    def __init__(self, database: pathlib.Path) -> None:
        """Create the files. Raises OSError."""
        self._others, self._yielding = (
            database.with_name(f"{database.name}-{name}") for name in ("writers", "yielding-writers")
        )
        for file in (self._others, self._yielding):
            create_private_file(file)

    @contextlib.contextmanager
    def turn(self, *, yields: bool) -> Iterator[None]:
        """Hold a turn to write; one that yields begins when no other is wanted.

        Raises OSError: also TimeoutError, if others, such as a process that is stopped, leave no turn for 20 s.
        """
        if not yields:
            with _locked(self._others, fcntl.LOCK_SH):
                yield
            return
        with _locked(self._yielding, fcntl.LOCK_EX):
            with _locked(self._others, fcntl.LOCK_EX):
                pass
            yield


@contextlib.contextmanager
def _locked(file: pathlib.Path, kind: int) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _wait_for_lock(descriptor, kind):
                raise TimeoutError(
                    f"another process, perhaps a stopped one, keeps {file} locked; `lslocks` names it"
                ) from None
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, kind: int) -> bool:
    """Wait for a lock, at most for `_TIMEOUT_S`; returns whether it is held.

    Only for calls that block the kernel keeps an order. Those that ask again and again find none of the short pauses
    of a loop of writers. So a thread blocks, which this call does not wait for longer than that.
    """
    if not _may_wait.acquire(timeout=_TIMEOUT_S):
        return False
    own_descriptor = os.dup(descriptor)  # a descriptor of the same lock, so that it ends with both

    def wait() -> None:
        try:
            fcntl.flock(own_descriptor, kind)
        finally:
            os.close(own_descriptor)
            _may_wait.release()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return not thread.is_alive()
