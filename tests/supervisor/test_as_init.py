"""A server as PID 1, as in a container: it ends by SIGTERM, also while it starts, and reaps what it adopts."""

import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from waiting import TIMEOUT_S, wait_until

IN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
HAS_NAMESPACES = (
    shutil.which("unshare") is not None
    and subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_NAMESPACES, reason="needs namespaces of processes for this user (unshare --pid)"),
]


class Init:
    """`noria serve` as PID 1 of a namespace, which has adopted a process that ended at once."""

    def __init__(self, folder: pathlib.Path, *arguments: str, **environment: str) -> None:
        self.log = folder / "log"
        command = [sys.executable, "-m", "noria", "serve", "--port", "0", "--data-dir", str(folder / "data")]
        adopting = ["sh", "-c", '(sleep 0.1 &); exec "$@"', "sh", *command, "--devices", "cpu", *arguments]
        variables = [f"{name}={value}" for name, value in (environment | {"TMPDIR": str(folder)}).items()]
        with self.log.open("w") as log:
            self.unshare = subprocess.Popen(
                [*IN_NAMESPACE, "env", "--default-signal=HUP", *variables, *adopting], stdout=log, stderr=log
            )
        wait_until(psutil.Process(self.unshare.pid).children)
        (self.process,) = psutil.Process(self.unshare.pid).children()

    def has_zombies(self) -> bool:
        """Whether what it adopted waits to be reaped; the shell reaps its own child before it becomes the server."""
        children = self.process.children()
        return any(child.name() == "sleep" and child.status() == psutil.STATUS_ZOMBIE for child in children)

    def stop(self, signum: signal.Signals) -> int:
        self.process.send_signal(signum)
        return self.unshare.wait(TIMEOUT_S)


@pytest.fixture
def started() -> Iterator[list[Init]]:
    servers: list[Init] = []
    yield servers
    for server in servers:
        if server.unshare.poll() is None:
            server.unshare.kill()  # and so all processes of the namespace
            server.unshare.wait()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_still_downloads_ends_at_once(
    signum: signal.Signals, tmp_path: pathlib.Path, started: list[Init]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_hub:
        silent_hub.settimeout(TIMEOUT_S)
        endpoint = f"http://127.0.0.1:{silent_hub.getsockname()[1]}"
        started.append(
            Init(tmp_path, "somebody/model", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
        )
        with silent_hub.accept()[0]:
            assert started[0].stop(signum) == 128 + signum


def test_what_it_adopts_is_reaped_and_sigterm_stops_it_in_order(tmp_path: pathlib.Path, started: list[Init]) -> None:
    server = Init(tmp_path)
    started.append(server)
    wait_until(server.has_zombies)
    wait_until(lambda: not server.has_zombies())
    assert server.stop(signal.SIGTERM) == 0, server.log.read_text()
