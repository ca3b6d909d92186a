"""Says whether a server follows a registry in SQLite: its registrar holds a lock on a file beside it until it ends."""

import contextlib
import fcntl
import os
import pathlib

from sqlalchemy.engine.url import URL

_held: list[int] = []
"""Descriptors that this process keeps open: the kernel releases their locks when it ends, however that is."""


def watch(url: URL) -> None:
    """Say of this process, until it ends, that it follows the registry; of one in PostgreSQL nothing is said."""
    if url.drivername == "sqlite":
        with contextlib.suppress(OSError):  # nothing depends on it but messages
            descriptor = os.open(_lock_file(url), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _held.append(descriptor)


def is_watched(url: URL) -> bool | None:
    """Whether a server of this machine follows the registry; None: it cannot be told."""
    if url.drivername != "sqlite":
        return None
    try:
        descriptor = os.open(_lock_file(url), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock_file(url: URL) -> pathlib.Path:
    return pathlib.Path(f"{url.database}.watched")
