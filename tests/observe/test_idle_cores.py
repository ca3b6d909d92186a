"""Processes that leave the cores to others."""

import subprocess
import sys

import pytest

from noria.observe.idle_cores import is_wanted

SCRIPT = """
import os, signal
from noria.observe import idle_cores

idle_cores.is_wanted = lambda *_: {wanted}
with idle_cores.idle_cores_only():
    policy = os.sched_getscheduler(0)
    began = idle_cores.time.monotonic(), idle_cores.time.process_time()
    while idle_cores.time.process_time() < began[1] + 0.05:
        pass
    seconds = idle_cores.time.monotonic() - began[0]
os.kill(os.getpid(), signal.SIGPROF)  # a late one
print(policy == os.SCHED_IDLE, seconds)
"""


@pytest.mark.parametrize(
    ("ran_ns", "waited_ns", "wanted"), [(10, 0, False), (0, 0, False), (95, 5, False), (60, 40, True)]
)
def test_a_core_is_wanted_if_the_thread_waited_for_it(ran_ns, waited_ns, wanted):
    assert is_wanted(ran_ns, waited_ns) is wanted


def test_a_process_pauses_while_others_want_its_core():
    run = subprocess.run([sys.executable, "-c", SCRIPT.format(wanted=True)], capture_output=True, text=True, check=True)
    is_idle, seconds = run.stdout.split()
    assert is_idle == "True"
    assert float(seconds) > 0.4  # 50 ms of CPU time, and three pauses at least
