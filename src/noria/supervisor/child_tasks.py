"""The children of one server as its supervisor starts them: their tasks, addresses and models."""

import functools
import logging
import os
import signal
import socket
import uuid
from collections.abc import Callable, Sequence

from noria.config import Config
from noria.errors import NoriaError
from noria.observe.cgroup import memory_events, num_oom_kills
from noria.observe.logs.log_record import fields
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import engine_name
from noria.protocol.routes import Target
from noria.registry.deployments.routed_models import routed_models
from noria.registry.deployments.routes_file import read_routes, routes_file
from noria.supervisor.child_process import Child, EngineChild, FrontendChild
from noria.supervisor.hang_detector import HangDetector
from noria.supervisor.private_folder import check_address_lengths
from noria.supervisor.restart_policy import RestartPolicy
from noria.supervisor.served_models import divide_cores, endpoint_models, engine_groups

# A front end answers within 1 s; the rest is a margin for a busy machine.
CHILD_READY_AFTER_S = 3.0

log = logging.getLogger("noria.supervisor")


class ServerChildren:
    """Makes the children of one server."""

    def __init__(
        self, config: Config, configured: Sequence[AnyModelSpec], listeners: Sequence[socket.socket], directory: str
    ) -> None:
        """`configured` are the models of the configuration, `directory` is where sockets are.

        Raises:
            ConfigError: paths in `directory` are too long for sockets, or encoders leave images no core.

        """
        self._config, self._configured, self._listeners, self._directory = config, configured, listeners, directory
        # Children are in the same control group as this process.
        self._num_oom_kills = functools.partial(num_oom_kills, memory_events())
        self._server_id = uuid.uuid4().hex
        self._served = self.models()  # at the start
        self._groups = engine_groups(config, self._served)
        self._addresses = [f"ipc://{directory}/{engine_name(index)}" for index in range(len(self._groups))]
        self._reports_address = f"ipc://{directory}/registrar"
        check_address_lengths([*self._addresses, self._reports_address])

    def models(self) -> list[AnyModelSpec]:
        """Return the models to serve: those of the configuration, and what the last routes name instead or beside."""
        if not self._config.registry.deployments:
            return list(self._configured)
        return routed_models(self._configured, read_routes(routes_file(self._config)), log_unusable)

    def engines(self) -> list[EngineChild]:
        """Return all engines. Raises ConfigError."""
        return [
            self._engine(engine_name(index), device, held, self._addresses[index])
            for index, (device, held) in enumerate(self._groups)
        ]

    def _engine(self, name: str, device: str, models: Sequence[AnyModelSpec], address: str) -> EngineChild:
        config, niceness = divide_cores(self._config.engine, models, self._served)
        task: dict[str, object] = {
            "config": config,
            "niceness": niceness,
            "models": models,
            "device": device,
            "address": address,
            "name": name,
            "crash_journal": f"{self._directory}/{name}.crash_journal",
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
            models_now=self._models_of(models[0].kind),
        )

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
        task: dict[str, object] = {
            "config": self._config,
            "fd": fd,
            "metrics_fd": metrics_fds[0] if metrics_fds else None,
            "engines": self._addresses,
            "registrar": self._reports_address if self._config.registry.deployments else "",
            "endpoint_models": endpoint_models(self._config, self._configured),
            "configured_versions": {spec.name: spec.fingerprint for spec in self._configured},
            "default_models": {spec.kind: spec.name for spec in reversed(self._configured)},
            "parent_pid": os.getpid(),
            "worker_id": f"{self._server_id}/{name}",
            "num_frontends": num_frontends,
            "start_reason": "initial" if is_first else "load",
        }
        return FrontendChild(
            kind="frontend",
            name=name,
            task=task,
            restart_policy=RestartPolicy(assumed_ready_after_s=CHILD_READY_AFTER_S, was_ever_ready=not is_first),
            num_oom_kills=self._num_oom_kills,
            pass_fds=tuple(fds),
        )

    def registrars(self) -> list[Child]:
        """Return the registrar, if the server follows deployments. It is never given up: the server runs without it."""
        if not self._config.registry.deployments:
            return []
        engines = [
            {"name": engine_name(index), "address": self._addresses[index], "kind": held[0].kind}
            for index, (_, held) in enumerate(self._groups)
        ]
        task: dict[str, object] = {
            "config": self._config,
            "engines": engines,
            "models": self._configured,
            "reports_address": self._reports_address,
            "owner": self._server_id,
            "parent_pid": os.getpid(),
        }
        policy = RestartPolicy(assumed_ready_after_s=CHILD_READY_AFTER_S, was_ever_ready=True)
        return [
            Child(
                kind="registrar",
                name="registrar",
                task=task,
                restart_policy=policy,
                num_oom_kills=self._num_oom_kills,
            )
        ]


def log_unusable(endpoint: str, target: Target, reason: str) -> None:
    """Log that a deployed version cannot be opened here; the configuration's model serves in its place."""
    extra = fields(event="version_unusable", endpoint=endpoint, deployment=target.deployment)
    log.error("deployment %d of %s: %s", target.deployment, endpoint, reason, extra=extra)


def describe_status(status: int) -> str:
    """How a process ended, for messages: "with status 1", "by SIGKILL"."""
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
