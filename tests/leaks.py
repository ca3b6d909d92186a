"""Fails every test that leaves a thread, a child process or a socket behind. The conftests use it for all tests.

What a fixture of a wider scope starts is no leak: such fixtures are set up before the test's first snapshot. What their
servers start later, for the test's requests, is none either: a thread has a starter, or the queue of a pool that had
threads before, and a connection has an address.
"""

import concurrent.futures.thread
import contextlib
import gc
import os
import pathlib
import socket
import threading
import time

import pytest

GRACE_S = 10.0  # what was asked to end ends within milliseconds; a busy machine takes longer
_POLL_INTERVAL_S = 0.01
_COLLECT_AFTER_S = 0.1  # most has ended by then; a garbage collection takes 0.2 s with torch

ALLOWED_THREADS = (
    "tqdm_monitor",  # thread of diffusers' progress bars, one per process, which nothing ends
    "InductorSubproc",  # thread of torch's compiler, as the next one and the process
    "subproc_worker_timer",
)
ALLOWED_CHILDREN = b"torch/_inductor/compile_worker"
ALLOWED_SOCKETS = b"\0cuda-"  # socket of CUDA's driver, one per process
"""Beginnings of the names of threads that may outlive a test."""

_start_thread = threading.Thread.start


def _start_and_note_the_starter(thread):
    thread.starter = threading.current_thread()
    if thread._target is concurrent.futures.thread._worker:
        thread.pool_queue = thread._args[1]
    _start_thread(thread)


threading.Thread.start = _start_and_note_the_starter


class Socket:
    """A socket, whoever opened it: whether it listens, its address and that of its peer."""

    def __init__(self, descriptor):
        self.listens, self.address, self.peer = False, None, None
        with (
            contextlib.suppress(OSError),  # it is closed, or not connected
            socket.socket(fileno=os.dup(descriptor)) as opened,
        ):
            self.listens = bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            self.address = opened.getsockname()
            self.peer = opened.getpeername()


class Snapshot:
    """The threads, child processes and sockets of this process. Takes about 0.3 ms.

    Sockets are by descriptor and inode; those of `earlier` are not asked again what they are.
    """

    def __init__(self, earlier=None):
        self.threads, self.children = set(threading.enumerate()), _children()
        known = earlier.sockets if earlier else {}
        self.sockets = {key: known.get(key) or Socket(key[0]) for key in _sockets()}

    def since(self, before):
        """Describe what was not there `before`."""
        return [*self._threads_since(before), *self._children_since(before), *self._sockets_since(before)]

    def _threads_since(self, before):
        servers = before.threads - {threading.main_thread()}
        pools = {id(thread.pool_queue) for thread in before.threads if hasattr(thread, "pool_queue")}
        for thread in self.threads - before.threads:
            if getattr(thread, "starter", None) in servers or id(getattr(thread, "pool_queue", None)) in pools:
                continue
            if not thread.name.startswith(ALLOWED_THREADS):
                yield f"thread {thread.name!r}"

    def _children_since(self, before):
        for pid in self.children - before.children:
            command = b"(ended)"
            with contextlib.suppress(OSError):
                command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            if ALLOWED_CHILDREN not in command:
                yield f"child process {pid} {command.decode(errors='replace')[:200]}"

    def _sockets_since(self, before):
        servers = {each.address for each in before.sockets.values() if each.listens}
        for each in map(self.sockets.get, self.sockets.keys() - before.sockets.keys()):
            if not {each.address, each.peer} & servers and not _is_of_cuda(each.address):
                yield f"socket {each.address!r} " + ("that listens" if each.listens else f"connected to {each.peer!r}")


def _is_of_cuda(address):
    return isinstance(address, bytes) and address.startswith(ALLOWED_SOCKETS)


def _children():
    """Process ids of the children; those that have ended count until somebody waits for them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    found = set()
    for task in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{task}/children") as file,
        ):  # the thread may have ended
            found.update(file.read().split())
    return found


def _sockets():
    """Descriptor and inode of the open sockets."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                yield int(descriptor), target


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail the test if something that it started is still there after it and after the fixtures of its own."""
    before = Snapshot()
    yield
    ended = time.monotonic()
    collect_at = ended + _COLLECT_AFTER_S
    while left := Snapshot(before).since(before):
        if (now := time.monotonic()) > ended + GRACE_S:
            pytest.fail("left behind: " + "; ".join(left), pytrace=False)
        if now > collect_at:
            gc.collect()  # ends what only a cycle of references keeps open
            collect_at = now + 1.0
        time.sleep(_POLL_INTERVAL_S)
