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
from noria.frontend.connection import Connection
from noria.frontend.engine_link import EngineLink
from noria.jobs.service import lone_place, open_service
from noria.messages import engine_name
from noria.observe import metrics, outcomes
from noria.observe.collector import open_tracer
from noria.observe.logs import fields, logging_here
from noria.observe.process import die_with_parent

_LAST_WORDS_S = 2.0  # after a drain, to answer 503 to whom no image was drawn in time; the supervisor waits for 5
_CLOSING_S = 1.0  # after that, for what is done for clients to end with their connections; uvicorn would break it off
_KEEP_ALIVE_S = 75  # longer than clients keep an idle connection (httpx 5 s, nginx 60 s): none sends into a closing one

log = logging.getLogger("noria.frontend")


class FrontendTask(msgspec.Struct, frozen=True):
    """What the supervisor tells a front end, as JSON in its first argument."""

    config: Config
    fd: int  # a listening TCP socket, inherited
    engines: list[str]  # addresses of their channels
    parent_pid: int | None = None  # the supervisor's
    place: str = msgspec.field(default_factory=lone_place)  # `server/name`, the same in all lives of a front end


def run(config: Config, listen_fd: int, engine_addresses: list[str], place: str) -> None:
    """Serve until SIGTERM. Raises ConfigError where the jobs cannot be opened, or traces not be made."""
    setproctitle.setproctitle(f"noria frontend {place.rpartition('/')[2]}")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises again the signal that it has already obeyed
        signal.signal(number, _already_obeyed)
    metrics.expect_engines([engine_name(number) for number in range(len(engine_addresses))])
    outcomes.expect_no_model()
    metrics.FRONTEND_STARTS.labels(place.rpartition("/")[2]).inc()
    link = EngineLink(engine_addresses, config.frontend.restart_wait_s, place)
    tracer = open_tracer(config.traces_endpoint, config.traces_ratio, place.rpartition("/")[2])
    jobs = open_service(config, place, tracer)
    server = http_server(build_app(config, link, lambda: jobs, tracer), link, config.frontend)
    server.run(sockets=[socket.socket(fileno=listen_fd)])
    tracer.close()


def http_server(app: Starlette, link: EngineLink, config: FrontendConfig) -> uvicorn.Server:
    """`app` behind uvicorn, as this process runs it: uvloop, httptools, limits to its patience, and no log lines but our own."""
    return _Server(
        link,
        app.state.drain,
        config.drain_s,
        uvicorn.Config(
            app,
            loop="uvloop",
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            forwarded_allow_ips=list(config.trusted_proxies),
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.drain_s + _LAST_WORDS_S + _CLOSING_S),
        ),
    )


class _Server(uvicorn.Server):
    """uvicorn, which at the end of a drain would close the connections of whom it has not answered."""

    def __init__(self, link: EngineLink, on_drain: Callable[[], None], drain_s: float, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._link, self._on_drain, self._drain_s = link, on_drain, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain."""
        log.info("draining for up to %g s", self._drain_s, extra=fields(event="drain_began", drain_s=self._drain_s))
        self._on_drain()  # streams of jobs and wheels end, and their clients come again elsewhere
        loop = asyncio.get_running_loop()
        stop = loop.call_later(self._drain_s, self._link.stop)
        cut = loop.call_later(self._drain_s + _LAST_WORDS_S, self._cut)
        await super().shutdown(sockets)
        stop.cancel()
        cut.cancel()
        log.info("drained", extra=fields(event="drain_ended"))

    def _cut(self) -> None:
        """Leave those who have not read their answers yet: what is done for them ends as if they had left."""
        for connection in self.server_state.connections:
            connection.transport.abort()  # it is taken out of the set later, by the event loop


def _already_obeyed(_number: int, _frame: FrameType | None) -> None:
    pass


def main() -> None:
    """Read the task from the command line and do it."""
    task = msgspec.json.decode(sys.argv[1], type=FrontendTask)
    die_with_parent(parent_pid=task.parent_pid)
    with logging_here(task.place.rpartition("/")[2], task.config.log_level, task.config.log_format):
        try:
            run(task.config, task.fd, task.engines, task.place)
        except SetupError as error:
            log.error("%s", error.message)
            sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
