"""The front-end process: `python -m noria.frontend.process '{"config": …, "fd": 3, "engines": ["ipc:///…"]}'`.

The supervisor binds the port and passes the socket's descriptor, so several front ends share the port, and no
connection is lost when one of them restarts. On the supervisor's order the process stops accepting connections, answers
requests in flight for up to `frontend.drain_s`, answers the rest with 503, and exits with status 0. Told to retire,
because the other front ends suffice, it stops accepting connections and does the same when its clients have left.
"""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator
from typing import cast

import msgspec
import setproctitle
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import State

from noria.config import FrontendConfig
from noria.errors import SetupError
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.access.trusted_proxies import in_both_forms, proxy_check
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.registrar_link import RegistrarLink
from noria.frontend.engines.submission import Submission
from noria.frontend.server.connection import TimeoutHttpProtocol
from noria.frontend.server.connection_admission import ConnectionAdmission
from noria.frontend.server.tls import Certificate, TlsServer
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.jobs.service import open_job_service
from noria.observe.logs.log_record import fields
from noria.observe.logs.setup import gathering_lines, logging_here
from noria.observe.metrics import declarations, outcomes
from noria.observe.metrics.engine_series import init_engine_series
from noria.observe.traces.setup import open_tracer
from noria.protocol.process_signals import STOP_SIGNAL, die_with_parent, leave_signals_to_supervisor
from noria.protocol.supervisor_link import NumFrontends, Retire, follow_supervisor
from noria.protocol.tasks import FrontendTask, engine_name
from noria.registry.deployments.routes_file import routes_file

_REJECT_GRACE_S = 2.0  # after a drain, to answer 503 to the requests in flight; the supervisor waits for 5 s
_CLOSE_GRACE_S = 1.0  # after that, for the work of closed connections to end by itself before uvicorn cancels it
# Longer than clients keep an idle connection (httpx 5 s, nginx 60 s), so that none sends into a closing one.
_KEEP_ALIVE_S = 75
# One that joins others listens when it knows the engines; they answer at once unless they are down.
_FIRST_STATES_WAIT_S = 5.0
_RETIRE_POLL_S = 0.1
# New objects until a collection; the requests in flight alone have more than Python's 700.
_GC_THRESHOLD = 5000

log = logging.getLogger("noria.frontend")


def run(task: FrontendTask) -> None:
    """Serve until the supervisor's order to end.

    Raises ConfigError: the jobs' database, the trace exporter or the code of an endpoint cannot be opened.
    """
    config, worker_id = task.config, task.worker_id
    setproctitle.setproctitle(f"noria frontend {task.name}")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    init_engine_series([engine_name(number) for number in range(len(task.engines))])
    outcomes.init_unknown_model_series()
    # 0, so that Prometheus sees the first increase
    declarations.FRONTEND_STARTS.labels(task.name, "restarted")
    declarations.FRONTEND_STOPS.labels(task.name)
    declarations.FRONTEND_STARTS.labels(task.name, task.start_reason).inc()
    engine_pool = EnginePool(
        task.engines,
        config.frontend.restart_wait_s,
        worker_id,
        task.default_models,
        first_states_wait_s=0.0 if task.start_reason == "initial" else _FIRST_STATES_WAIT_S,
        rebalance=config.frontend.rebalance,
    )
    statistics, link = StatisticsRecorder(config.statistics), None
    tracer, close_tracer = open_tracer(config.traces_endpoint, config.traces_ratio, task.name)
    jobs = open_job_service(config, worker_id, tracer)
    listeners = [socket.socket(fileno=fd) for fd in (task.fd, task.metrics_fd) if fd is not None]
    metrics_port = None if task.metrics_fd is None else listeners[1].getsockname()[1]
    app = build_app(
        config,
        engine_pool,
        lambda: jobs,
        tracer,
        metrics_port,
        endpoint_models=task.endpoint_models,
        num_frontends=task.num_frontends,
        statistics=statistics,
        checkpoints=task.checkpoints,
    )
    submission: Submission = app.state.submission
    submission.versions.configure(task.configured_versions)
    if task.registrar:
        link = RegistrarLink(submission, worker_id, routes_file(config), task.registrar, statistics)
    server = http_server(app, config.frontend, task, link)
    gc.collect()
    gc.set_threshold(_GC_THRESHOLD)
    gc.freeze()  # else each full collection would stop the event loop for 50 ms, to scan what was loaded and stays
    server.run(sockets=listeners)
    close_tracer()


def http_server(
    app: Starlette,
    config: FrontendConfig,
    task: FrontendTask | None = None,
    link: RegistrarLink | None = None,
) -> uvicorn.Server:
    """Return the uvicorn server of this process: uvloop, httptools, our timeouts, and none of uvicorn's log lines.

    It follows the messages of the supervisor if `task` has its connection, and the registrar by `link`. Raises
    ConfigError if the certificate cannot be used.
    """
    return _DrainingServer(
        app.state,
        config,
        task,
        link,
        Certificate(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None,
        uvicorn.Config(
            app.middleware_stack or app,  # Starlette's own call adds nothing that we use
            loop="uvloop",
            http=_protocol_class(config),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            forwarded_allow_ips=in_both_forms(config.trusted_proxies),
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.drain_s + _REJECT_GRACE_S + _CLOSE_GRACE_S),
        ),
    )


def _protocol_class(config: FrontendConfig) -> type[TimeoutHttpProtocol]:
    """Return the protocol of one server's connections, which it counts."""
    limiter = ConcurrencyLimiter(
        "connections", config.max_connections, config.max_connections_per_client, retry_after_s=0.0
    )
    is_proxy = proxy_check(in_both_forms(config.trusted_proxies))
    admission = ConnectionAdmission(limiter, is_proxy, is_beside_grpc=bool(config.grpc_port))
    return TimeoutHttpProtocol.limited(admission)


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that drains: it answers the last requests with 503, where uvicorn would close their connections.

    It also shares its clients with a new front end, and retires, when the supervisor says so.

    With a certificate its TCP sockets speak TLS. Unix sockets never do: both ends of them are on this machine.
    """

    _should_exit = False
    _loop: asyncio.AbstractEventLoop | None = None  # that of `main_loop`

    def __init__(
        self,
        app_state: State,  # what `build_app` put there
        settings: FrontendConfig,
        task: FrontendTask | None,
        link: RegistrarLink | None,
        certificate: Certificate | None,
        config: uvicorn.Config,
    ) -> None:
        super().__init__(config)
        self._app_state, self._settings, self._task = app_state, settings, task
        self._num_frontends = 1 if task is None else task.num_frontends
        self._certificate, self._link = certificate, link
        self._linking: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._told_to_exit = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Exit on the supervisor's order, or, without a supervisor, on the signals that uvicorn obeys."""
        if self._task is None:
            with super().capture_signals():
                yield
        else:
            signal.signal(STOP_SIGNAL, lambda *_: setattr(self, "should_exit", True))
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Load the code of endpoints, then start listening. Raises ConfigError."""
        await self._app_state.load()
        if self._certificate is None:
            await super().startup(sockets)
        else:
            await self._start_with_tls(self._certificate, sockets)
        if self._link is not None:
            self._linking = asyncio.create_task(self._link.run())
        declarations.FRONTENDS.set(1)
        if self._task is not None and self._task.control_fd is not None:
            control_fd, name = self._task.control_fd, self._task.name
            self._following = asyncio.create_task(self._follow_supervisor(control_fd, name))

    async def _start_with_tls(self, certificate: Certificate, sockets: list[socket.socket] | None) -> None:
        with_tls = [each for each in sockets or () if each.family != socket.AF_UNIX]
        await super().startup([each for each in sockets or () if each.family == socket.AF_UNIX])
        self._background.append(asyncio.create_task(certificate.follow()))
        for listener in with_tls:
            server = TlsServer(listener, self._make_protocol, certificate, self._protocol_class.admission.admit)
            self.servers.append(server)  # type: ignore[arg-type]

    def _make_protocol(self, held: contextlib.ExitStack) -> TimeoutHttpProtocol:
        protocol = self._protocol_class(self.config, self.server_state, self.lifespan.state)
        protocol.held = held
        return protocol

    @property
    def _protocol_class(self) -> type[TimeoutHttpProtocol]:
        assert not isinstance(self.config.http, str)
        return cast("type[TimeoutHttpProtocol]", self.config.http)

    async def main_loop(self) -> None:
        """Set the Date of responses each second, until told to exit; uvicorn's own loop looks ten times a second."""
        self._loop = asyncio.get_running_loop()
        with gathering_lines():
            while not await self.on_tick(0):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._told_to_exit.wait()

    @property
    def should_exit(self) -> bool:
        """Whether the server is to exit. It may be set by any thread and by a signal handler."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        is_told, self._should_exit = value and not self._should_exit, value
        if is_told and self._loop is not None:
            self._loop.call_soon_threadsafe(self._told_to_exit.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain and stop."""
        drain_s = self._settings.drain_s
        log.info("draining for up to %g s", drain_s, extra=fields(event="drain_began", drain_s=drain_s))
        for task in self._background:
            task.cancel()
        self._app_state.drain()  # ends the streams of jobs and of the live view; their clients reconnect elsewhere
        loop = asyncio.get_running_loop()
        stop = loop.call_later(drain_s, self._app_state.stop)
        abort = loop.call_later(drain_s + _REJECT_GRACE_S, self._abort_connections)
        await super().shutdown(sockets)
        stop.cancel()
        abort.cancel()
        for last in (self._linking, self._following):  # only now: what was in flight needed its versions
            if last is not None:
                last.cancel()
        log.info("drained", extra=fields(event="drain_ended"))

    async def _follow_supervisor(self, control_fd: int, name: str) -> None:
        async for message in follow_supervisor(control_fd):
            match message:
                case NumFrontends(count):
                    self._share_clients(count)
                case Retire():
                    declarations.FRONTEND_STOPS.labels(name).inc()
                    self._background.append(asyncio.create_task(self._retire()))

    def _share_clients(self, num_frontends: int) -> None:
        """Share limits with the other front ends, and connections if they have become more.

        Of n front ends' connections, one in n is closed after its next response. Its client's next connection goes to
        a front end that has time for it: rather to the new one.
        """
        if num_frontends > self._num_frontends:
            for connection in list(self._connections)[::num_frontends]:
                connection.close_after_response()
        self._num_frontends = num_frontends
        self._app_state.share_limits(num_frontends)

    @property
    def _connections(self) -> set[TimeoutHttpProtocol]:
        return self.server_state.connections  # type: ignore[return-value]

    async def _retire(self) -> None:
        """Accept no more connections, and stop when all clients have left and jobs and gRPC calls have ended.

        An idle connection stays open until its client has used it once more, or for as long as any idle one: no request
        is sent into a connection that is being closed.
        """
        log.info("retiring", extra=fields(event="retirement_began"))
        declarations.FRONTENDS.set(0)
        limit_s = self._settings.request_timeout_s + _KEEP_ALIVE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                ending = asyncio.gather(self._stop_accepting(), self._app_state.retire(limit_s))
                while not ending.done() or self._connections:
                    for connection in self._connections:
                        connection.close_after_response()
                    await asyncio.sleep(_RETIRE_POLL_S)
                await ending
        self.should_exit = True

    async def _stop_accepting(self) -> None:
        for server in self.servers:
            if isinstance(server, TlsServer):
                await server.stop_accepting()
            else:
                server.close()

    def _abort_connections(self) -> None:
        """Close the connections of clients that have not read their responses, which cancels their requests."""
        for connection in self.server_state.connections:
            connection.transport.abort()  # the event loop removes it from the set later


def main() -> None:
    """Read the task from the command line and run it."""
    task = msgspec.json.decode(sys.argv[1], type=FrontendTask)
    leave_signals_to_supervisor()
    die_with_parent(STOP_SIGNAL, task.parent_pid)
    with logging_here(task.name, task.config.log_level, task.config.log_format):
        try:
            run(task)
        except SetupError as error:
            log.error("%s", error.message)
            sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
