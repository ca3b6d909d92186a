"""A server of several processes ends at once, with all of them."""

import signal
import subprocess
import sys

import psutil
import pytest

# It has a child, and an orphan of another child; both ignore SIGTERM. Its framework has a handler of its own.
SERVER_SCRIPT = """
import signal, subprocess, sys, time
from noria_bench.targets.process_tree import kill_tree_on_sigterm
kill_tree_on_sigterm(sys.argv[1])
ours = signal.signal(signal.SIGTERM, lambda *_: print("the framework's own handler", flush=True))
deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); "
deaf += "os.write(1, b'%d\\\\n' % os.getpid()); time.sleep(600)"
subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}])"])
child = subprocess.Popen([sys.executable, "-c", deaf])
"""


def start_server(folder, rest):
    return subprocess.Popen(
        [sys.executable, "-c", SERVER_SCRIPT + rest, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_pids(server):
    """The ids of its child and of the orphan, once both ignore SIGTERM."""
    return [int(server.stdout.readline()) for _ in range(2)]


# multiprocessing's resource tracker unblocks SIGTERM in this thread.
UNBLOCKED_SCRIPT = """
from multiprocessing.resource_tracker import ensure_running
signal.signal(signal.SIGTERM, ours)
ensure_running()
"""


@pytest.mark.parametrize(
    "rest",
    [
        "time.sleep(600)",
        UNBLOCKED_SCRIPT + "time.sleep(600)",
        "child.wait(); raise RuntimeError('fails without its child')",
    ],
)
def test_after_sigterm_no_process_is_left(tmp_path, rest):
    folder = tmp_path / "scratch"
    folder.mkdir()
    with start_server(folder, rest) as server:
        pids = read_pids(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert server.stdout.read() == ""
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not folder.exists()


def test_after_a_failure_no_process_is_left_either(tmp_path):
    with start_server(tmp_path / "none", "sys.stdin.readline(); sys.exit(3)") as server:
        pids = read_pids(server)
        server.communicate("go\n", timeout=60)
        assert server.returncode == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
