"""The server's private folder, with sockets and metrics, in the temporary folder; and those that killed servers left.

A lock on a file in the folder is held as long as the supervisor lives, so a folder whose lock is free is a leftover.
Cleaners of temporary files are kept away: systemd-tmpfiles leaves a folder that is itself locked, others leave what is
young. A folder that is removed all the same cannot be made again, since each process has its files in it open.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence

from noria.errors import ConfigError

# The longest path of a Unix socket: sun_path of unix(7) without the terminating zero.
MAX_ADDRESS_BYTES = 107
_PREFIX, _LOCK_NAME = "noria-", "supervisor.lock"


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """Yield a new folder with mode 0700, which is removed at the end; first remove those of dead supervisors.

    Raises ConfigError: nothing can be written to the temporary folder.
    """
    try:
        _remove_leftovers(pathlib.Path(tempfile.gettempdir()))
        folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        lock = _take_lock(pathlib.Path(folder.name))
        folder_lock = _Lock(pathlib.Path(folder.name), os.O_DIRECTORY | os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"the temporary folder cannot be used: {error}. Give it space, or set the environment variable TMPDIR."
        ) from error
    with folder, contextlib.closing(lock), contextlib.closing(folder_lock):
        yield folder.name


def removed_path(folder: str, sockets: Sequence[str]) -> str | None:
    """Return what was removed of the folder: itself, its oldest file, or one of `sockets` in it; None: nothing."""
    paths = (folder, f"{folder}/{_LOCK_NAME}", *sockets)
    return next((path for path in paths if not os.path.lexists(path)), None)


def make_young(folder: str) -> None:
    """Set the times of the folder and all in it to now: cleaners remove what is older than some days."""
    for path in (pathlib.Path(folder), *pathlib.Path(folder).glob("*")):
        with contextlib.suppress(OSError):  # it has just been removed
            os.utime(path)


def _take_lock(folder: pathlib.Path) -> "_Lock":
    """Return the held lock of a new folder; its file is named once it is locked, so that none is taken for free."""
    draft = folder / f"{_LOCK_NAME}.draft"
    lock = _Lock(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    draft.rename(folder / _LOCK_NAME)
    return lock


def _remove_leftovers(parent: pathlib.Path) -> None:
    """Remove the folders of this user in `parent` whose lock is free. Others, and those without a lock, stay."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, of another user, or removed by another supervisor
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                with contextlib.closing(_Lock(folder / _LOCK_NAME, os.O_RDWR)):
                    shutil.rmtree(folder, ignore_errors=True)


class _Lock:
    """A lock of a file or folder, held until `close` or the end of the process."""

    def __init__(self, path: pathlib.Path, flags: int) -> None:
        """Raises OSError, BlockingIOError if another process holds it."""
        self._fd = os.open(path, os.O_NOFOLLOW | flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def check_address_lengths(addresses: list[str]) -> None:
    """Raise ConfigError if the temporary directory makes socket paths too long; ZeroMQ's own error names no file."""
    longest = max((os.fsencode(address.removeprefix("ipc://")) for address in addresses), key=len)
    if len(longest) > MAX_ADDRESS_BYTES:
        raise ConfigError(
            f"the path of the engines' sockets, such as {os.fsdecode(longest)!r}, has {len(longest)} bytes; "
            f"the system allows {MAX_ADDRESS_BYTES}. Set the environment variable TMPDIR to a shorter path."
        )
