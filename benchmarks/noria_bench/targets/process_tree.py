"""Ends a server of several processes: all of them, at once, whatever its framework does.

Frameworks have shutdowns of their own: some take half a minute, some leave processes behind.
"""

import atexit
import contextlib
import os
import shutil
import signal
import threading
import time

import psutil

from noria.protocol.process_signals import adopt_orphans

_POLL_INTERVAL_S = 0.01


def kill_tree_on_sigterm(*folders: str) -> None:
    """Exit with status 0 at SIGTERM. Whenever this process ends, its descendants are killed and `folders` are deleted.

    Call it before a framework is imported, in the only thread: later threads and processes inherit that SIGTERM is
    blocked, and only a thread created here receives it, so that no framework's handler does. multiprocessing's resource
    tracker unblocks it, so there is a handler too.
    """
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a thread that does not block SIGTERM would receive it and end this process alone"
    )
    adopt_orphans()
    # One ending at a time: a main thread that fails because its children are gone waits until the first is complete.
    lock = threading.Lock()

    def end(status: int | None = None) -> None:
        with lock:
            _kill_descendants()
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            if status is not None:
                os._exit(status)

    def wait_and_end() -> None:
        signal.sigwait({signal.SIGTERM})
        end(status=0)

    def handle(*_: object) -> None:
        # A second signal would wait for the lock of the first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(status=0)

    atexit.register(end)
    signal.signal(signal.SIGTERM, handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait_and_end, name="sigterm", daemon=True).start()


def _kill_descendants() -> None:
    me = psutil.Process()
    # Repeated: a framework may replace processes that were killed.
    while children := me.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            # A zombie remains a child until it is waited for.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_INTERVAL_S)
