"""Manners of processes: how they end, that a child does not outlive its parent, and who takes in orphans. Linux only."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: signal.Signals = signal.SIGTERM, parent_pid: int | None = None) -> None:
    """Have the kernel send `sent` to this process when the parent *thread* that started it ends (prctl(2)).

    So start children from a thread that lives as long as they should. A parent that has ended before this call is noticed only
    where `parent_pid`, its process id, is given: then `sent` comes at once. Raises OSError where the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes this process's child, not init's; not inherited by children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is Ctrl-C meanwhile, so that what was begun is ended and kept in the same way. In the main thread only."""
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
