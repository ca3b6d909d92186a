"""The end of a killer that finds nothing to kill."""

import subprocess
import sys
import threading

from noria_bench.soak.killer import Killer


def test_a_killer_stops_while_there_is_nothing_to_kill():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as childless:
        killer = Killer(childless.pid, num_kills=1, seconds=0.0, seed=0)
        killer.start()
        stopping = threading.Thread(target=killer.stop, daemon=True)
        stopping.start()
        stopping.join(30)
        childless.kill()
    assert not killer.is_alive()
    assert killer.killed_at_s == []
