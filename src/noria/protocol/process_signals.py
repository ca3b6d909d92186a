"""Process lifetimes by prctl(2) and signals: end with the parent, adopt orphans, treat SIGTERM as an interrupt.

Linux only.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: signal.Signals = signal.SIGTERM, parent_pid: int | None = None) -> None:
    """Make the kernel send `signum` to this process when the parent *thread* that started it ends (prctl(2)).

    So a child must be started from a thread that lives as long as it should. If `parent_pid`, the expected parent's
    process id, is given and that process has already ended, the signal is sent at once. Raises OSError if the kernel
    refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose parent ends. Children do not inherit this."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt, like Ctrl-C. Main thread only."""
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
