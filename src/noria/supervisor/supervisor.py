"""PROCESS: starts the other processes, waits until they serve, restarts them when they end, and stops them in order.

It owns what outlives a child: the listening socket, so that no connection is refused while a front end restarts, and a
private directory with the engines' socket addresses and the metrics files. The decisions (whether and when a child
restarts, whether an engine hangs, how an engine ended) are made by pure modules beside this one; this module carries
them out. It knows no requests and no images, and of an engine only whether it is ready and whether it responds.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import setproctitle
import zmq
from prometheus_client import multiprocess

from noria.config import Config
from noria.folders import data_folder
from noria.frontend.access.api_keys import read_keys
from noria.frontend.access.request_origin import check_hosts
from noria.frontend.access.trusted_proxies import check_proxies
from noria.frontend.http.tls import check_certificate
from noria.jobs.results import reject_password
from noria.jobs.webhooks.signing import secret_file
from noria.models.hub_adapters import download_hub_adapters
from noria.observe.cgroup import cpu_limit, usable_cores
from noria.observe.logs.setup import child_log_environment, fields
from noria.observe.metrics.dead_processes import merge_dead_processes
from noria.observe.metrics.mmap_writer import BYTES_PER_PROCESS, has_space
from noria.observe.traces.setup import check_traces
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import EngineState, Hello, Ping, Pong
from noria.protocol.transport import Connected, Disconnected, EngineConnection
from noria.statistics.variables import Declarations
from noria.supervisor.child_process import Child, ChildKind, EngineChild, FrontendChild
from noria.supervisor.child_tasks import ServerChildren, describe_status
from noria.supervisor.frontend_group import FrontendGroup
from noria.supervisor.frontend_scaler import process_bounds
from noria.supervisor.listener import (
    open_listeners,
    raise_file_limit,
    server_url,
    wait_until_answering,
    warn_if_open,
)
from noria.supervisor.log_collector import LogCollector, collecting_logs
from noria.supervisor.private_folder import private_folder
from noria.supervisor.ready_banner import print_ready_banner, ready_banner
from noria.supervisor.restart_policy import GiveUp, Restart
from noria.supervisor.served_models import engine_groups, open_models

log = logging.getLogger("noria.supervisor")

CommandBuilder = Callable[[ChildKind, str], list[str]]
"""Returns the command line of a child, given its kind and its task as JSON; tests pass one that runs small scripts."""

# After `frontend.drain_s` a front end only closes its connections and logs.
FRONTEND_STOP_TIMEOUT_S = 5.0
# An engine is stopped after the front ends, so it has no requests left to finish.
ENGINE_STOP_TIMEOUT_S = 5.0
REGISTRAR_STOP_TIMEOUT_S = 3.0
PING_INTERVAL_S = 2.0


def child_command(kind: ChildKind, task_json: str) -> list[str]:
    """Return the command line that starts a child."""
    return [sys.executable, "-m", f"noria.{kind}.process", task_json]


def serve(config: Config, build_command: CommandBuilder = child_command) -> int:
    """Serve until a signal stops the server; return the exit status: 0 after a signal, else that of the child given up.

    Raises:
        ConfigError: the API keys file is invalid, `jobs.results` contains a password, `jobs.webhook_secret_file` is
            `auto` although servers share the database, tracing is configured but not possible, a trusted proxy is no
            address, an allowed host is no name, the certificate cannot be used, a variable of statistics is not
            allowed, an address cannot be listened on, two models share a name, encoders leave images no core, an
            endpoint has no name or model of its own, or TMPDIR cannot be written to, or is too long for Unix sockets.
        ModelError: a model cannot be served.

    """
    started_s = time.monotonic()
    setproctitle.setproctitle("noria supervisor")
    with collecting_logs(config) as log_collector:
        return _serve(config, build_command, log_collector, started_s)


def _serve(config: Config, build_command: CommandBuilder, log_collector: LogCollector, started_s: float) -> int:
    # Front ends read the keys again; they are checked here so that errors appear before anything starts.
    read_keys(config.frontend.api_keys_file)
    reject_password(config.jobs.results)  # before it appears in a process's arguments
    secret_file(config.jobs, data_folder(config, os.environ))
    check_traces(config.traces_endpoint)
    check_proxies(config.frontend.trusted_proxies)
    check_hosts(config.frontend.allowed_hosts)
    check_certificate(config.frontend)
    Declarations(config.statistics)  # raises ConfigError
    num_cores = usable_cores(len(os.sched_getaffinity(0)), cpu_limit())
    num_frontends = process_bounds(config.frontend.processes, num_cores)
    raise_file_limit()
    config = download_hub_adapters(config, os.environ)
    models = open_models(config)
    with open_listeners(config.frontend) as listeners, private_folder() as directory:
        warn_if_open(listeners[0], config.frontend)
        _check_space(directory, num_frontends[1] + len(engine_groups(config, models)) + 1)  # and the registrar
        supervisor = Supervisor(
            config,
            models,
            listeners,
            directory,
            log_collector,
            num_frontends,
            started_s=started_s,
            build_command=build_command,
        )
        return asyncio.run(supervisor.run())


class Supervisor:
    """One run of the server, from the start of the first child to the end of the last."""

    def __init__(
        self,
        config: Config,
        models: Sequence[AnyModelSpec],  # of the configuration
        listeners: Sequence[socket.socket],  # of the server; then of its metrics, if they have one
        directory: str,
        log_collector: LogCollector,
        num_frontends: tuple[int, int],  # the fewest and the most
        *,
        started_s: float,
        build_command: CommandBuilder,
    ) -> None:
        self._models, self._listeners, self._directory, self._started_s = models, listeners, directory, started_s
        self._config, self._build_command, self._log_collector = config, build_command, log_collector
        self._url = server_url(listeners[0], has_tls=bool(config.frontend.ssl_certfile))
        children = ServerChildren(config, models, listeners, directory)
        self._engines, self._registrars = children.engines(), children.registrars()
        self._child_tasks: dict[str, asyncio.Task[None]] = {}
        self._frontends = FrontendGroup(
            num_frontends,
            # `is_first`: none runs yet; else the server runs already, and does not depend on it.
            lambda name, number: children.frontend(name, number, is_first=not self._child_tasks),
        )
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._exit_status = 0

    async def run(self) -> int:
        """Start the children, serve, and stop them; return the exit status."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup SIGHUP stays ignored.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        for child in (*self._engines, *self._frontends.children, *self._registrars):
            self._start(child)
        scaling = asyncio.create_task(self._frontends.scale(self._start))
        background = [asyncio.create_task(self._wait_until_ready()), scaling]
        stop_requested = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stop_requested, *background], return_when=asyncio.FIRST_COMPLETED)
        self._stopping.set()  # also after an internal error, which is raised below
        # Front ends close their copies too: new connections are refused instead of left waiting.
        for listener in self._listeners:
            listener.close()
        scaling.cancel()
        frontends_grace_s = self._config.frontend.drain_s + FRONTEND_STOP_TIMEOUT_S
        await asyncio.gather(  # the registrar at once: it must release no model that a draining front end needs
            self._stop_children(self._registrars, REGISTRAR_STOP_TIMEOUT_S),
            self._stop_children(self._frontends.children, frontends_grace_s),
        )
        await self._stop_children(self._engines, ENGINE_STOP_TIMEOUT_S)
        for task in background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._log_collector.close()
        for child_task in self._child_tasks.values():
            child_task.result()  # raises the internal error of a task, now that all children have ended
        log.info("stopped", extra=fields(event="stopped", status=self._exit_status))
        return self._exit_status

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._stopping.is_set():
            log.warning("%s again: stopping immediately", signum.name, extra=fields(event="stopping_at_once"))
            self._exit_status = self._exit_status or 128 + signum
            self._killing.set()
        else:
            message = "%s: finishing requests in flight; a second signal stops immediately"
            log.info(message, signum.name, extra=fields(event="stopping", signal=signum.name))
            self._stopping.set()

    def _start(self, child: Child) -> None:
        task = self._child_tasks[child.name] = asyncio.create_task(self._run_child(child))
        task.add_done_callback(functools.partial(self._on_child_done, child))

    def _on_child_done(self, child: Child, task: asyncio.Task[None]) -> None:
        if isinstance(child, FrontendChild) and not self._stopping.is_set() and task.exception() is None:
            del self._child_tasks[child.name]
            self._frontends.remove(child)
        else:
            self._stopping.set()  # also after an internal error, which `run` raises

    async def _run_child(self, child: Child) -> None:
        """Start `child`, and start it again whenever it ends, until it has retired or the server stops."""
        is_restart = False
        while not self._stopping.is_set():
            if is_restart:
                child.prepare()
            is_restart = True
            with self._log_collector.open_pipe(child.name) as output:
                child.process = await asyncio.create_subprocess_exec(
                    *self._build_command(child.kind, _serialize(child.task)),
                    env=_child_environment(self._directory) | child_log_environment(self._log_collector.mark),
                    stdout=output,
                    stderr=output,
                    pass_fds=child.pass_fds,
                    # Ctrl-C in a terminal reaches only the supervisor, which stops the children in order.
                    process_group=0,
                )
            child.started(time.monotonic())
            child.log(logging.DEBUG, "started", f"started, process {child.process.pid}", pid=child.process.pid)
            if self._stopping.is_set():
                child.send_signal(signal.SIGTERM)
            status = await child.process.wait()
            decision = child.ended(status, time.monotonic())
            multiprocess.mark_process_dead(child.process.pid, self._directory)  # type: ignore[no-untyped-call]
            if self._stopping.is_set():
                child.log(logging.DEBUG, "ended", f"ended {describe_status(status)}", status=status)
                return
            try:
                merge_dead_processes(self._directory)
            except OSError as error:
                log.warning(
                    "cannot merge the metrics of dead processes: %s",
                    error,
                    extra=fields(event="dead_processes_not_merged"),
                )
            match decision:
                case None:
                    child.log(logging.INFO, "ended", f"ended {describe_status(status)}", status=status)
                    return
                case Restart(delay_s):
                    message = f"ended {describe_status(status)}; starting it again in {delay_s:.1f} s"
                    child.log(logging.ERROR, "restarted", message, status=status, delay_s=delay_s)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), delay_s)
                case GiveUp(exit_status, reason):
                    message = f"ended {describe_status(status)}: {reason}; stopping"
                    child.log(logging.ERROR, "given_up", message, status=status)
                    self._exit_status = exit_status
                    self._stopping.set()

    async def _stop_children(self, children: Sequence[Child], grace_s: float) -> None:
        """Send `children` SIGTERM, and SIGKILL to those left after `grace_s` seconds or at the second signal."""
        for child in children:
            child.send_signal(signal.SIGTERM)
        ended: asyncio.Future[Any] = asyncio.gather(
            *(self._child_tasks[child.name] for child in children), return_exceptions=True
        )
        killing: asyncio.Future[Any] = asyncio.create_task(self._killing.wait())
        await asyncio.wait([ended, killing], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        for child in children:
            if not self._child_tasks[child.name].done():
                child.log(logging.WARNING, "killed", "is killed: it has not ended in time")
                child.send_signal(signal.SIGKILL)
        await ended

    async def _wait_until_ready(self) -> None:
        """Monitor the engines; print the ready banner once all of them and a front end are ready."""
        connections = [EngineConnection(engine.address) for engine in self._engines]
        try:
            async with asyncio.TaskGroup() as group:
                ready = [asyncio.Event() for _ in self._engines]
                for engine, connection, event in zip(self._engines, connections, ready, strict=True):
                    group.create_task(self._follow_engine(engine, connection, event))
                    group.create_task(self._ping(engine, connection))
                group.create_task(self._announce_when_ready(ready))
        finally:
            for connection in connections:
                connection.close()

    async def _announce_when_ready(self, engines_ready: list[asyncio.Event]) -> None:
        await wait_until_answering(self._url)
        for frontend in self._frontends.children:
            frontend.restart_policy.ready()
        for event in engines_ready:
            await event.wait()
        took_s = time.monotonic() - self._started_s
        has_api_keys = bool(self._config.frontend.api_keys_file)
        print_ready_banner(ready_banner(took_s, self._models, self._url, has_api_keys=has_api_keys))

    async def _follow_engine(self, engine: EngineChild, connection: EngineConnection, ready: asyncio.Event) -> None:
        """Handle the messages of an engine."""
        async for event in connection.events():
            match event:
                case Connected():
                    with contextlib.suppress(zmq.Again):
                        await connection.send(Hello("supervisor"))
                case (EngineState() as state, _):
                    if engine.update_state(state):
                        engine.log(logging.INFO, "ready", f"is ready on {state.device}", device=state.device)
                        ready.set()
                case (Pong(incarnation, busy_s, limit_s), _) if incarnation == engine.incarnation:
                    engine.hang_detector.answered(busy_s, limit_s)
                case Disconnected():
                    engine.log(logging.DEBUG, "connection_lost", "has lost its connection")

    async def _ping(self, engine: EngineChild, connection: EngineConnection) -> None:
        """Ping an engine at regular intervals; kill it if it hangs."""
        interval_s = min(PING_INTERVAL_S, self._config.engine.hang_timeout_s / 5)
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            engine.kill_if_hung(now)
            engine.hang_detector.pinged(now)
            # zmq.Again: the engine is not running, or does not read. The ping counts as unanswered.
            with contextlib.suppress(zmq.Again):
                await connection.send(Ping())


def _check_space(directory: str, num_processes: int) -> None:
    """Log a warning if the metrics of all processes do not fit the temporary folder."""
    if not has_space(directory, num_processes):
        message = "%s has less than the %d bytes that metrics may need: /metrics may be incomplete or empty"
        log.warning(message, directory, num_processes * BYTES_PER_PROCESS, extra=fields(event="metrics_not_written"))


def _child_environment(directory: str) -> dict[str, str]:
    """Return the children's environment; variables that the operator has set are kept."""
    defaults = {
        "HF_HUB_OFFLINE": "1",  # everything has been downloaded already
        "TRANSFORMERS_VERBOSITY": "error",
        # Memory in pages of 2 MB where the kernel allows that on request: a text takes 5 % less CPU time.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        # An idle OpenMP thread spins for about 10 µs, then sleeps and frees the core for a front end. Sleeping at once
        # (OMP_WAIT_POLICY=passive) halves the speed of a small model; spinning longer starves the front ends (ADR 5).
        defaults["GOMP_SPINCOUNT"] = "10000"
    return defaults | os.environ | {"PROMETHEUS_MULTIPROC_DIR": directory}


def _serialize(task: dict[str, object]) -> str:
    return msgspec.json.encode(task).decode()
