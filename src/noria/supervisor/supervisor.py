"""PROCESS: starts the other processes, waits until they serve, restarts them when they end, and stops them in order.

It owns what outlives a child: the listening socket, so that no connection is refused while a front end restarts, and a
private directory with the engines' socket addresses and the metrics files. `child_keeper.py` starts the processes, and
pure modules decide: whether and when a child restarts, whether an engine hangs, how an engine ended. This module knows
no requests and no images, and of an engine only whether it is ready.
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
from collections.abc import Sequence

import setproctitle

from noria.config import Config
from noria.folders import data_folder
from noria.frontend.access.api_keys import read_keys
from noria.frontend.access.request_origin import check_hosts
from noria.frontend.access.trusted_proxies import check_proxies
from noria.frontend.server.tls import check_certificate
from noria.jobs.results import reject_password
from noria.jobs.webhooks.signing import secret_file
from noria.models.adapters.hub_adapters import download_hub_adapters
from noria.observe.cgroup import cpu_limit, usable_cores
from noria.observe.logs.log_record import fields
from noria.observe.metrics.mmap_writer import BYTES_PER_PROCESS, has_space
from noria.observe.traces.setup import check_traces
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.process_signals import SAME_ORDER_S, ignore_signals_until_exit
from noria.settings import empty_list_warnings
from noria.statistics.variables import Declarations
from noria.supervisor.announcements import notify, print_ready_banner, ready_banner
from noria.supervisor.child_keeper import ENGINE_STOP_TIMEOUT_S, ChildKeeper, CommandBuilder, child_command
from noria.supervisor.child_process import PING_INTERVAL_S, Child, FrontendChild
from noria.supervisor.child_tasks import ServerChildren
from noria.supervisor.frontend_group import FrontendGroup
from noria.supervisor.frontend_scaler import process_bounds
from noria.supervisor.listener import open_listeners, raise_file_limit, server_url, wait_until_answering, warn_if_open
from noria.supervisor.log_collector import LogCollector, collecting_logs
from noria.supervisor.orphans import OrphanReaper
from noria.supervisor.private_folder import make_young, private_folder, removed_path
from noria.supervisor.restart_policy import GiveUp
from noria.supervisor.served_models import engine_groups, open_models

log = logging.getLogger("noria.supervisor")

# After `frontend.drain_s` a front end only closes its connections and logs.
FRONTEND_STOP_TIMEOUT_S = 5.0
REGISTRAR_STOP_TIMEOUT_S = 3.0
MAKE_YOUNG_EVERY_S = 3600.0  # cleaners of temporary files keep what is younger than some days


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
        status = _serve(config, build_command, log_collector, started_s)
    if log_collector.failure:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"noria: error: {log_collector.failure}\n")  # the last line, below the log
    return status


def _serve(config: Config, build_command: CommandBuilder, log_collector: LogCollector, started_s: float) -> int:
    for warning in empty_list_warnings(os.environ, config):
        log.warning("%s", warning, extra=fields(event="empty_variable"))
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
        keeper = ChildKeeper(directory, log_collector, build_command)
        supervisor = Supervisor(config, models, listeners, directory, log_collector, keeper, num_frontends, started_s)
        return asyncio.run(supervisor.run())


class Supervisor:
    """A run of the server, from the start of the first child to the end of the last."""

    def __init__(
        self,
        config: Config,
        models: Sequence[AnyModelSpec],  # models of the configuration
        listeners: Sequence[socket.socket],  # sockets of the server; then of its metrics, if they have one
        directory: str,
        log_collector: LogCollector,
        keeper: ChildKeeper,
        num_frontends: tuple[int, int],  # the fewest and the most
        started_s: float,
    ) -> None:
        self._models, self._listeners, self._directory, self._started_s = models, listeners, directory, started_s
        self._config, self._log_collector, self._keeper = config, log_collector, keeper
        self._url = server_url(listeners[0], has_tls=bool(config.frontend.ssl_certfile))
        children = ServerChildren(config, models, listeners, directory)
        self._engines, self._registrars = children.engines(), children.registrars()
        self._frontends = FrontendGroup(
            num_frontends,
            # `is_first`: none runs yet; else the server runs already, and does not depend on it.
            lambda name, number: children.frontend(name, number, is_first=not keeper.tasks),
        )
        self._ignoring_signals_until = 0.0
        self._exit_status = 0

    async def run(self) -> int:
        """Start the children, serve, and stop them; return the exit status."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup SIGHUP stays ignored.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        for child in self._children:
            self._start(child)
        until_stop = [asyncio.create_task(each) for each in (self._frontends.scale(self._start), self._watch())]
        background = [asyncio.create_task(self._wait_until_ready()), *until_stop]
        stop_requested = asyncio.create_task(self._keeper.stopping.wait())
        await asyncio.wait([stop_requested, *background], return_when=asyncio.FIRST_COMPLETED)
        self._keeper.stopping.set()  # also after an internal error, which is raised below
        notify("STOPPING=1")
        # Front ends close their copies too: new connections are refused instead of left waiting.
        for listener in self._listeners:
            listener.close()
        for task in until_stop:  # a front end that drains has its own limit
            task.cancel()
        frontends_grace_s = self._config.frontend.drain_s + FRONTEND_STOP_TIMEOUT_S
        await asyncio.gather(  # the registrar at once: it must release no model that a draining front end needs
            self._keeper.stop(self._registrars, REGISTRAR_STOP_TIMEOUT_S),
            self._keeper.stop(self._frontends.children, frontends_grace_s),
        )
        await self._keeper.stop(self._engines, ENGINE_STOP_TIMEOUT_S)
        for task in background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._log_collector.close()
        for child_task in self._keeper.tasks.values():
            child_task.result()  # raises the internal error of a task, now that all children have ended
        log.info("stopped", extra=fields(event="stopped", status=self._exit_status))
        ignore_signals_until_exit(loop.remove_signal_handler)
        return self._exit_status

    def _on_signal(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        if now < self._ignoring_signals_until:
            log.debug("%s is the same order", signum.name, extra=fields(event="signal_repeated"))
        elif self._keeper.stopping.is_set():
            log.warning("%s again: stopping immediately", signum.name, extra=fields(event="stopping_at_once"))
            self._exit_status = self._exit_status or 128 + signum
            self._keeper.killing.set()
        else:
            message = "%s: finishing requests in flight; a second signal stops immediately"
            log.info(message, signum.name, extra=fields(event="stopping", signal=signum.name))
            self._ignoring_signals_until = now + SAME_ORDER_S
            self._keeper.stopping.set()

    def _start(self, child: Child) -> None:
        self._keeper.start(child).add_done_callback(functools.partial(self._on_child_done, child))

    def _on_child_done(self, child: Child, task: asyncio.Task[GiveUp | None]) -> None:
        end = None if task.cancelled() or task.exception() else task.result()
        if isinstance(end, GiveUp):
            if self._log_collector.given_up is None:  # the first of several counts
                self._exit_status, self._log_collector.given_up = end.exit_status, (child.name, end.reason)
        elif isinstance(child, FrontendChild) and not self._keeper.stopping.is_set() and not task.exception():
            del self._keeper.tasks[child.name]
            self._frontends.remove(child)
            return
        self._keeper.stopping.set()  # also after an internal error, which `run` raises

    async def _wait_until_ready(self) -> None:
        """Monitor the engines; print the ready banner once all of them and a front end are ready."""
        ready = [asyncio.Event() for _ in self._engines]
        async with asyncio.TaskGroup() as group:
            for engine, event in zip(self._engines, ready, strict=True):
                group.create_task(engine.monitor(event.set))
            group.create_task(self._announce_when_ready(ready))

    @property
    def _children(self) -> Sequence[Child]:
        return (*self._engines, *self._frontends.children, *self._registrars)

    async def _watch(self) -> None:
        """Ping front ends and the registrar at regular intervals, kill those that hang. Watch the private folder."""
        make_young_at = 0.0
        reaper = OrphanReaper() if os.getpid() == 1 else None  # the init of a container
        while not self._keeper.stopping.is_set():
            now = time.monotonic()
            for child in (*self._frontends.children, *self._registrars):
                child.ping(now)
            if reaper is not None:
                reaper.reap([child.pid for child in self._children])
            self._stop_if_folder_is_removed()
            if now >= make_young_at:
                make_young(self._directory)
                make_young_at = now + MAKE_YOUNG_EVERY_S
            await asyncio.sleep(PING_INTERVAL_S)

    def _stop_if_folder_is_removed(self) -> None:
        """Requests in flight have their connections and are finished; processes that start would reach no other."""
        sockets = [engine.task.address.removeprefix("ipc://") for engine in self._engines if engine.is_ready]
        if (path := removed_path(self._directory, sockets)) is not None:
            reason = f"{path} was removed, maybe by a cleaner of temporary files: no process can be started again"
            log.error("%s; stopping", reason, extra=fields(event="temporary_folder_removed", path=path))
            self._log_collector.given_up = (None, reason)
            self._exit_status = 1
            self._keeper.stopping.set()

    async def _announce_when_ready(self, engines_ready: list[asyncio.Event]) -> None:
        await wait_until_answering(self._url)
        for frontend in self._frontends.children:
            frontend.restart_policy.ready()
        for event in engines_ready:
            await event.wait()
        took_s = time.monotonic() - self._started_s
        has_api_keys = bool(self._config.frontend.api_keys_file)
        notify("READY=1")
        print_ready_banner(ready_banner(took_s, self._models, self._url, has_api_keys=has_api_keys))


def _check_space(directory: str, num_processes: int) -> None:
    """Log a warning if the metrics of all processes do not fit the temporary folder."""
    if not has_space(directory, num_processes):
        message = "%s has less than the %d bytes that metrics may need: /metrics may be incomplete or empty"
        log.warning(message, directory, num_processes * BYTES_PER_PROCESS, extra=fields(event="metrics_not_written"))
