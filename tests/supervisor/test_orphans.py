"""Processes that a server reaps as the init of a container."""

import subprocess
import sys

SCRIPT = """
import os, subprocess, sys, time
from noria.protocol.process_signals import adopt_orphans
import psutil
from noria.supervisor.orphans import OrphanReaper

adopt_orphans()  # as the init of a container does
myself = psutil.Process()
own = subprocess.Popen(["true"])
subprocess.run(["sh", "-c", "true & sleep 0.2 & exit 0"])
reaper = OrphanReaper()
deadline = time.monotonic() + 60
while len(myself.children()) > 1 and time.monotonic() < deadline:
    reaper.reap({own.pid})
    time.sleep(0.05)
print([child.pid for child in myself.children()] == [own.pid], own.wait())
"""


def test_orphans_are_reaped_and_own_children_are_left_to_who_waits_for_them():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "True 0\n", done.stderr
