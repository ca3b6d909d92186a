"""The engine's process."""

import subprocess
import sys

import msgspec

from noria.config import EngineConfig
from noria.protocol.tasks import EngineTask
from noria.testing.fake_engine import FAKE_MODEL
from waiting import TIMEOUT_S

FAILING_ENGINE = """
import sys, threading, time, msgspec
from noria.engine import process

def load_runtime(*_):
    threading.Thread(target=lambda: 1 / 0, name="failing").start()
    time.sleep(600)

process.load_runtime = load_runtime
process.main(msgspec.json.decode(sys.argv[1], type=process.EngineTask))
"""

IDLE_ENGINE = """
import signal, sys, threading, time, msgspec
from noria.engine import process
from noria.engine.runtime import StepRuntime
from noria.protocol.process_signals import STOP_SIGNAL
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.fake_executor import FakeExecutor
from noria.testing.virtual_clock import VirtualClock

def take_signal():
    while not callable(signal.getsignal(STOP_SIGNAL)):
        time.sleep(0.01)
    time.sleep(0.5)  # until the main thread waits for commands
    signal.pthread_kill(threading.get_ident(), STOP_SIGNAL)

def load_runtime(*_):
    threading.Thread(target=take_signal).start()
    return StepRuntime(FakeExecutor(VirtualClock()), StepScheduler(1))

process.load_runtime = load_runtime
sys.exit(process.main(msgspec.json.decode(sys.argv[1], type=process.EngineTask)))
"""


def run_engine(script, folder):
    task = EngineTask(
        EngineConfig(), (FAKE_MODEL,), "cpu", f"ipc://{folder}/engine", "engine-0", str(folder / "in-flight")
    )
    command = [sys.executable, "-c", script, msgspec.json.encode(task).decode()]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_an_idle_engine_ends_although_another_thread_took_its_signal(tmp_path):
    ended = run_engine(IDLE_ENGINE, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_failed_thread_ends_the_process(tmp_path):
    ended = run_engine(FAILING_ENGINE, tmp_path)
    assert ended.returncode == 1
    assert "the failing thread failed" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
