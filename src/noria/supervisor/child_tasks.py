"""The children of one server as its supervisor starts them: their tasks, addresses and models."""

import logging
import socket
import uuid
from collections.abc import Callable, Sequence

from noria.config import Config
from noria.errors import NoriaError
from noria.observe.logs.log_record import fields
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.routes import Target
from noria.protocol.tasks import EngineAddress, EngineTask, FrontendTask, RegistrarTask, engine_name
from noria.registry.deployments.routed_models import routed_models
from noria.registry.deployments.routes_file import read_routes, routes_file
from noria.supervisor.child_process import ControlledChild, EngineChild, FrontendChild, engine_child
from noria.supervisor.hang_detector import HangDetector
from noria.supervisor.private_folder import check_address_lengths
from noria.supervisor.restart_policy import RestartPolicy
from noria.supervisor.served_models import divide_cores, endpoint_models, engine_groups, open_checkpoints

# A front end answers within 1 s; the rest is a margin for a busy machine.
CHILD_READY_AFTER_S = 3.0
# The shortest timeout of front ends and the registrar: one that is only busy, with a large body or a machine short of
# memory, must not be killed, with the requests of all its clients.
MIN_HANG_TIMEOUT_S = 60.0

log = logging.getLogger("noria.supervisor")


class ServerChildren:
    """Makes the children of one server."""

    def __init__(
        self, config: Config, configured: Sequence[AnyModelSpec], listeners: Sequence[socket.socket], directory: str
    ) -> None:
        """`configured` are the models of the configuration, `directory` is where sockets are.

        Raises ConfigError: paths in `directory` are too long for sockets, encoders leave images no core, or as
        `open_checkpoints`.
        """
        self._config, self._configured, self._listeners, self._directory = config, configured, listeners, directory
        self._server_id = uuid.uuid4().hex
        self._served = self.models()  # at the start
        self._checkpoints = open_checkpoints(config, self._served)
        self._log_deployed_endpoints()
        self._groups = engine_groups(config, self._served)
        self._addresses = [f"ipc://{directory}/{engine_name(index)}" for index in range(len(self._groups))]
        self._reports_address = f"ipc://{directory}/registrar"
        check_address_lengths([*self._addresses, self._reports_address])

    def models(self) -> list[AnyModelSpec]:
        """Return the models to serve: those of the configuration, and what the last routes name instead or beside.

        Endpoints of kinds that the configuration does not have are left out: they would need engines of their own.
        """
        kinds = {spec.kind for spec in self._configured}
        return [spec for spec in self._routed_models() if spec.kind in kinds]

    def _routed_models(self) -> list[AnyModelSpec]:
        if not self._config.registry.deployments:
            return list(self._configured)
        routes = read_routes(routes_file(self._config))
        return routed_models(self._configured, routes, log_unusable, self._config.registry.source_roots)

    def _log_deployed_endpoints(self) -> None:
        """Log which endpoints are served, or left out, because of deployments alone."""
        configured = {spec.name for spec in self._configured}
        for spec in self._routed_models():
            if spec.name in configured:
                continue
            is_served = spec in self._served
            todo = (
                "is loaded, too" if is_served else f"is not loaded; that needs a configured model of kind {spec.kind}"
            )
            extra = fields(event="deployed_endpoint", endpoint=spec.name, served=is_served)
            log.info("the endpoint %s is deployed, not configured: it %s", spec.name, todo, extra=extra)

    def engines(self) -> list[EngineChild]:
        """Return all engines. Raises ConfigError."""
        return [self._engine(index, device, held) for index, (device, held) in enumerate(self._groups)]

    def _engine(self, index: int, device: str, models: Sequence[AnyModelSpec]) -> EngineChild:
        config, niceness = divide_cores(self._config.engine, models, self._served)
        task = EngineTask(
            config,
            tuple(models),
            device,
            self._addresses[index],
            engine_name(index),
            crash_journal=f"{self._directory}/{engine_name(index)}.crash_journal",
            log_level=self._config.log_level,
            traces_endpoint=self._config.traces_endpoint,
            niceness=niceness,
        )
        return engine_child(task, self._models_of(models[0].kind))

    def _models_of(self, kind: str) -> Callable[[], list[AnyModelSpec]]:
        """Return what returns the models of one kind; none if the routes cannot be read."""

        def models() -> list[AnyModelSpec]:
            try:
                return [spec for spec in self.models() if spec.kind == kind]
            except NoriaError as error:
                log.error("%s", error.message, extra=fields(event="routes_unreadable"))
                return []

        return models

    def frontend(self, name: str, num_frontends: int, *, is_first: bool) -> FrontendChild:
        """Return a front end. `is_first`: the server does not run yet, and depends on it."""
        fd, *metrics_fds = fds = [listener.fileno() for listener in self._listeners]
        task = FrontendTask(
            self._config,
            fd,
            self._addresses,
            metrics_fd=metrics_fds[0] if metrics_fds else None,
            registrar=self._reports_address if self._config.registry.deployments else "",
            endpoint_models=endpoint_models(self._config, self._configured),
            configured_versions={spec.name: spec.fingerprint for spec in self._configured},
            default_models={spec.kind: spec.name for spec in reversed(self._configured)},
            worker_id=f"{self._server_id}/{name}",
            checkpoints=self._checkpoints,
            num_frontends=num_frontends,
            start_reason="initial" if is_first else "load",
        )
        return FrontendChild(
            name=name,
            task=task,
            restart_policy=RestartPolicy(assumed_ready_after_s=CHILD_READY_AFTER_S, was_ever_ready=not is_first),
            hang_detector=self._hang_detector(),
            pass_fds=tuple(fds),
        )

    def _hang_detector(self) -> HangDetector:
        engine = self._config.engine
        return HangDetector(max(engine.hang_timeout_s, MIN_HANG_TIMEOUT_S), engine.start_timeout_s)

    def registrars(self) -> list[ControlledChild]:
        """Return the registrar, if the server follows deployments. It is never given up: the server runs without it."""
        if not self._config.registry.deployments:
            return []
        engines = tuple(
            EngineAddress(engine_name(index), self._addresses[index], held[0].kind)
            for index, (_, held) in enumerate(self._groups)
        )
        configured, reports_address = tuple(self._configured), self._reports_address
        task = RegistrarTask(
            self._config, engines, configured, reports_address, self._server_id, checkpoints=self._checkpoints
        )
        policy, detector = RestartPolicy(CHILD_READY_AFTER_S, was_ever_ready=True), self._hang_detector()
        return [ControlledChild(name="registrar", task=task, restart_policy=policy, hang_detector=detector)]


def log_unusable(endpoint: str, target: Target, reason: str) -> None:
    """Log that a deployed version cannot be opened here; the configuration's model serves in its place."""
    extra = fields(event="version_unusable", endpoint=endpoint, deployment=target.deployment)
    log.error("deployment %d of %s: %s", target.deployment, endpoint, reason, extra=extra)
