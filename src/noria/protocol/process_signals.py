"""Process lifetimes by prctl(2) and signals: end with the parent or by its order, adopt orphans, interrupt on SIGTERM.

Service managers, process groups and terminals send SIGTERM, SIGINT and SIGHUP to all processes of a server at once.
Only the supervisor obeys them. It orders the end of each child with a signal of its own, `STOP_SIGNAL`, when that child
has nothing left to do. Linux only.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNAL = signal.SIGRTMIN
"""The supervisor's order to a child to end. No service manager sends it, and without a handler it ends a process."""

# One order to stop may come as two signals: timeout(1) sends it to its child and to its group, wrappers forward what
# they and the server get, systemd adds a SIGHUP. Nobody decides within this time that a drain takes too long.
SAME_ORDER_S = 1.0

_SIGNALS_OF_SUPERVISOR = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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


@contextlib.contextmanager
def blocking_signals() -> Iterator[None]:
    """A context in which SIGTERM, SIGINT and SIGHUP wait, for this thread and for processes that it starts.

    A process that is started here must call `leave_signals_to_supervisor`; until then it would end by them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_SUPERVISOR)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS_OF_SUPERVISOR)


def ignore_signals_until_exit(remove_handler: Callable[[int], object]) -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP, which an event loop handled: this process ends, and its status is decided.

    Main thread only. `remove_handler` is the loop's, which at its end would leave the default action behind.
    """
    for signum in _SIGNALS_OF_SUPERVISOR:
        remove_handler(signum)
        signal.signal(signum, signal.SIG_IGN)


def leave_signals_to_supervisor() -> None:
    """Make SIGTERM, SIGINT and SIGHUP do nothing in this process. Main thread only.

    Processes that it starts obey them, since handlers, unlike SIG_IGN, end with exec(2).
    """
    for signum in _SIGNALS_OF_SUPERVISOR:
        if signal.getsignal(signum) != signal.SIG_IGN:
            # Without siginterrupt: a call that SIGTERM restarts would hide a `STOP_SIGNAL` that comes with it.
            signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS_OF_SUPERVISOR)


def end_by_signals_as_init() -> None:
    """Let SIGTERM and SIGHUP end this process at once, until it handles them, if it is PID 1. Main thread only.

    The kernel ignores a signal without a handler for the init of a container; for others it does the same as this.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if os.getpid() == 1 and signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, lambda number, _frame: os._exit(128 + number))


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose parent ends. Children do not inherit this."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise KeyboardInterrupt, like Ctrl-C; none again within `SAME_ORDER_S`.

    Main thread only.
    """
    ignored_until = 0.0

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        nonlocal ignored_until
        now = time.monotonic()
        if now >= ignored_until:
            ignored_until = now + SAME_ORDER_S
            raise KeyboardInterrupt

    previous_handlers = {
        signum: signal.signal(signum, interrupt)
        for signum in _SIGNALS_OF_SUPERVISOR
        if signal.getsignal(signum) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
