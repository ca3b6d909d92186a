"""The engine's process."""

import subprocess
import sys

import msgspec

from noria.config import EngineConfig
from noria.engine.process import EngineTask
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


def test_a_failed_thread_ends_the_process(tmp_path):
    task = EngineTask(
        EngineConfig(), (FAKE_MODEL,), "cpu", f"ipc://{tmp_path}/engine", "engine-0", str(tmp_path / "in-flight")
    )
    command = [sys.executable, "-c", FAILING_ENGINE, msgspec.json.encode(task).decode()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 1
    assert "the failing thread failed" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
