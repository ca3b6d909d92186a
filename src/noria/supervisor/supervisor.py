"""The process that starts the others, waits until they serve, starts them again when they end, and stops them in order.

It owns what outlives a child: the listening socket, so that no connection is refused while a front end is replaced, and a private
directory with the engines' addresses and the metrics' files. Whether and when a child starts again, whether an engine hangs, and how it
ended, is decided in `supervision/`, without a clock; the rest only does it. It knows no request and no image, and of an engine only
whether it is ready and whether it turns.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import setproctitle
import zmq
from prometheus_client import multiprocess

from noria.config import Config
from noria.errors import ConfigError, short_repr
from noria.frontend.http.api_keys import read_keys
from noria.frontend.http.trusted_proxies import check_proxies
from noria.jobs.results import refuse_password
from noria.models.catalog import open_model
from noria.observe.cgroup import memory_events, num_oom_kills
from noria.observe.logs.setup import child_log_environment, fields
from noria.observe.metrics.dead_processes import merge_dead_processes
from noria.observe.traces.setup import check_traces
from noria.protocol.messages import EngineState, Hello, Ping, Pong, engine_name
from noria.protocol.model_spec import ModelSpec
from noria.protocol.transport import Connected, Disconnected, EngineConnection
from noria.supervisor.child_process import Child, ChildKind, EngineChild
from noria.supervisor.hang_detector import HangDetector
from noria.supervisor.log_collector import LogCollector, collecting_logs, print_ready_banner
from noria.supervisor.restart_policy import GiveUp, Restart, RestartPolicy

log = logging.getLogger("noria.supervisor")

CommandBuilder = Callable[[ChildKind, str], list[str]]
"""The command line of a child's kind and its JSON; tests put small scripts here."""

FRONTEND_STOP_TIMEOUT_S = 5.0  # after `frontend.drain_s` a front end has only last words to say
ENGINE_STOP_TIMEOUT_S = 5.0  # an engine without front ends has nothing left to finish
FRONTEND_READY_AFTER_S = 3.0  # it answers within one; the rest is for a machine that is busy
PING_INTERVAL_S = 2.0
MAX_ADDRESS_BYTES = 107  # of a Unix socket's path: sun_path of unix(7) without its last zero


def child_command(kind: ChildKind, text: str) -> list[str]:
    """How children are started."""
    return [sys.executable, "-m", f"noria.{kind}.process", text]


def serve(config: Config, build_command: CommandBuilder = child_command) -> int:
    """Serve until a signal says stop; returns the exit status: 0 when asked to stop, else that of the child given up.

    Raises:
        ConfigError: the file of keys is not one, `jobs.results` holds a password, traces are wanted that cannot be made, a trusted proxy is no address,
            the address cannot be listened on, or TMPDIR is too long for sockets.
        ModelError: the model cannot be served.

    """
    started_s = time.monotonic()
    setproctitle.setproctitle("noria supervisor")
    with collecting_logs(config) as log_collector:
        return _serve(config, build_command, log_collector, started_s)


def _serve(config: Config, build_command: CommandBuilder, log_collector: LogCollector, started_s: float) -> int:
    read_keys(config.frontend.keys_file)  # front ends read it themselves, too late to say what is wrong with it
    refuse_password(config.jobs.results)  # before it stands in the arguments of a process
    check_traces(config.traces_endpoint)
    check_proxies(config.frontend.trusted_proxies)
    models = open_models(config)
    with (
        listen(config.frontend.host, config.frontend.port) as listener,
        tempfile.TemporaryDirectory(prefix="noria-", ignore_cleanup_errors=True) as directory,  # mode 0700
    ):
        supervisor = Supervisor(
            config, models, listener, directory, log_collector, started_s=started_s, build_command=build_command
        )
        return asyncio.run(supervisor.run())


def open_models(config: Config) -> list[ModelSpec]:
    """What is to be served, the default model first.

    Raises:
        ConfigError: two models of one name: a request could not say which it means.
        ModelError: one that cannot be served.

    """
    models: dict[str, ModelSpec] = {}
    for source in (config.model, *config.additional_models):
        model_spec = open_model(source)
        if model_spec.name in models:
            raise ConfigError(
                f"the models in {models[model_spec.name].folder} and {model_spec.folder} are both called {model_spec.name!r}. "
                'Give one another name: {"name": …} in its noria.json.'
            )
        models[model_spec.name] = model_spec
    return list(models.values())


def listen(host: str, port: int) -> socket.socket:
    """A socket listening on `host` and `port`, before anything slow starts. Raises ConfigError where that is not possible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        is_dualstack = host == "::" and socket.has_dualstack_ipv6()  # IPv4 callers too, as everywhere else
        return socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=is_dualstack)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken by another process. Choose another with --port N, or --port 0 for any free one"
        elif error.errno == errno.EACCES:
            message = (
                f"port {port} is not open to this user: ports below 1024 are the system's. Choose another with --port N"
            )
        else:
            message = f"cannot listen on {host}, port {port}: {error.strerror}. --host takes an address of this machine"
        raise ConfigError(f"{message} (in a file: frontend.host, frontend.port).") from error
    except ValueError as error:  # the name's encoding failed before it was looked up
        raise ConfigError(f"host is {short_repr(host)}, no address or name of a machine: {error}.") from error


def ready_banner(took_s: float, models: str, url: str, *, has_api_keys: bool) -> str:
    """What a server says on its stdout when it is ready at `url`: where to go, and a first command; `keyed`: it has API keys."""
    auth_option = '-H "authorization: Bearer $NORIA_API_KEY" ' if has_api_keys else ""
    return (
        f"\nnoria: ready after {took_s:.1f} s, serving {models} on {url}\n\n"
        f"  {url}/       draw in a browser\n"
        f"  {url}/live   watch the batch\n"
        f"  {url}/docs   the interface\n\n"
        f"  curl -s {url}/t2i -H 'content-type: application/json' {auth_option}"
        '-d \'{"prompt": "a red circle above a blue square"}\' -o image.png\n\n'
    )


class Supervisor:
    """One run of the server, from the first child's start to the last one's end."""

    def __init__(
        self,
        config: Config,
        models: Sequence[ModelSpec],
        listener: socket.socket,
        directory: str,
        log_collector: LogCollector,
        *,
        started_s: float,
        build_command: CommandBuilder,
    ) -> None:
        self._models, self._listener, self._directory, self._started_s = models, listener, directory, started_s
        self._config, self._build_command, self._log_collector = config, build_command, log_collector
        self._num_oom_kills = functools.partial(num_oom_kills, memory_events())  # children share this process's group
        self._server_id = uuid.uuid4().hex
        self._host, self._port = listener.getsockname()[:2]
        addresses = [f"ipc://{directory}/{engine_name(index)}" for index in range(len(config.engine.devices))]
        _check_address_lengths(addresses)
        self._engines = [
            self._make_engine(engine_name(index), device, address)
            for index, (device, address) in enumerate(zip(config.engine.devices, addresses, strict=True))
        ]
        self._frontends = [
            self._make_frontend(f"frontend-{index}", addresses) for index in range(config.frontend.processes)
        ]
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._exit_status = 0

    def _make_engine(self, name: str, device: str, address: str) -> EngineChild:
        config = self._config.engine
        task: dict[str, object] = {
            "config": config,
            "models": self._models,
            "device": device,
            "address": address,
            "name": name,
            "manifest": f"{self._directory}/{name}.aboard",
            "parent_pid": os.getpid(),
            "log_level": self._config.log_level,
            "traces_endpoint": self._config.traces_endpoint,
        }
        return EngineChild(
            kind="engine",
            name=name,
            task=task,
            restart_policy=RestartPolicy(),
            address=address,
            hang_detector=HangDetector(config.hang_timeout_s, config.start_timeout_s),
            num_oom_kills=self._num_oom_kills,
        )

    def _make_frontend(self, name: str, addresses: list[str]) -> Child:
        fd = self._listener.fileno()
        task: dict[str, object] = {
            "config": self._config,
            "fd": fd,
            "engines": addresses,
            "parent_pid": os.getpid(),
            "place": f"{self._server_id}/{name}",
        }
        return Child(
            kind="frontend",
            name=name,
            task=task,
            restart_policy=RestartPolicy(assumed_ready_after_s=FRONTEND_READY_AFTER_S),
            num_oom_kills=self._num_oom_kills,
            pass_fds=(fd,),
        )

    async def run(self) -> int:
        """Start, serve, stop; returns the exit status."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup's wish stays
                loop.add_signal_handler(signum, self._on_signal, signum)
        child_tasks = {
            child.name: asyncio.create_task(self._run_child(child)) for child in (*self._engines, *self._frontends)
        }
        readiness = asyncio.create_task(self._wait_until_ready())
        stop_requested = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stop_requested, readiness, *child_tasks.values()], return_when=asyncio.FIRST_COMPLETED)
        self._stopping.set()  # also after an error of ours, which is raised below
        self._listener.close()  # front ends close theirs: who comes now is refused, not left waiting
        await self._stop_children(self._frontends, child_tasks, self._config.frontend.drain_s + FRONTEND_STOP_TIMEOUT_S)
        await self._stop_children(self._engines, child_tasks, ENGINE_STOP_TIMEOUT_S)
        readiness.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await readiness
        self._log_collector.close()
        for child_task in child_tasks.values():
            child_task.result()  # an error of ours in one of them, now that all have ended
        log.info("stopped", extra=fields(event="stopped", status=self._exit_status))
        return self._exit_status

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._stopping.is_set():
            log.warning("%s again: stopping at once", signum.name, extra=fields(event="stopping_at_once"))
            self._exit_status = self._exit_status or 128 + signum
            self._killing.set()
        else:
            message = "%s: finishing what is in flight; once more stops at once"
            log.info(message, signum.name, extra=fields(event="stopping", signal=signum.name))
            self._stopping.set()

    async def _run_child(self, child: Child) -> None:
        """Live through every life of `child`, until the server stops."""
        while not self._stopping.is_set():
            with self._log_collector.open_pipe(child.name) as output:
                child.process = await asyncio.create_subprocess_exec(
                    *self._build_command(child.kind, _serialize(child.task)),
                    env=_child_environment(self._directory) | child_log_environment(self._log_collector.mark),
                    stdout=output,
                    stderr=output,
                    pass_fds=child.pass_fds,
                    process_group=0,  # a terminal's Ctrl-C reaches only the supervisor, which stops them in order
                )
            child.started(time.monotonic())
            child.log(logging.DEBUG, "started", f"started, process {child.process.pid}", pid=child.process.pid)
            if self._stopping.is_set():
                child.send_signal(signal.SIGTERM)
            status = await child.process.wait()
            decision = child.ended(status, time.monotonic())
            multiprocess.mark_process_dead(child.process.pid, self._directory)  # type: ignore[no-untyped-call]
            if self._stopping.is_set():
                child.log(logging.DEBUG, "ended", f"ended {_describe_status(status)}", status=status)
                return
            try:
                merge_dead_processes(self._directory)
            except OSError as error:
                log.warning("cannot fold what the dead counted: %s", error, extra=fields(event="counts_not_folded"))
            match decision:
                case Restart(delay_s):
                    message = f"ended {_describe_status(status)}; starting it again in {delay_s:.1f} s"
                    child.log(logging.ERROR, "restarted", message, status=status, delay_s=delay_s)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), delay_s)
                case GiveUp(exit_status, reason):
                    message = f"ended {_describe_status(status)}: {reason}; stopping"
                    child.log(logging.ERROR, "given_up", message, status=status)
                    self._exit_status = exit_status
                    self._stopping.set()

    async def _stop_children(
        self, children: Sequence[Child], child_tasks: dict[str, asyncio.Task[None]], grace_s: float
    ) -> None:
        """Ask `children` to end; kill who has not after `grace_s` seconds, or at the second signal."""
        for child in children:
            child.send_signal(signal.SIGTERM)
        ended: asyncio.Future[Any] = asyncio.gather(
            *(child_tasks[child.name] for child in children), return_exceptions=True
        )
        killing: asyncio.Future[Any] = asyncio.create_task(self._killing.wait())
        await asyncio.wait([ended, killing], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        for child in children:
            if not child_tasks[child.name].done():
                child.log(logging.WARNING, "killed", "is killed: it has not ended yet")
                child.send_signal(signal.SIGKILL)
        await ended

    async def _wait_until_ready(self) -> None:
        """Watch the engines; say once, when an image can be asked for, where and how."""
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
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)  # noqa: S104 - any address means this machine's too
        await _wait_until_answering(host, self._port)
        for frontend in self._frontends:
            frontend.restart_policy.ready()
        for event in engines_ready:
            await event.wait()
        url = f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"
        names = ", ".join(model_spec.name for model_spec in self._models)
        print_ready_banner(
            ready_banner(
                time.monotonic() - self._started_s, names, url, has_api_keys=bool(self._config.frontend.keys_file)
            )
        )

    async def _follow_engine(self, engine: EngineChild, connection: EngineConnection, ready: asyncio.Event) -> None:
        """Follow what an engine says of itself."""
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
        """Ask an engine whether it turns, again and again; kill it if it hangs."""
        interval_s = min(PING_INTERVAL_S, self._config.engine.hang_timeout_s / 5)
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            engine.kill_if_hung(now)
            engine.hang_detector.pinged(now)
            with contextlib.suppress(
                zmq.Again
            ):  # between two lives, or it reads nothing: then this counts as unanswered
                await connection.send(Ping())


def _check_address_lengths(addresses: list[str]) -> None:
    """Refuse a temporary directory in which sockets' names get too long; ZeroMQ's own error names no file."""
    longest = max((os.fsencode(address.removeprefix("ipc://")) for address in addresses), key=len)
    if len(longest) > MAX_ADDRESS_BYTES:
        raise ConfigError(
            f"the engines' sockets, such as {os.fsdecode(longest)!r}, have names of {len(longest)} bytes; the system takes "
            f"{MAX_ADDRESS_BYTES}. Set the environment variable TMPDIR to a shorter path."
        )


def _child_environment(directory: str) -> dict[str, str]:
    """The children's environment; what the operator has set stays."""
    defaults = {
        "HF_HUB_OFFLINE": "1",  # the catalog has fetched what there is to fetch
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        # An idle OpenMP thread spins for some 10 µs, then sleeps and leaves the core to a front end. Sleeping at once
        # (OMP_WAIT_POLICY=passive) halves the speed of a small model, spinning for long starves the front ends: ADR 5.
        defaults["GOMP_SPINCOUNT"] = "10000"
    return defaults | os.environ | {"PROMETHEUS_MULTIPROC_DIR": directory}


async def _wait_until_answering(host: str, port: int) -> None:
    """Wait until some front end answers a request, whatever the answer."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                await reader.readexactly(5)
                return
            finally:
                writer.close()
        await asyncio.sleep(0.1)


def _serialize(task: dict[str, object]) -> str:
    return msgspec.json.encode(task).decode()


def _describe_status(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
