"""Folders and files that only their owner reads: requests, results, the registry and secrets are in them."""

import contextlib
import fcntl
import logging
import os
import pathlib
import shlex
import stat
from collections.abc import Callable, Iterator

_OTHERS = 0o077  # the rights of the group and of all others

log = logging.getLogger("noria.jobs")


def make_private_folder(folder: pathlib.Path) -> None:
    """Create `folder` and its missing parents for their owner only. Raises OSError."""
    if not folder.parent.exists():
        make_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def replace_private_file(file: pathlib.Path, content: bytes) -> None:
    """Replace a file; who reads it meanwhile gets the old or the new content. Raises OSError."""
    make_private_folder(file.parent)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(new, file)


def make_own_folder(folder: pathlib.Path) -> None:
    """Create `folder` for its owner only, or check an existing one: code and models in it must belong to no other user.

    Raises OSError: it cannot be created, or other users can change what is in it.
    """
    make_private_folder(folder)
    if not _is_ours(folder.stat()):
        raise PermissionError(f"{folder} can be changed by other users")


def read_own_file(file: pathlib.Path) -> bytes:
    """Return the content of a file of code, which only root and this user may change.

    Raises OSError: it cannot be read, is no regular file, or it, its folder or that of a link to it can be changed by
    other users. In a folder with the sticky bit, such as /tmp, they cannot change what is ours.
    """
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError("it is no regular file")
        for folder in {file.absolute().parent, file.resolve().parent}:
            if not _is_ours(folder.stat(), stat.S_ISVTX):
                raise PermissionError(f"its folder {folder} can be changed by other users; {_advice(folder)}")
        if not _is_ours(status):
            raise PermissionError(
                f"it can be changed by other users; chown it to the server's user and {_advice(file)}"
            )
        return opened.read()


def _advice(path: pathlib.Path) -> str:
    return f"chmod go-w {shlex.quote(str(path))}"


def _is_ours(status: os.stat_result, allowing: int = 0) -> bool:
    """Whether only root and this user may change it; `allowing`: a bit of the mode with which others may write."""
    return status.st_uid in (0, os.geteuid()) and bool(not status.st_mode & 0o022 or status.st_mode & allowing)


def create_private_file(file: pathlib.Path) -> None:
    """Create an empty file for its owner only, unless it exists. Raises OSError."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))


def warn_if_open_to_others(folder: pathlib.Path) -> None:
    """Log a warning if an existing `folder` of data is open to others; they may be meant to read it, so it stays so."""
    mode = folder.stat().st_mode & 0o7777
    if mode & _OTHERS:
        log.warning(
            "the data folder %s has the mode %o: other users of this machine may read requests and results in it; "
            "chmod -R go= %s",
            folder,
            mode,
            shlex.quote(str(folder)),
        )


@contextlib.contextmanager
def locked_folder(folder: pathlib.Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder; the kernel releases it when this process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
