"""Reaps what a process adopts as the init of a container: processes whose parents ended before them."""

import contextlib
import os
from collections.abc import Collection

import psutil

from noria.observe.child_processes import child_processes


class OrphanReaper:
    """Reaps ended children of this process that it did not start."""

    def __init__(self) -> None:
        self._ended: set[int] = set()  # at the last call

    def reap(self, own: Collection[int | None]) -> None:
        """Reap those that had ended at the last call, too, except `own` and children that have just been started."""
        ended = {child.pid for child in child_processes(psutil.Process()) if child.pid not in own and _is_zombie(child)}
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # another call has reaped it
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False
