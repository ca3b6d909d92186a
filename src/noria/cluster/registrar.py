"""The registrar of a server on Ray, and the front ends' link to it. Without Ray: `registrar_replica.py` is the actor.

It is the deployer of one machine, for engines that come and go. A front end calls it twice a second: it reports what
its requests did, and gets the routes. So whatever fails is tried again half a second later:

    registry      the registrar starts when it has answered once; until then, front ends get no routes
    registrar     front ends keep their routes and their counts until another one answers; what a lost call had is lost,
                  so that the judge counts nothing twice
    engine        one that starts has the control of its endpoint (`deployed_model.py`), and gets the rest here
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from noria.canary.windows import FrontendReport
from noria.config import Config
from noria.errors import RegistryUnavailable
from noria.frontend.engines.registrar_link import INTERVAL_S, RegistrarExchange
from noria.frontend.engines.submission import Submission
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.observe.logs.log_record import fields
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.routes import Routes
from noria.protocol.transport import EngineEndpoint
from noria.registrar.deployer import Deployer
from noria.registrar.mount_client import MountClient
from noria.registrar.process import POLL_S, open_access, poll_until
from noria.registrar.statistics_keeper import StatisticsKeeper
from noria.registry.statistics.file import read_statistics, statistics_file
from noria.statistics.windows import Snapshot

_CALL_TIMEOUT_S = 5.0  # a front end that reports nothing for ten seconds counts as ended

Call = Callable[[bytes], Awaitable[bytes]]
"""Calls `ClusterRegistrar.exchange` wherever it is; raises whatever Ray does if it is nowhere."""

log = logging.getLogger("noria.registrar")


class RegistrarReply(msgspec.Struct, frozen=True):
    """The registrar's reply to a front end."""

    routes: Routes | None  # None: not known yet
    configured: dict[str, str]  # fingerprints of the configuration's models, by name


class ClusterRegistrar:
    """Carries out deployments on the engine replicas that `set_engines` names."""

    def __init__(self, config: Config, models: Mapping[str, AnyModelSpec]) -> None:
        """`models` are the configuration's, by the deployment of their engines."""
        self._models = models
        self._registry = open_access(config, uuid.uuid4().hex)  # a replica that starts again waits for the leases
        self._source_roots = config.registry.source_roots
        self._statistics_file = statistics_file(config)
        self._keeper = StatisticsKeeper(config.statistics.window_s, self._statistics_file, self._registry)
        self._engines: list[MountClient] = []  # the deployer's
        self._following: dict[EngineEndpoint, tuple[MountClient, asyncio.Task[None]]] = {}
        self._routes: Routes | None = None
        self._deployer: Deployer | None = None

    def set_engines(self, deployment: str, endpoints: Sequence[EngineEndpoint]) -> None:
        """Carry out deployments on these replicas of an engine deployment from now on."""
        if deployment not in self._models:  # belongs to another application of this process
            return
        for left in [each for each in self._following if each.group == deployment and each not in endpoints]:
            engine, task = self._following.pop(left)
            self._engines.remove(engine)
            engine.leave()
            task.cancel()
        kind = self._models[deployment].kind
        others = {spec.name for name, spec in self._models.items() if name != deployment}
        for new in [each for each in endpoints if each not in self._following]:
            engine = MountClient(new.name, new.address, kind, new.secret_key, others)
            self._engines.append(engine)
            self._following[new] = engine, asyncio.create_task(engine.run())

    async def run(self) -> None:
        """Carry out deployments until cancelled."""
        self._keeper.restore()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keeper.run())
                group.create_task(self._deploy())
        finally:
            if self._deployer is not None:
                await self._deployer.close()
            for _, task in self._following.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._following.values()), return_exceptions=True)
            await self._registry.close()

    async def _deploy(self) -> None:
        while (state := await self._registry.read()) is None:  # noqa: ASYNC110 - polls a database
            await asyncio.sleep(POLL_S)
        self._publish(state.routes)
        models = list(self._models.values())
        self._deployer = Deployer(
            models, self._engines, self._registry, self._publish, state.routes, roots=self._source_roots
        )
        await poll_until(asyncio.Event(), self._deployer)

    def _publish(self, routes: Routes) -> None:
        self._routes = routes

    def exchange(self, report: bytes) -> bytes:
        """Take a front end's report, if it has one, and return a `RegistrarReply`."""
        if report:
            decoded = msgspec.msgpack.decode(report, type=FrontendReport)
            if self._deployer is not None:
                self._deployer.add_report(decoded)
            self._keeper.add(decoded.statistics)
        configured = {spec.name: spec.fingerprint for spec in self._models.values()}
        return msgspec.msgpack.encode(RegistrarReply(self._routes, configured))

    async def statistics(self) -> bytes:
        """Return what all front ends counted, for `statistics_of`. Raises ConfigError: its file is damaged."""
        return msgspec.msgpack.encode(await asyncio.to_thread(read_statistics, self._statistics_file))


async def statistics_of(call: Callable[[], Awaitable[bytes]]) -> Snapshot | None:
    """Return what the registrar has counted; None: nothing. `call` calls its `statistics`, wherever it is.

    Raises RegistryUnavailable: it does not answer, or cannot read its file.
    """
    try:
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            content = await call()
    except Exception as error:  # Ray has many
        raise RegistryUnavailable(
            "the registrar does not return the statistics; the server's log has the reason.",
            retry_after_s=_CALL_TIMEOUT_S,
        ) from error
    return await asyncio.to_thread(msgspec.msgpack.decode, content, type=Snapshot | None)


class ClusterRegistrarLink:
    """A front end's link to the registrar."""

    def __init__(
        self, submission: Submission, name: str, call: Call, statistics: StatisticsRecorder | None = None
    ) -> None:
        """`name` is this front end's."""
        self._versions, self._call = submission.versions, call
        self._exchange = RegistrarExchange(submission, name, statistics)
        self._answers = False  # whether the last call was answered
        self.has_routes = asyncio.Event()

    async def run(self) -> None:
        """Follow and report, until cancelled."""
        while True:
            try:
                await self.call_once()
            except Exception:  # a front end without its link would keep old routes, and all counts
                log.exception("the link to the registrar failed; it goes on")
            await asyncio.sleep(INTERVAL_S)

    async def call_once(self) -> None:
        """Report, and follow the reply. While the registrar does not answer, the counts are kept for it."""
        report = msgspec.msgpack.encode(self._exchange.report()) if self._answers else b""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                reply = msgspec.msgpack.decode(await self._call(report), type=RegistrarReply)
        except Exception as error:  # Ray has many; it starts the registrar again
            if self._answers or not self.has_routes.is_set():
                extra = fields(event="registrar_away")
                log.warning("the registrar does not answer: %s", str(error) or type(error).__name__, extra=extra)
            self._answers = False
            return
        self._answers = True
        self._versions.configure(reply.configured)
        if reply.routes is not None:
            self._exchange.follow(reply.routes)
            self.has_routes.set()
