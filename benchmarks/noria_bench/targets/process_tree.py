"""How a server of several processes ends: all of them at once, whatever its framework has begun.

Frameworks have endings of their own, some graceful for half a minute, some that leave processes behind. A bench wants none of that.
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
    """From now on this process ends at SIGTERM with status 0; whenever it ends, so do all below it, and `folders` go.

    Call it before a framework is imported, in the only thread: threads and processes that begin later inherit that SIGTERM is
    blocked, and only a thread made here takes it, so that no framework's handler does. multiprocessing's resource tracker
    unblocks it, though, so there is a handler too.
    """
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a thread that does not block SIGTERM would take it and end this process alone"
    )
    adopt_orphans()
    lock = (
        threading.Lock()
    )  # one ending: a main thread that fails for want of its children waits here until all is over

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
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would wait for the lock of the first
        end(status=0)

    atexit.register(end)
    signal.signal(signal.SIGTERM, handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait_and_end, name="ending", daemon=True).start()


def _kill_descendants() -> None:
    me = psutil.Process()
    while children := me.children(recursive=True):  # again, since a framework may replace what was killed
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # one that nobody waited for stays a child
                pass
        time.sleep(_POLL_INTERVAL_S)
