"""A server of several processes ends with all of them, and at once."""

import signal
import subprocess
import sys

import psutil
import pytest

# It has a child and, from another child that has ended, an orphan; both are deaf to SIGTERM, and it would end in its own way.
SERVER_SCRIPT = """
import signal, subprocess, sys, time
from noria_bench.targets.process_tree import end_all_at_sigterm
end_all_at_sigterm(sys.argv[1])
ours = signal.signal(signal.SIGTERM, lambda *_: print("the framework's own ending", flush=True))
deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.write(1, b'%d\\\\n' % os.getpid()); time.sleep(600)"
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
    """Of its child and of the orphan, once both are up and deaf."""
    return [int(server.stdout.readline()) for _ in range(2)]


# multiprocessing's resource tracker lets SIGTERM through to this thread.
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
        "child.wait(); raise RuntimeError('fails for want of its child')",
    ],
)
def test_at_sigterm_nothing_is_left(tmp_path, rest):
    folder = tmp_path / "scratch"
    folder.mkdir()
    with start_server(folder, rest) as server:
        pids = read_pids(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert server.stdout.read() == ""
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not folder.exists()


def test_when_the_server_fails_by_itself_nothing_is_left_either(tmp_path):
    with start_server(tmp_path / "none", "sys.stdin.readline(); sys.exit(3)") as server:
        pids = read_pids(server)
        server.communicate("go\n", timeout=60)
        assert server.returncode == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
