"""Reaps what a process adopts as the init of a container: processes whose parents ended before them."""

import contextlib
import os
import pathlib
from collections.abc import Collection


class OrphanReaper:
    """Reaps ended children of this process that it did not start."""

    def __init__(self) -> None:
        self._ended: set[int] = set()  # at the last call

    def reap(self, own: Collection[int | None]) -> None:
        """Reap those that had ended at the last call, too, except `own` and children that have just been started."""
        ended = {pid for pid in _children() if pid not in own and _is_zombie(pid)}
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _children() -> list[int]:
    with contextlib.suppress(OSError):  # a thread has just ended, or the kernel has no such file
        files = pathlib.Path("/proc/self/task").glob("*/children")
        return [int(pid) for file in files for pid in file.read_text().split()]
    return []


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    return False
