"""PROCESS: the registrar, `python -m noria.registrar.process JSON`, started by the supervisor; JSON is a task.

It carries out the deployments of one server, and keeps its statistics. The server serves on without it; when it starts
again, it goes on where the registry and the engines are.
"""

import asyncio
import contextlib
import functools
import logging
import os
import sys
import time

import msgspec
import setproctitle
import sqlalchemy as sa
import zmq

from noria.canary.windows import FrontendReport
from noria.config import Config
from noria.errors import ConfigError, SetupError
from noria.folders import data_folder
from noria.jobs.database.schema import open_jobs_database
from noria.models.checkpoint_folder import checkpoint_files
from noria.observe.logs.log_record import fields
from noria.observe.logs.setup import logging_here
from noria.protocol.process_signals import STOP_SIGNAL, die_with_parent, leave_signals_to_supervisor
from noria.protocol.routes import Routes
from noria.protocol.supervisor_link import follow_supervisor
from noria.protocol.tasks import RegistrarTask
from noria.registrar.deployer import Deployer
from noria.registrar.mount_client import MountClient
from noria.registrar.registry_access import RegistryAccess
from noria.registrar.statistics_keeper import StatisticsKeeper
from noria.registry.deployments.routes_file import read_routes, routes_file, write_routes
from noria.registry.schema import open_registry, registry_url
from noria.registry.statistics.file import statistics_file
from noria.registry.watching import watch

POLL_S = 0.5

log = logging.getLogger("noria.registrar")


async def run(task: RegistrarTask) -> None:
    """Carry out deployments until the supervisor's order to end."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(STOP_SIGNAL, stopping.set)
    file = routes_file(task.config)
    try:
        routes = read_routes(file)
    except ConfigError as error:
        log.error("%s", error.message, extra=fields(event="routes_unreadable"))
        routes = Routes()
    checkpoints = checkpoint_files(task.config.engine.checkpoints, task.checkpoints)
    engines = [MountClient(each.name, each.address, each.kind, others=checkpoints) for each in task.engines]
    registry = open_access(task.config, task.owner)
    deployer = Deployer(
        task.models,
        engines,
        registry,
        functools.partial(write_routes, file),
        routes,
        roots=task.config.registry.source_roots,
        checkpoints=checkpoints,
    )
    keeper = StatisticsKeeper(task.config.statistics.window_s, statistics_file(task.config), registry)
    keeper.restore()
    background = [asyncio.create_task(engine.run()) for engine in engines]
    background.append(asyncio.create_task(take_reports(deployer, keeper, task.reports_address)))
    background.append(asyncio.create_task(keeper.run()))
    background.append(asyncio.create_task(poll_until(stopping, deployer)))
    if task.control_fd is not None:
        background.append(asyncio.create_task(answer_pings(task.control_fd)))
    try:
        done, _ = await asyncio.wait(background, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()  # raises what ended it: the supervisor starts the registrar again
    finally:
        await deployer.close()
        for each in background:
            each.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await registry.close()


def open_access(config: Config, owner: str) -> RegistryAccess:
    """Return the access of the registrar `owner`, which opens the databases when it needs them."""
    jobs = config.jobs
    open_jobs = functools.partial(
        open_jobs_database, jobs.database, data_folder(config, os.environ), jobs.database_timeout_s
    )
    return RegistryAccess(functools.partial(_open_and_watch, config), open_jobs, owner)


def _open_and_watch(config: Config) -> sa.Engine:
    engine = open_registry(config)
    watch(registry_url(config))
    return engine


async def poll_until(stopping: asyncio.Event, deployer: Deployer) -> None:
    """Carry out deployments until `stopping` is set."""
    while not stopping.is_set():
        started = time.monotonic()
        try:
            await deployer.poll()
        except Exception:  # the next poll may succeed
            log.exception("a poll of the registrar failed; it is repeated")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, started + POLL_S - time.monotonic())):
                await stopping.wait()


async def answer_pings(control_fd: int) -> None:
    """Answer the supervisor's pings, until cancelled."""
    async for _ in follow_supervisor(control_fd):
        pass


async def take_reports(deployer: Deployer, keeper: StatisticsKeeper, address: str) -> None:
    """Pass the front ends' reports to the deployer and to the keeper of statistics, until cancelled."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(address)
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(socket.fileno(), readable.set)
    try:
        while True:
            readable.clear()
            while int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                try:
                    report = msgspec.msgpack.decode(socket.recv(zmq.DONTWAIT), type=FrontendReport)
                except (msgspec.MsgspecError, ValueError) as error:  # impossible counts, for instance
                    log.warning("dropped an invalid report of a front end: %s", error)
                    continue
                deployer.add_report(report)
                keeper.add(report.statistics)
            # The descriptor is not readable for what arrived before it was last looked at (zmq_getsockopt(3)).
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await readable.wait()
    finally:
        loop.remove_reader(socket.fileno())
        socket.close(linger=0)
        context.term()


def main() -> None:
    """Read the task from the command line and run it."""
    task = msgspec.json.decode(sys.argv[1], type=RegistrarTask)
    leave_signals_to_supervisor()
    die_with_parent(STOP_SIGNAL, task.parent_pid)
    setproctitle.setproctitle("noria registrar")
    with logging_here("registrar", task.config.log_level, task.config.log_format):
        try:
            asyncio.run(run(task))
        except SetupError as error:
            log.error("%s", error.message)
            sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
