"""Starts real servers on free loopback ports, for tests and benches: `noria serve`, or any other command."""

import contextlib
import http.client
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from noria.config import Config
from noria.settings import list_settings

# Opens URLs without any proxy, whatever the environment names.
NO_PROXY_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Compiling a UNet on few cores takes minutes.
_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready."""

    port: int
    seconds_to_ready: float
    process: psutil.Process

    def children(self, role: str) -> list[psutil.Process]:
        """Child processes titled "noria ROLE"."""
        found = []
        for child in self.process.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if " ".join(child.cmdline()).startswith(f"noria {role}"):
                    found.append(child)
        return found

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of each of the server's processes since its start, by process id."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.process, *self.process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    found[process.pid] = float(times.user + times.system)
        return found

    def cpu_s_by_name(self) -> dict[str, float]:
        """CPU seconds of the server's processes since its start, by name: of Noria's own as in its log."""
        found: dict[str, float] = {}
        for process_id, seconds in self.cpu_s().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(process_id)
                title = process.cmdline()[:1]
                name = title[0].split()[-1] if title and title[0].startswith("noria ") else process.name()
                found[name] = found.get(name, 0.0) + seconds
        return found

    def resident_bytes(self) -> int:
        """The resident memory of all the server's processes; shared pages are counted once per process."""
        total = 0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


@contextlib.contextmanager
def running_server(arguments: Sequence[str], port: int | None = None) -> Iterator[RunningServer]:
    """Run `noria serve ARGUMENTS` on `port` (None: a free one), wait until /readyz is green, and stop it at the end.

    Unless `arguments` name a `--data-dir`, the server has a temporary one, so that it does not process the user's
    stored jobs; unless they name `--threads`, engines have OMP_NUM_THREADS of them, if that is set.

    Raises RuntimeError: the server ended, or was not ready within five minutes.
    """
    with tempfile.TemporaryDirectory(prefix="noria-data-") as data_dir:
        command = [sys.executable, "-m", "noria", "serve", "--data-dir", data_dir]
        if num_threads := os.environ.get("OMP_NUM_THREADS"):
            command += ["--threads", num_threads]
        command += arguments
        with running_process(lambda chosen: [*command, "--port", str(chosen)], port) as server:
            yield server


@contextlib.contextmanager
def running_process(
    command: Callable[[int], list[str]],
    port: int | None = None,
    *,
    log: pathlib.Path | None = None,
    ready_path: str = "/readyz",
) -> Iterator[RunningServer]:
    """Run `command(port)`, wait until GET `ready_path` succeeds, and stop it at the end.

    Its stderr is appended to the file `log`, or goes to this process's. Variables NORIA_* are removed from its
    environment: settings reach it by its command line only.

    Raises RuntimeError: the server ended, or was not ready within five minutes.
    """
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    with (
        reserve_port() if port is None else contextlib.nullcontext(port) as chosen,
        contextlib.nullcontext() if log is None else log.open("ab") as stderr,
        subprocess.Popen(command(chosen), stdout=subprocess.DEVNULL, stderr=stderr, env=environment) as child,
    ):
        try:
            _wait_until_ready(child, f"http://127.0.0.1:{chosen}{ready_path}", started + _READY_TIMEOUT_S)
            yield RunningServer(chosen, time.monotonic() - started, psutil.Process(child.pid))
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_STOP_TIMEOUT_S)
            child.kill()


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """A free loopback port, which the kernel assigns to no other socket until the context ends.

    A socket that is bound and never listens holds it. A server can still bind it with SO_REUSEADDR or SO_REUSEPORT,
    which the frameworks set. Without the reservation, a port that was free may be taken before a slow server binds it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _wait_until_ready(child: "subprocess.Popen[bytes]", url: str, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended with status {child.returncode}; its stderr is above")
        # Connection refused, any status but 2xx, or no answer yet.
        with contextlib.suppress(OSError, http.client.HTTPException):
            NO_PROXY_OPENER.open(url, timeout=5).close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server was not ready within {_READY_TIMEOUT_S:.0f} s")


def config_flags(config: Config) -> list[str]:
    """Flags of `noria serve` for the settings of `config` that are not the defaults, except model, host and port."""
    flags = []
    for setting in list_settings():
        section: Any = config
        for part in setting.path[:-1]:
            section = getattr(section, part)
        value = getattr(section, setting.path[-1])
        if value != setting.default and setting.key not in ("model", "frontend.host", "frontend.port"):
            if isinstance(value, bool):
                flags.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
            else:
                flags += [setting.flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return flags
