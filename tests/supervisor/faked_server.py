"""A supervisor in a process of its own, whose children are small scripts that write what happens into a file."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from waiting import TIMEOUT_S

FAKE_ENGINE = """
import os, pathlib, queue, signal, sys, time
import msgspec
from noria.protocol.transport import EngineChannel
from noria.protocol.messages import EngineState, Hello, Ping, Pong

task = msgspec.json.decode(sys.argv[1])
assert (task["parent_pid"], task["log_level"]) == (os.getppid(), "info")
events = pathlib.Path(os.environ["EVENTS"])
def record(event):
    with events.open("a") as opened:
        opened.write(f"{task['name']} {event} {os.getpid()}\\n")
previous_exit = task.get("previous_exit", "none")
record("started")
print(os.environ.get("FAKES_SAY", ""))
record("after " + previous_exit)
if os.environ.get("ENGINE_EXITS"):
    sys.exit(int(os.environ["ENGINE_EXITS"]))
has_metrics_folder = pathlib.Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).is_dir()
record("environment " + os.environ["GOMP_SPINCOUNT"] + " " + str(has_metrics_folder))
channel, inbox = EngineChannel(task["address"]), queue.SimpleQueue()
channel.start(lambda *received: inbox.put(received))
def stop(*_):
    record("stopped")
    channel.close()
    os._exit(0)
signal.signal(signal.SIGRTMIN, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGHUP])
while True:
    client, message, _data = inbox.get()
    hangs = os.environ.get("ENGINE_HANGS", "") if previous_exit == "none" else ""
    match message:
        case Ping():
            if hangs == "silent":
                time.sleep(0.5)  # its thread sends meanwhile that it is ready
                os.kill(os.getpid(), signal.SIGSTOP)
            channel.send(client, Pong(str(os.getpid()), 77.0 if hangs == "stuck" else 0.0, 50.0))
        case Hello():
            channel.send(client, EngineState(str(os.getpid()), "loading", (), task["device"]))
            if hangs != "loading":
                channel.send(client, EngineState(str(os.getpid()), "ready", (), task["device"]))
                record("ready")
"""

FAKE_FRONTEND = """
import json, os, pathlib, signal, socket, sys, time

task = json.loads(sys.argv[1])
assert task["parent_pid"] == os.getppid()
events = pathlib.Path(os.environ["EVENTS"])
def record(event):
    with events.open("a") as opened:
        opened.write(f"frontend {event} {os.getpid()}\\n")
def stop(*_):
    record("draining")
    time.sleep(float(os.environ.get("FRONTEND_DRAINS_S", "0.2")))
    record("stopped")
    os._exit(0)
signal.signal(signal.SIGRTMIN, stop)
record("worker " + task["worker_id"])
print(os.environ.get("FAKES_SAY", ""))
record("started")
listener = socket.socket(fileno=task["fd"])
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(f"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nX-Pid: {os.getpid()}\\r\\n\\r\\n".encode())
    connection.close()
"""

DRIVER = """
import json, os, signal, sys
from noria.supervisor import child_keeper, child_process
child_keeper.ENGINE_STOP_TIMEOUT_S = 60.0  # a fake stops when told, but maybe slowly on a busy machine
child_process.PING_INTERVAL_S = float(os.environ.get("PING_S", "2"))
from noria.settings import load
from noria.supervisor.supervisor import serve
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
flags = {"frontend.port": os.environ.get("PORT", "0"), "engine.devices": sys.argv[2], "registry.deployments": "false"}
flags["engine.hang_timeout_s"] = os.environ.get("HANG_S", "60")
flags["engine.start_timeout_s"] = os.environ.get("START_S", "60")
flags |= {"frontend.drain_s": sys.argv[3]} | json.loads(os.environ.get("FLAGS", "{}"))
config = load(None, {}, flags)
is_real = lambda kind: kind != "engine" and "FLAGS" in os.environ
fake = lambda kind: ["-m", f"noria.{kind}.process"] if is_real(kind) else [f"{sys.argv[1]}/{kind}.py"]
sys.exit(serve(config, lambda kind, text: [sys.executable, *fake(kind), text]))
"""


def pid(line: str) -> int:
    """Return the process id at the end of an event."""
    return int(line.rpartition(" ")[2])


class FakedServer:
    """A supervisor in a process of its own, with fake children."""

    def __init__(
        self,
        folder: pathlib.Path,
        devices: str = "cpu",
        driver: str = DRIVER,
        drain_s: float = 20.0,
        stdout: int | None = None,
        stderr: int = subprocess.STDOUT,
        **environment: str,
    ) -> None:
        (folder / "engine.py").write_text(FAKE_ENGINE)
        (folder / "frontend.py").write_text(FAKE_FRONTEND)
        self.events, self.output = folder / "events", folder / "output"
        self.events.touch()
        with self.output.open("w") as opened:
            self.process = subprocess.Popen(
                [sys.executable, "-c", driver, str(folder), devices, str(drain_s)],
                env=os.environ | {"EVENTS": str(self.events), "TMPDIR": str(folder)} | environment,
                stdout=opened if stdout is None else stdout,
                stderr=stderr,
            )

    def wait_for(self, words: str, times: int = 1, file: pathlib.Path | None = None) -> list[str]:
        """Wait for `times` complete lines with `words` in the events (or `file`) and return all of them."""
        file = file or self.events
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            whole, _, _ = file.read_bytes().rpartition(b"\n")
            lines = [line for line in whole.decode().splitlines() if words in line]
            if len(lines) >= times:
                return lines
            time.sleep(0.02)
        raise AssertionError(f"no {words!r} ×{times} in:\n{self.events.read_text()}\n{self.output.read_text()}")

    @property
    def url(self) -> str:
        line = self.wait_for("noria: ready after", file=self.output)[0]
        return line.partition(" on ")[2].partition(" ")[0]

    def children(self, kind: str) -> list[psutil.Process]:
        """Return its real children of a kind."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if f"noria {kind}" in "".join(child.cmdline()[:1])]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., FakedServer]]:
    """Start a server in `tmp_path`, which ends with the test."""
    started: list[FakedServer] = []

    def start_server(**options: Any) -> FakedServer:
        started.append(FakedServer(tmp_path, **options))
        return started[-1]

    yield start_server
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        for line in server.events.read_text().splitlines():
            with contextlib.suppress(psutil.NoSuchProcess):
                if " started " in line and str(tmp_path) in str((process := psutil.Process(pid(line))).cmdline()):
                    process.kill()
