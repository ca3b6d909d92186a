"""A child process ends with its parent."""

import signal
import subprocess
import sys

from waiting import wait_until


def test_child_ends_with_its_parent():
    child = (
        "import time; from noria.protocol.process_signals import die_with_parent;"
        "die_with_parent(); print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE);"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True) as process:
        child_pid = int(process.stdout.readline())
        assert _is_alive(child_pid)
        process.kill()
    wait_until(lambda: not _is_alive(child_pid))


def test_child_ends_when_its_parent_had_already_ended():
    code = (
        "import os; from noria.protocol.process_signals import die_with_parent;"
        "die_with_parent(parent_pid=os.getppid() {}); print('up')"
    )
    for other, status, output in ((" ", 0, b"up\n"), ("+ 1", -signal.SIGTERM, b"")):
        result = subprocess.run([sys.executable, "-c", code.format(other)], check=False, stdout=subprocess.PIPE)
        assert (result.returncode, result.stdout) == (status, output)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
