"""Manners of a child process: it does not outlive its parent. Linux only."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(sent: signal.Signals = signal.SIGTERM, parent_pid: int | None = None) -> None:
    """Have the kernel send `sent` to this process when the parent *thread* that started it ends (prctl(2)).

    So start children from a thread that lives as long as they should. A parent that has ended before this call is noticed only
    where `parent_pid`, its process id, is given: then `sent` comes at once. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sent), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), sent)
