"""The two servers: `noria serve`, and `noria serve --on local` behind HAProxy; and what each of their processes is.

Both run in Ray's environment (`noria bench install ray`), so that both have the same versions of all packages.
"""

import contextlib
import os
import pathlib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping

import httpx
import psutil

from noria.testing.server import RunningServer, running_process
from noria_bench.cluster.results import Serving
from noria_bench.targets.environments import python_of

NUM_SLOTS = 4

# What a process is, by how its command line begins; of two the first.
_ROLES = {
    "noria frontend": "front end",
    "ray::ServeReplica:noria:frontend": "front end",
    "noria engine": "engines",
    "ray::ServeReplica:noria:engine": "engine actors",
    "ray::ProxyActor": "proxy actor",
    "ray::HAProxyManager": "proxy actor",
}
ROLES = ("front end", "HAProxy", "proxy actor", "engines", "engine actors", "rest of the server")

_ENGINES_READY_TIMEOUT_S = 300.0
_POLL_INTERVAL_S = 0.2


@contextlib.contextmanager
def running_serving(
    serving: Serving, num_engines: int, variables: Mapping[str, str], folder: pathlib.Path
) -> Iterator[RunningServer]:
    """The server with so many engines, which are ready. `variables` are added to its environment, `folder` is its data.

    Raises:
        ConfigError: Ray's environment is not installed.
        RuntimeError: the server ended, or its engines were not ready within five minutes.

    """
    arguments = ["serve", "--data-dir", str(folder), "--log-level", "warning", "--slots", str(NUM_SLOTS)]
    variables = {**variables, "RAY_USAGE_STATS_ENABLED": "0"}
    if serving == "plain":
        arguments += ["--devices", ",".join(["cpu"] * num_engines)]
    else:
        arguments += ["--on", "local", "--devices", "cpu", "--engine-replicas", str(num_engines)]
        # Ray counts the machine's cores, and engines that sleep need few.
        arguments += ["--engine-cpus", f"{0.5 * (os.cpu_count() or 1) / num_engines:.3f}"]
        variables |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_worker_niceness": "0",  # the default gives workers a low priority
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # by default from a file in the user's home
        }
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), str(python_of("ray")), "-m", "noria"]
    descendants: list[psutil.Process] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_kill_haproxy)
        stack.callback(_kill, descendants)  # what the server leaves behind
        server = stack.enter_context(running_process(lambda port: [*command, *arguments, "--port", str(port)]))
        stack.callback(lambda: descendants.extend(server.process.children(recursive=True)))
        _wait_for_engines(server, num_engines)
        yield server


def _wait_for_engines(server: RunningServer, num_engines: int) -> None:
    deadline_s = time.monotonic() + _ENGINES_READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"http://127.0.0.1:{server.port}/readyz", timeout=5, trust_env=False)
            if answer.is_success and [each["state"] for each in answer.json()["engines"]] == ["ready"] * num_engines:
                return
        time.sleep(_POLL_INTERVAL_S)
    raise RuntimeError(f"{num_engines} engines were not ready within {_ENGINES_READY_TIMEOUT_S:.0f} s")


def cpu_s_by_role(server: RunningServer) -> dict[str, float]:
    """CPU seconds since their starts of the server's processes that run, by role of `ROLES`."""
    found = dict.fromkeys(ROLES, 0.0)
    for process in (server.process, *server.process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            with process.oneshot():
                times, role = process.cpu_times(), role_of(process.name(), " ".join(process.cmdline()))
            found[role] += times.user + times.system
    return found


def role_of(name: str, command: str) -> str:
    """The role of a process, of `ROLES`, by its name and its command line or title."""
    if name.startswith("haproxy"):
        return "HAProxy"
    return next((role for start, role in _ROLES.items() if command.startswith(start)), ROLES[-1])


def _kill_haproxy() -> None:
    """Kill the HAProxy that Ray has started while it ended; a machine has one, since its ports are fixed."""
    _kill(
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"].startswith("haproxy") and "haproxy-serve" in " ".join(process.info["cmdline"] or ())
    )


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
