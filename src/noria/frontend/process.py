"""The front-end process: `python -m noria.frontend.process '{"config": …, "fd": 3, "engines": ["ipc:///…"]}'`.

The supervisor binds the port and passes the socket's descriptor, so several front ends share the port, and no
connection is lost when one of them restarts. On SIGTERM or SIGINT the process stops accepting connections, answers
requests in flight for up to `frontend.drain_s`, answers the rest with 503, and exits with status 0.
"""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from types import FrameType

import msgspec
import setproctitle
import uvicorn
from starlette.applications import Starlette

from noria.config import Config, FrontendConfig
from noria.errors import SetupError
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.connection import TimeoutHttpProtocol
from noria.frontend.http.tls import Certificate, TlsServer
from noria.jobs.service import open_job_service, random_worker_id
from noria.observe.logs.setup import fields, logging_here
from noria.observe.metrics import declarations, outcomes
from noria.observe.traces.setup import open_tracer
from noria.protocol.messages import engine_name
from noria.protocol.process_signals import die_with_parent
from noria.protocol.text import EncoderModelSpec

_REJECT_GRACE_S = 2.0  # after a drain, to answer 503 to the requests in flight; the supervisor waits for 5 s
_CLOSE_GRACE_S = 1.0  # after that, for the work of closed connections to end by itself before uvicorn cancels it
# Longer than clients keep an idle connection (httpx 5 s, nginx 60 s), so that none sends into a closing one.
_KEEP_ALIVE_S = 75
# New objects until a collection; the requests in flight alone have more than Python's 700.
_GC_THRESHOLD = 5000

log = logging.getLogger("noria.frontend")


class FrontendTask(msgspec.Struct, frozen=True):
    """The task of a front end, which the supervisor passes as JSON in the first argument."""

    config: Config
    fd: int  # a listening socket, inherited
    engines: list[str]  # the addresses of their channels
    default_models: dict[str, str] = {}  # name of the model for requests that name none, by kind
    endpoint_models: dict[str, EncoderModelSpec] = {}  # of `config.endpoints`, by the endpoint's name
    metrics_fd: int | None = None  # another listening socket, for /metrics alone
    parent_pid: int | None = None  # the supervisor's
    # `server/name`, the same after a restart.
    worker_id: str = msgspec.field(default_factory=random_worker_id)


def run(task: FrontendTask) -> None:
    """Serve until SIGTERM.

    Raises:
        ConfigError: the jobs' database, the trace exporter or the code of an endpoint cannot be opened.

    """
    config, worker_id = task.config, task.worker_id
    setproctitle.setproctitle(f"noria frontend {worker_id.rpartition('/')[2]}")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    for number in (signal.SIGTERM, signal.SIGINT):  # after a shutdown, uvicorn raises the signal again
        signal.signal(number, _ignore_signal)
    declarations.init_engine_series([engine_name(number) for number in range(len(task.engines))])
    outcomes.init_unknown_model_series()
    declarations.FRONTEND_STARTS.labels(worker_id.rpartition("/")[2]).inc()
    engine_pool = EnginePool(task.engines, config.frontend.restart_wait_s, worker_id, task.default_models)
    tracer, close_tracer = open_tracer(config.traces_endpoint, config.traces_ratio, worker_id.rpartition("/")[2])
    jobs = open_job_service(config, worker_id, tracer)
    listeners = [socket.socket(fileno=fd) for fd in (task.fd, task.metrics_fd) if fd is not None]
    metrics_port = None if task.metrics_fd is None else listeners[1].getsockname()[1]
    app = build_app(config, engine_pool, lambda: jobs, tracer, metrics_port, endpoint_models=task.endpoint_models)
    server = http_server(app, engine_pool, config.frontend)
    gc.collect()
    gc.set_threshold(_GC_THRESHOLD)
    gc.freeze()  # else each full collection would stop the event loop for 50 ms, to scan what was loaded and stays
    server.run(sockets=listeners)
    close_tracer()


def http_server(app: Starlette, engine_pool: EnginePool, config: FrontendConfig) -> uvicorn.Server:
    """Return the uvicorn server of this process: uvloop, httptools, our timeouts, and none of uvicorn's log lines.

    Raises ConfigError if the certificate cannot be used.
    """
    return _DrainingServer(
        engine_pool,
        app.state.load,
        app.state.drain,
        config.drain_s,
        Certificate(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None,
        uvicorn.Config(
            app,
            loop="uvloop",
            http=TimeoutHttpProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            forwarded_allow_ips=list(config.trusted_proxies),
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.drain_s + _REJECT_GRACE_S + _CLOSE_GRACE_S),
        ),
    )


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that drains: it answers the last requests with 503, where uvicorn would close their connections.

    With a certificate its TCP sockets speak TLS. Unix sockets never do: both ends of them are on this machine.
    """

    _should_exit = False
    _loop: asyncio.AbstractEventLoop | None = None  # that of `main_loop`

    def __init__(
        self,
        engine_pool: EnginePool,
        load: Callable[[], Awaitable[None]],
        on_drain: Callable[[], None],
        drain_s: float,
        certificate: Certificate | None,
        config: uvicorn.Config,
    ) -> None:
        super().__init__(config)
        self._engine_pool, self._load, self._on_drain, self._drain_s = engine_pool, load, on_drain, drain_s
        self._certificate = certificate
        self._following: asyncio.Task[None] | None = None
        self._told_to_exit = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Load the code of endpoints, then start listening. Raises ConfigError."""
        await self._load()
        if self._certificate is None:
            await super().startup(sockets)
            return
        with_tls = [each for each in sockets or () if each.family != socket.AF_UNIX]
        await super().startup([each for each in sockets or () if each.family == socket.AF_UNIX])
        self._following = asyncio.create_task(self._certificate.follow())
        for listener in with_tls:
            server = TlsServer(listener, self._make_protocol, self._certificate)
            self.servers.append(server)  # type: ignore[arg-type]

    def _make_protocol(self) -> TimeoutHttpProtocol:
        return TimeoutHttpProtocol(self.config, self.server_state, self.lifespan.state)

    async def main_loop(self) -> None:
        """Set the Date of responses each second, until told to exit; uvicorn's own loop looks ten times a second."""
        self._loop = asyncio.get_running_loop()
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
        log.info("draining for up to %g s", self._drain_s, extra=fields(event="drain_began", drain_s=self._drain_s))
        if self._following is not None:
            self._following.cancel()
        self._on_drain()  # ends the streams of jobs and of the live view; their clients reconnect elsewhere
        loop = asyncio.get_running_loop()
        stop = loop.call_later(self._drain_s, self._engine_pool.stop)
        abort = loop.call_later(self._drain_s + _REJECT_GRACE_S, self._abort_connections)
        await super().shutdown(sockets)
        stop.cancel()
        abort.cancel()
        log.info("drained", extra=fields(event="drain_ended"))

    def _abort_connections(self) -> None:
        """Close the connections of clients that have not read their responses, which cancels their requests."""
        for connection in self.server_state.connections:
            connection.transport.abort()  # the event loop removes it from the set later


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    pass


def main() -> None:
    """Read the task from the command line and run it."""
    task = msgspec.json.decode(sys.argv[1], type=FrontendTask)
    die_with_parent(parent_pid=task.parent_pid)
    with logging_here(task.worker_id.rpartition("/")[2], task.config.log_level, task.config.log_format):
        try:
            run(task)
        except SetupError as error:
            log.error("%s", error.message)
            sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
