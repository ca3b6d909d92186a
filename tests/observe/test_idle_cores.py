"""Processes that leave the cores to others."""

import subprocess
import sys

import pytest

from noria.observe.idle_cores import is_wanted

SCRIPT = """
import os, signal
from noria.observe import idle_cores

slept_s = []
idle_cores.time.sleep = slept_s.append
idle_cores.is_wanted = lambda *_: True
with idle_cores.yielding_cores({max_pauses} / 4):
    niceness, began_s = os.nice(0), idle_cores.time.process_time()
    while idle_cores.time.process_time() < began_s + 0.1:
        pass
os.kill(os.getpid(), signal.SIGPROF)  # a late one
print(niceness, len(slept_s), sum(slept_s))
"""


@pytest.mark.parametrize(
    ("ran_ns", "waited_ns", "wanted"), [(10, 0, False), (0, 0, False), (95, 5, False), (60, 40, True)]
)
def test_a_core_is_wanted_if_the_thread_waited_for_it(ran_ns, waited_ns, wanted):
    assert is_wanted(ran_ns, waited_ns) is wanted


@pytest.mark.parametrize("max_pauses", [100, 2])
def test_a_process_pauses_while_others_want_its_core_but_not_for_ever(max_pauses):
    script = SCRIPT.format(max_pauses=max_pauses)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    niceness, num_pauses, paused_s = run.stdout.split()
    assert niceness == "19"
    assert 2 <= int(num_pauses) <= max_pauses  # in 100 ms of CPU time
    assert float(paused_s) == 0.25 * int(num_pauses)
