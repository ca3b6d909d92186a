"""A real `noria serve` on a free loopback port, for as long as a bench needs it."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

_READY_WITHIN_S = 120.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready."""

    port: int
    seconds_to_ready: float
    process: psutil.Process

    def children(self, role: str) -> list[psutil.Process]:
        """Its processes that call themselves "noria ROLE"."""
        return [child for child in self.process.children() if " ".join(child.cmdline()).startswith(f"noria {role}")]


@contextlib.contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[RunningServer]:
    """Start `noria serve ARGUMENTS`, wait until /readyz is green, and stop it at the end.

    Raises:
        RuntimeError: it ended, or was not ready in two minutes.

    """
    port, started = _free_port(), time.monotonic()
    command = [sys.executable, "-m", "noria", "serve", *arguments, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        try:
            _wait_until_ready(child, port, started + _READY_WITHIN_S)
            yield RunningServer(port, time.monotonic() - started, psutil.Process(child.pid))
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=30)
            child.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(child: "subprocess.Popen[bytes]", port: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended with status {child.returncode}; its own words are above")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
            return  # anything but 2xx raises
        time.sleep(0.05)
    raise RuntimeError(f"the server was not ready within {_READY_WITHIN_S:.0f} s")
