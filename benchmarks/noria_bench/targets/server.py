"""A real server on a free loopback port, for as long as a bench needs it: `noria serve`, or the seed's."""

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

import msgspec
import psutil

from noria.config import Config
from noria.protocol.model_spec import ModelSpec
from noria.settings import list_settings as known_settings
from noria_bench.targets import environments
from noria_bench.targets.catalog import Target, TargetSettings

NO_PROXY_OPENER = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # no proxy that the environment names is asked
_READY_WITHIN_S = 300.0  # a UNet that is compiled on few cores takes minutes


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready."""

    port: int
    seconds_to_ready: float
    process: psutil.Process

    def children(self, role: str) -> list[psutil.Process]:
        """Its processes that call themselves "noria ROLE"."""
        found = []
        for child in self.process.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if " ".join(child.cmdline()).startswith(f"noria {role}"):
                    found.append(child)
        return found

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of each of its processes until now, by their ids."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.process, *self.process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    found[process.pid] = float(times.user + times.system)
        return found

    def resident_bytes(self) -> int:
        """The memory that its processes hold together; what they share is counted for each."""
        total = 0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


@contextlib.contextmanager
def running_server(arguments: Sequence[str], port: int | None = None) -> Iterator[RunningServer]:
    """Start `noria serve ARGUMENTS` on `port`, or any free one, wait until /readyz is green, and stop it at the end.

    Unless they name a `--data-dir`, it has one of its own: what is measured must not draw the jobs of who measures.

    Raises:
        RuntimeError: it ended, or was not ready in five minutes.

    """
    with (
        tempfile.TemporaryDirectory(prefix="noria-data-") as data_dir,
        running_process(
            lambda port: [
                sys.executable,
                "-m",
                "noria",
                "serve",
                "--data-dir",
                data_dir,
                *arguments,
                "--port",
                str(port),
            ],
            port,
        ) as server,
    ):
        yield server


@contextlib.contextmanager
def running_target(
    target: Target,
    spec: ModelSpec,
    config: Config,
    settings: TargetSettings | None = None,
    flags: Sequence[str] = (),
    port: int | None = None,
) -> Iterator[RunningServer]:
    """A fresh server for `target`, on the same model with the same engine settings; `flags` more for Noria, `settings` for others.

    `settings` are the target's own unless given.

    Raises:
        ConfigError: its virtual environment is not installed.
        RuntimeError: as above.

    """
    if target.module is None:
        with running_server([config.model, *config_flags(config), *flags], port) as server:  # the later flag wins
            yield server
        return
    python = sys.executable if target.peer is None else str(environments.python_of(target.peer))

    def command(port: int) -> list[str]:
        launch = {"spec": spec, "config": config.engine, "port": port, "parent_pid": os.getpid()}
        launch["settings"] = settings or target.settings
        return [python, "-m", str(target.module), msgspec.json.encode(launch).decode()]

    with running_process(command, port) as server:
        yield server


@contextlib.contextmanager
def running_process(
    command: Callable[[int], list[str]],
    port: int | None = None,
    *,
    log: pathlib.Path | None = None,
    ready_path: str = "/readyz",
) -> Iterator[RunningServer]:
    """Start the server that `command(port)` is, wait until its `ready_path` is green, and stop it at the end; raises as above.

    Its log goes into the file `log`, or where the bench's own does.

    Noria's settings in the environment are not for it: the bench has read them, and what it was told since wins over them.
    """
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    with (
        _free_port() if port is None else contextlib.nullcontext(port) as chosen,
        contextlib.nullcontext() if log is None else log.open("ab") as stderr,
        subprocess.Popen(command(chosen), stdout=subprocess.DEVNULL, stderr=stderr, env=environment) as child,
    ):
        try:
            _wait_until_ready(child, f"http://127.0.0.1:{chosen}{ready_path}", started + _READY_WITHIN_S)
            yield RunningServer(chosen, time.monotonic() - started, psutil.Process(child.pid))
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=30)
            child.kill()


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A loopback port that is free, and stays so until the end: who asks the kernel for any port meanwhile is given another.

    It is kept by a socket that is bound and never listens. A server can bind beside it if it sets SO_REUSEADDR or SO_REUSEPORT, as
    the frameworks do; one that came up a second later on a port that was free and kept by nobody would now and then find it taken.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _wait_until_ready(child: "subprocess.Popen[bytes]", url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended with status {child.returncode}; its own words are above")
        with contextlib.suppress(OSError, http.client.HTTPException):  # refused, any status but 2xx, no answer yet
            NO_PROXY_OPENER.open(url, timeout=5).close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server was not ready within {_READY_WITHIN_S:.0f} s")


def config_flags(config: Config) -> list[str]:
    """The settings that differ from the defaults, as `noria serve` takes them; model, host and port are the bench's."""
    flags = []
    for setting in known_settings():
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


def isolated_config(config: Config, folder: str) -> Config:
    """`config` for servers that are only measured: they keep costs in `folder`, and say nothing unless something is wrong."""
    engine = config.engine
    if not engine.cache_dir:  # what was measured at another time, on a busier machine, makes bad promises
        engine = msgspec.structs.replace(engine, cache_dir=folder)
    log_level = "warning" if config.log_level == "info" else config.log_level
    return msgspec.structs.replace(config, engine=engine, log_level=log_level)
