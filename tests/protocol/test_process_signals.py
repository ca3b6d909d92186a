"""A child process ends with its parent and by its order, not by signals to all processes."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from noria.protocol.process_signals import SAME_ORDER_S, STOP_SIGNAL, blocking_signals
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


def test_an_order_to_end_that_comes_with_sigterm_is_obeyed():
    child = (
        "import queue, signal; from noria.protocol.process_signals import STOP_SIGNAL, leave_signals_to_supervisor;"
        "leave_signals_to_supervisor(); inbox = queue.SimpleQueue();"
        "signal.signal(STOP_SIGNAL, lambda *_: inbox.put(0)); print('up', flush=True); inbox.get()"
    )
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
        for number in (signal.SIGSTOP, signal.SIGTERM, STOP_SIGNAL, signal.SIGCONT):
            process.send_signal(number)
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_ends_a_child_neither_while_it_starts_nor_later(number):
    child = (
        "import subprocess, sys; sys.stdin.readline();"
        "from noria.protocol.process_signals import leave_signals_to_supervisor; leave_signals_to_supervisor();"
        "print('started', flush=True); sys.stdin.readline(); print('alive', flush=True); sys.stdin.readline();"
        "own = subprocess.Popen(['sleep', '60']); own.terminate(); print(own.wait(), flush=True); sys.stdin.readline()"
    )
    pipe = subprocess.PIPE
    with blocking_signals():
        process = subprocess.Popen([sys.executable, "-c", child], stdin=pipe, stdout=pipe, text=True, bufsize=1)
    with process:
        for words in ("started", "alive", str(-signal.SIGTERM)):  # its own children obey signals
            process.send_signal(number)
            process.stdin.write("\n")
            assert process.stdout.readline() == f"{words}\n"
        process.send_signal(STOP_SIGNAL)
        assert process.wait() == -STOP_SIGNAL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_order_that_comes_as_two_signals_does_not_interrupt_what_is_done_at_the_end(number):
    code = (
        "import time\n"
        "from noria.protocol.process_signals import sigterm_interrupts\n"
        "with sigterm_interrupts():\n"
        "    try:\n"
        "        print('up', flush=True); time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('ending', flush=True); time.sleep(0.5); print('removed', flush=True); time.sleep(60)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as process:
        for words in ("up", "ending"):
            assert (line := process.stdout.readline()) == f"{words}\n", line or process.stderr.read()
            process.send_signal(number)
        assert process.stdout.readline() == "removed\n"
        time.sleep(SAME_ORDER_S)
        process.send_signal(number)
        assert process.wait() != 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_init_of_a_container_ends_by_a_signal(number, status):
    code = (
        "import os, time; from noria.protocol.process_signals import end_by_signals_as_init;"
        "os.getpid = lambda: 1; end_by_signals_as_init(); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == status


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
