"""The front-end process: `python -m noria.frontend.process '{"config": …, "fd": 3, "engines": ["ipc:///…"]}'`.

The supervisor binds the port and passes the socket's descriptor, so that several front ends share it and none loses a connection
when another restarts. SIGTERM (or SIGINT) stops accepting, answers what is in flight for up to `frontend.drain_s`, then the rest with
503, and exits 0.
"""

import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable
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
from noria.jobs.service import open_job_service, random_worker_id
from noria.observe.logs.setup import fields, logging_here
from noria.observe.metrics import declarations, outcomes
from noria.observe.traces.setup import open_tracer
from noria.protocol.messages import engine_name
from noria.protocol.process_signals import die_with_parent

_REJECT_GRACE_S = 2.0  # after a drain, to answer 503 to whom no image was drawn in time; the supervisor waits for 5
_CLOSE_GRACE_S = (
    1.0  # after that, for what is done for clients to end with their connections; uvicorn would break it off
)
_KEEP_ALIVE_S = 75  # longer than clients keep an idle connection (httpx 5 s, nginx 60 s): none sends into a closing one

log = logging.getLogger("noria.frontend")


class FrontendTask(msgspec.Struct, frozen=True):
    """What the supervisor tells a front end, as JSON in its first argument."""

    config: Config
    fd: int  # a listening TCP socket, inherited
    engines: list[str]  # addresses of their channels
    parent_pid: int | None = None  # the supervisor's
    worker_id: str = msgspec.field(
        default_factory=random_worker_id
    )  # `server/name`, the same in all lives of a front end


def run(config: Config, listen_fd: int, engine_addresses: list[str], worker_id: str) -> None:
    """Serve until SIGTERM. Raises ConfigError where the jobs cannot be opened, or traces not be made."""
    setproctitle.setproctitle(f"noria frontend {worker_id.rpartition('/')[2]}")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises again the signal that it has already obeyed
        signal.signal(number, _ignore_signal)
    declarations.init_engine_series([engine_name(number) for number in range(len(engine_addresses))])
    outcomes.init_unknown_model_series()
    declarations.FRONTEND_STARTS.labels(worker_id.rpartition("/")[2]).inc()
    engine_pool = EnginePool(engine_addresses, config.frontend.restart_wait_s, worker_id)
    tracer = open_tracer(config.traces_endpoint, config.traces_ratio, worker_id.rpartition("/")[2])
    jobs = open_job_service(config, worker_id, tracer)
    server = http_server(build_app(config, engine_pool, lambda: jobs, tracer), engine_pool, config.frontend)
    server.run(sockets=[socket.socket(fileno=listen_fd)])
    tracer.close()


def http_server(app: Starlette, engine_pool: EnginePool, config: FrontendConfig) -> uvicorn.Server:
    """`app` behind uvicorn, as this process runs it: uvloop, httptools, limits to its patience, and no log lines but our own."""
    return _DrainingServer(
        engine_pool,
        app.state.drain,
        config.drain_s,
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
    """uvicorn, which at the end of a drain would close the connections of whom it has not answered."""

    def __init__(
        self, engine_pool: EnginePool, on_drain: Callable[[], None], drain_s: float, config: uvicorn.Config
    ) -> None:
        super().__init__(config)
        self._engine_pool, self._on_drain, self._drain_s = engine_pool, on_drain, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain."""
        log.info("draining for up to %g s", self._drain_s, extra=fields(event="drain_began", drain_s=self._drain_s))
        self._on_drain()  # streams of jobs and wheels end, and their clients come again elsewhere
        loop = asyncio.get_running_loop()
        stop = loop.call_later(self._drain_s, self._engine_pool.stop)
        abort = loop.call_later(self._drain_s + _REJECT_GRACE_S, self._abort_connections)
        await super().shutdown(sockets)
        stop.cancel()
        abort.cancel()
        log.info("drained", extra=fields(event="drain_ended"))

    def _abort_connections(self) -> None:
        """Leave those who have not read their answers yet: what is done for them ends as if they had left."""
        for connection in self.server_state.connections:
            connection.transport.abort()  # it is taken out of the set later, by the event loop


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    pass


def main() -> None:
    """Read the task from the command line and do it."""
    task = msgspec.json.decode(sys.argv[1], type=FrontendTask)
    die_with_parent(parent_pid=task.parent_pid)
    with logging_here(task.worker_id.rpartition("/")[2], task.config.log_level, task.config.log_format):
        try:
            run(task.config, task.fd, task.engines, task.worker_id)
        except SetupError as error:
            log.error("%s", error.message)
            sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
