"""A front end's link to the registrar: follows the routes; reports requests in flight, canaries, and statistics.

The routes are in a file, so that they outlive the registrar and a front end that starts has them at once. The reports
go through a ZeroMQ PUSH socket, which keeps them while the registrar starts again.
"""

import asyncio
import contextlib
import logging
import pathlib

import msgspec
import zmq

from noria.canary.windows import FrontendReport
from noria.errors import ConfigError
from noria.folders import file_version
from noria.frontend.engines.submission import Submission
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.observe.logs.log_record import fields
from noria.protocol.routes import Routes
from noria.registry.deployments.routes_file import read_routes

INTERVAL_S = 0.5
_MAX_QUEUED_REPORTS = 120  # a minute's, while there is no registrar; later ones are dropped

log = logging.getLogger("noria.frontend")


class RegistrarExchange:
    """The data that a front end takes from the registrar and gives to it, without the transport between them."""

    def __init__(self, submission: Submission, name: str, statistics: StatisticsRecorder | None = None) -> None:
        """`name` is this front end's."""
        self._statistics = statistics or StatisticsRecorder()
        self._versions, self._shadows, self._name = submission.versions, submission.shadows, name
        self._routes = Routes()

    def follow(self, routes: Routes) -> None:
        """Follow these routes from now on."""
        if routes != self._routes:  # also of the same generation: a canary that has failed is taken out
            self._routes = routes
            self._versions.follow(routes)
            log.info(
                "routes of generation %d", routes.generation, extra=fields(event="routes", generation=routes.generation)
            )

    def report(self) -> FrontendReport:
        """Return what has happened since the last report."""
        versions = self._versions
        first_open = versions.first_open_window()  # before the rest: what ends meanwhile is in the next report
        shadows = self._shadows.take_counts()
        in_flight, ended = versions.in_flight(), versions.take_ended()
        statistics = self._statistics.take_reports()
        return FrontendReport(self._name, versions.generation, in_flight, ended, first_open, shadows, statistics)


class RegistrarLink:
    """Keeps the choice of versions up to date by the file, and sends the reports."""

    def __init__(
        self,
        submission: Submission,
        name: str,
        file: pathlib.Path,
        address: str,
        statistics: StatisticsRecorder | None = None,
    ) -> None:
        """`name` is this front end's, `file` has the routes, `address` is where the registrar takes reports."""
        self._exchange = RegistrarExchange(submission, name, statistics)
        self._file, self._address = file, address
        self._read: tuple[int, ...] | None = None  # version of the file that was read last
        self._unreadable: tuple[int, ...] | None = None  # version of the file that was last logged as damaged
        self.read_routes()

    async def run(self) -> None:
        """Follow and report, until cancelled."""
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_REPORTS)
        socket.connect(self._address)
        try:
            while True:
                try:
                    self.read_routes()
                    with contextlib.suppress(zmq.Again):
                        socket.send(msgspec.msgpack.encode(self._exchange.report()), zmq.DONTWAIT)
                except Exception:  # a front end without its link would keep old routes, and all counts
                    log.exception("the link to the registrar failed; it goes on")
                await asyncio.sleep(INTERVAL_S)
        finally:
            socket.close()
            context.term()

    def read_routes(self) -> None:
        """Follow the routes in the file, if it has changed. A damaged file changes nothing, and is logged."""
        version = file_version(self._file)
        if version in ((), self._read):  # without one, nothing was deployed yet
            return
        try:
            routes = read_routes(self._file)
        except ConfigError as error:
            if version != self._unreadable:
                log.error("%s", error.message, extra=fields(event="routes_unreadable"))
            self._unreadable = version
            return
        self._read = version
        self._exchange.follow(routes)
