"""The registry as the registrar uses it: in a thread, with its leases; an error is logged once and means "not now"."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from noria.canary.judge import JudgeState, Verdict
from noria.canary.ramp import RampState
from noria.canary.shadow import ShadowState
from noria.errors import ConfigError, NoriaError, RegistryError
from noria.jobs.database.store import is_version_needed
from noria.observe.logs.log_record import fields
from noria.protocol.model_spec import ModelKey
from noria.protocol.routes import Routes
from noria.registry.changes import Change
from noria.registry.deployments.states import Deployment
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_store import ModelStore
from noria.registry.statistics.baselines import BaselineStore
from noria.registry.versions import Version
from noria.statistics.windows import Reference

_LEASE_S = 15.0
_RENEW_BEFORE_S = 7.0

T = TypeVar("T")

log = logging.getLogger("noria.registrar")


class RegistryAwayError(Exception):
    """The registry does not answer."""


@dataclass(frozen=True)
class RegistryState:
    """The state that the registry wants now."""

    routes: Routes
    unfinished: tuple[Deployment, ...]


class RegistryAccess:
    """The registry and the jobs, as one registrar, `owner`, reads and writes them."""

    def __init__(
        self,
        open_registry: Callable[[], sa.Engine],
        open_jobs: Callable[[], sa.Engine],
        owner: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`open_registry` and `open_jobs` raise ConfigError; they are called again until they succeed once."""
        self._open_registry, self._open_jobs, self._owner, self._clock = open_registry, open_jobs, owner, clock
        self._engine: sa.Engine | None = None
        self._jobs: sa.Engine | None = None
        self._leased_until: dict[int, float] = {}  # by deployment
        self._away: set[str] = set()  # databases that did not answer the last time
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="registry")

    async def close(self) -> None:
        """End the thread and the connections."""
        await self._call(self._dispose)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self) -> RegistryState | None:
        """Return what the registry wants; None: it is away."""
        state = await self._try(self._read)
        if state is not None:
            unfinished = {deployment.id for deployment in state.unfinished}
            self._leased_until = {key: at for key, at in self._leased_until.items() if key in unfinished}
        return state

    def _read(self) -> RegistryState:
        store = self._store()
        store.deploy_followed(Change(self._clock(), "registrar"))
        return RegistryState(store.routes(), tuple(store.unfinished()))

    async def lease(self, deployment_id: int) -> bool:
        """Take or renew the lease of a deployment; return whether this registrar holds it."""
        now = self._clock()
        if self._leased_until.get(deployment_id, 0.0) - now > _RENEW_BEFORE_S:
            return True
        if not await self._try(lambda: self._store().try_lease(deployment_id, self._owner, now, _LEASE_S)):
            self._leased_until.pop(deployment_id, None)
            return False
        self._leased_until[deployment_id] = now + _LEASE_S
        return True

    async def manifest(self, version: Version) -> str:
        """Return the manifest of a version. Raises RegistryAwayError."""
        manifest = await self._try(lambda: ModelStore(self._registry()).manifest(version))
        if manifest is None:
            raise RegistryAwayError
        return manifest

    async def was_replaced(self, endpoint: str, version: Version) -> bool:
        """Return whether the content of a version served an endpoint until another one did. Raises RegistryAwayError.

        What was rolled back counts no longer.
        """
        found = await self._try(lambda: self._store().all(endpoint))
        if found is None:
            raise RegistryAwayError
        return any(one.state == "replaced" and one.version.digest == version.digest for one in found)

    async def begin(self, deployment_id: int) -> bool:
        """Record that a pending deployment is loaded, so that it gets its first requests; return whether it was so."""
        return await self._write(DeploymentStore.mounted, deployment_id)

    async def fail(self, deployment_id: int, reason: str) -> bool:
        """Record that a pending deployment cannot be loaded; return whether it was so."""
        return await self._write(DeploymentStore.fail, deployment_id, why=reason)

    async def step(self, deployment_id: int, ramp: RampState, evidence: JudgeState, verdict: Verdict) -> bool:
        """Record where a canary stands; return whether it was written."""
        why = verdict.reason if ramp.is_final else ""
        return await self._write(DeploymentStore.step, deployment_id, ramp, evidence, why=why, by="judge")

    async def step_shadow(self, deployment_id: int, shadow: ShadowState, why: str) -> bool:
        """Record what is known of a shadow, which may be over; return whether it was written."""
        return await self._write(DeploymentStore.step_shadow, deployment_id, shadow, why=why)

    async def may_swap(self, endpoint: str) -> bool:
        """Return whether the latest deployment of an endpoint allows that what serves is unloaded first."""
        return await self._try(lambda: self._store().get(endpoint).latest.swap) or False

    async def references(self) -> list[Reference] | None:
        """Return the reference distributions of all versions; None: the registry is away."""
        return await self._try(lambda: BaselineStore(self._registry()).all())

    async def jobs_need(self, key: ModelKey) -> bool:
        """Return whether a job that has not ended needs a version; so too if the jobs' database does not answer."""

        def needs() -> bool:
            if self._jobs is None:
                self._jobs = self._open_jobs()
            return is_version_needed(self._jobs, key)

        return await self._try(needs, "jobs' database") is not False

    async def _write(
        self,
        method: Callable[..., Deployment],
        deployment_id: int,
        *values: object,
        why: str = "",
        by: str = "registrar",
    ) -> bool:
        """Write by a method of `DeploymentStore`, renewing the lease first.

        False: the registry is away, or somebody else has changed the deployment.
        """
        if not await self.lease(deployment_id):
            return False
        change = Change(self._clock(), by, why)
        written = await self._try(lambda: method(self._store(), deployment_id, self._owner, *values, change))
        return written is not None

    async def _try(self, call: Callable[[], T], database: str = "registry") -> T | None:
        """Return what `call` does in the thread; None: it failed, which is logged when it begins and when it ends."""
        try:
            result = await self._call(call)
        except RegistryError as error:  # somebody was faster; the next poll sees what is so now
            log.info("%s", error.message, extra=fields(event="registry_changed"))
            return None
        except (SQLAlchemyError, OSError, ConfigError) as error:
            if database not in self._away:
                reason = error.message if isinstance(error, NoriaError) else str(error).partition("\n")[0]
                extra = fields(event="registry_away", database=database)
                log.error("the %s does not answer, deployments pause: %s", database, reason, extra=extra)
            self._away.add(database)
            return None
        if database in self._away:
            log.info("the %s answers again", database, extra=fields(event="registry_back", database=database))
        self._away.discard(database)
        return result

    async def _call(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _registry(self) -> sa.Engine:
        if self._engine is None:
            self._engine = self._open_registry()
        return self._engine

    def _store(self) -> DeploymentStore:
        return DeploymentStore(self._registry())

    def _dispose(self) -> None:
        for engine in (self._engine, self._jobs):
            if engine is not None:
                engine.dispose()
