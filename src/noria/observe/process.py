"""Manners of a child process: it does not outlive its parent. Linux only."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(sent: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `sent` to this process when the parent *thread* that started it ends (prctl(2)).

    So start children from a thread that lives as long as they should. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sent), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
