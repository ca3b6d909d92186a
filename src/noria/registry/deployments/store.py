"""Deployments in the registry: what people want of them, and what servers did.

People write what they want, `deploy`, `promote`, `roll_back`; a *registrar*, a process of a running server, loads it,
moves the traffic and writes what happened, `mounted`, `fail`, `step`. It does so while it holds the deployment's lease.

Each change is one transaction: events, heads, and the next generation of the routes if they changed. Changes are rare,
so they exclude one another, whatever endpoint they are of: the routes are one table. Rules are in `states.py`.

Calls block. Any number of processes may call at once. `now` and leases are Unix time in seconds.
"""

import contextlib
from collections.abc import Iterator

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from noria.canary.judge import JudgeSettings, JudgeState
from noria.canary.ramp import RampPlan, RampState
from noria.canary.shadow import ShadowPlan, ShadowState
from noria.errors import RegistryError
from noria.protocol.routes import Routes
from noria.registry.changes import Change
from noria.registry.deployments import states as rules
from noria.registry.deployments.following import (
    Follow,
    change_follow,
    check_followable,
    due_versions,
    read_follows,
    write_follow,
)
from noria.registry.deployments.rows import (
    add_event,
    read_deployment,
    read_deployments,
    read_endpoint,
    read_routed,
    read_routes,
    unknown_endpoint,
    write_routes,
)
from noria.registry.deployments.states import Deployment, DeploymentSettings, Endpoint
from noria.registry.model_store import check_model_name, lock_known_model
from noria.registry.schema import deployment_events, deployment_heads, deployments, endpoints, routes
from noria.registry.versions import Version, find_version
from noria.storage.database import insert_if_new, write_transaction


class DeploymentStore:
    """The deployments of a database opened by `schema.open_registry`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # ── What people want ──────────────────────────────────────────────────────────────────────────────────────────────

    def deploy(
        self,
        endpoint: str,
        version_spec: str,
        plan: RampPlan | None,
        settings: JudgeSettings,
        change: Change,
        *,
        follow: bool = False,
        shadow: ShadowPlan | None = None,
        swap: bool = False,
    ) -> tuple[Deployment, bool]:
        """Let an endpoint be served by a version, at once or by a plan; returns the deployment.

        The same command again, until it is finished, returns the same deployment, and True; so does that of a version
        whose content has all requests: the deployment that is serving. With `follow` each version
        that `version_spec` names later is deployed likewise, until the next call without it. With `shadow` it gets
        copies of requests first. With `swap` the version that serves is unloaded before this one is loaded.

        Raises RegistryError: a name is not allowed, there is no such version, another deployment is unfinished, a
        version's number is to be followed, or `swap` leaves nothing to be compared with.
        """
        rules.check_swap(plan, shadow, swap=swap)
        check_model_name(endpoint, "endpoint")
        if follow:
            check_followable(version_spec)
        with self._transaction() as connection:
            lock_known_model(connection, version_spec.partition("@")[0])
            version = find_version(connection, version_spec)
            insert_if_new(connection, endpoints, name=endpoint)
            wanted = DeploymentSettings(settings, shadow=shadow, swap=swap)
            found = _insert(connection, endpoint, version, plan, wanted, change)
            followed = Follow(version_spec, plan, settings, version.id, shadow, swap) if follow else None
            return change_follow(connection, found[0], followed, change), found[1]

    def deploy_followed(self, change: Change) -> list[Deployment]:
        """Deploy what endpoints follow and was named anew; returns the new deployments."""
        with self._engine.connect() as connection:
            names = list(due_versions(connection))
        made = []
        for name in names:
            with self._transaction() as connection:
                if (due := due_versions(connection, name).get(name)) is None:  # another process was faster
                    continue
                follow, version = due
                write_follow(connection, name, msgspec.structs.replace(follow, seen=version.id))
                change = msgspec.structs.replace(change, why=f"follows {follow.spec}")
                settings = DeploymentSettings(follow.judge, shadow=follow.shadow, swap=follow.swap)
                deployment, was_there = _insert(connection, name, version, follow.plan, settings, change)
                made += [] if was_there else [deployment]
        return made

    def promote(self, endpoint: str, change: Change) -> Deployment:
        """Let the canary of an endpoint serve all its requests, or its shadow begin its plan; returns it.

        Raises RegistryError: it has neither, or it is not loaded yet.
        """
        with self._transaction() as connection:
            found = read_endpoint(connection, endpoint)
            if found.unfinished is None:
                raise RegistryError(
                    f"{endpoint} has no canary that could be promoted; its latest is {found.latest.title}. See noria "
                    f"status {endpoint}."
                )
            return _write_begun(connection, rules.promote(found.unfinished, change.at), change)

    def roll_back(self, endpoint: str, change: Change) -> Deployment:
        """Take away the latest deployment of an endpoint; returns the one that changed, or the new one.

        A canary, or one that is not loaded yet, is `rolled_back` at once. Instead of a serving one the version that
        served before is deployed: a new deployment, `pending`, which is also returned if it is pending already. If none
        served before, the serving one is `rolled_back`, and the configuration's model of this name serves.

        Raises RegistryError: nothing was deployed, the latest one gets no requests any more, or the version that served
        before was removed.
        """
        with self._transaction() as connection:
            found = read_endpoint(connection, endpoint)
            if found.unfinished is not None:
                if found.unfinished.rolls_back is not None:
                    return found.unfinished
                return _write(connection, change, rules.roll_back(found.unfinished, change.at))
            serving = found.serving
            if serving is None:
                raise RegistryError(
                    f"{endpoint} has nothing to roll back: its latest is {found.latest.title}, and requests get the "
                    "model of this name in a server's configuration, or 404."
                )
            before = rules.predecessor(serving, read_deployments(connection, endpoints.c.name == endpoint))
            if before is None:
                return _write(connection, change, rules.roll_back(serving, change.at))
            lock_known_model(connection, before.version.model)
            version = _present_version(connection, before, serving)
            why = f"rolls back deployment {serving.id} ({serving.version.name})"
            change = msgspec.structs.replace(change, why=f"{why}: {change.why}" if change.why else why)
            settings = DeploymentSettings(serving.judge_settings, serving.id, swap=serving.swap)
            return _insert(connection, endpoint, version, None, settings, change)[0]

    def undeploy(self, endpoint: str, change: Change) -> tuple[Deployment, str | None]:
        """Take away all that is deployed to an endpoint, which follows nothing any more.

        Returns what served, else what was not finished, else the latest deployment; and what the endpoint followed.

        Raises RegistryError: nothing was deployed, or all was taken away already, and it follows nothing.
        """
        with self._transaction() as connection:
            found = read_endpoint(connection, endpoint)
            follow = read_follows(connection, endpoint).get(endpoint)
            taken = [each for each in (found.unfinished, found.serving) if each is not None]
            if not taken and follow is None:
                raise RegistryError(
                    f"nothing is deployed to {endpoint} any more; its latest is {found.latest.title}. See noria status "
                    f"{endpoint}."
                )
            why = f"undeployed: {change.why}" if change.why else "undeployed"
            wanted = msgspec.structs.replace(change, why=why)
            written = [_write(connection, wanted, rules.roll_back(each, change.at)) for each in taken]
            deployment = change_follow(connection, (written or [found.latest])[-1], None, change)
            return deployment, None if follow is None else follow.spec

    # ── What is there ─────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, endpoint: str) -> Endpoint:
        """Return what an endpoint has. Raises RegistryError: nothing was ever deployed to it."""
        with self._engine.connect() as connection:
            return read_endpoint(connection, endpoint)

    def find(self, deployment_id: int) -> Deployment:
        """The deployment with a number. Raises RegistryError: there is none."""
        with self._engine.connect() as connection:
            return read_deployment(connection, deployment_id)

    def all(self, endpoint: str | None = None) -> list[Deployment]:
        """The deployments of all endpoints or of one, the oldest first.

        Raises RegistryError: nothing was ever deployed to it.
        """
        with self._engine.connect() as connection:
            found = read_deployments(connection, sa.true() if endpoint is None else endpoints.c.name == endpoint)
            if endpoint is not None and not found:
                raise unknown_endpoint(connection, endpoint)
            return found

    def current(self) -> list[Deployment]:
        """Of each endpoint what serves, what is not finished, and the latest of all; the oldest first."""
        head = deployment_heads.c
        latest = sa.select(sa.func.max(head.deployment_id)).group_by(head.endpoint_id)
        is_current = sa.or_(head.state.in_(rules.IN_USE), head.deployment_id.in_(latest))
        with self._engine.connect() as connection:
            return read_deployments(connection, is_current)

    def followed(self) -> dict[str, str]:
        """Return what endpoints follow, by name."""
        with self._engine.connect() as connection:
            return {name: follow.spec for name, follow in read_follows(connection).items()}

    def unfinished(self) -> list[Deployment]:
        """The deployments that are pending, shadows or canaries, the oldest first."""
        with self._engine.connect() as connection:
            return read_deployments(connection, deployment_heads.c.finished_at.is_(None))

    def routes(self) -> Routes:
        """The latest generation of the routes."""
        with self._engine.connect() as connection:
            return read_routes(connection)

    # ── What a registrar did ──────────────────────────────────────────────────────────────────────────────────────────

    def try_lease(self, deployment_id: int, owner: str, now: float, lease_s: float) -> bool:
        """Take or renew the lease of an unfinished deployment; returns whether `owner` holds it.

        One that another owner holds can be taken after it ran out.
        """
        head = deployment_heads.c
        is_free = sa.or_(head.owner.is_(None), head.owner == owner, head.lease_until < now)
        statement = (
            deployment_heads.update()
            .where(head.deployment_id == deployment_id, head.finished_at.is_(None), is_free)
            .values(owner=owner, lease_until=now + lease_s, row_version=head.row_version + 1)
        )
        with write_transaction(self._engine) as connection:
            return connection.execute(statement).rowcount == 1

    def mounted(self, deployment_id: int, owner: str, change: Change) -> Deployment:
        """A pending deployment is loaded: it becomes a shadow, a canary with its first share, or serving; returns it.

        Raises RegistryError: it is not pending any more, or `owner` has lost the lease.
        """
        with self._leased(deployment_id, owner) as (connection, deployment):
            return _write_begun(connection, rules.begin(deployment, change.at), change)

    def fail(self, deployment_id: int, owner: str, change: Change) -> Deployment:
        """A pending deployment cannot be loaded, for the reason `change.why`; returns it.

        Raises RegistryError: it is not pending any more, or `owner` has lost the lease.
        """
        with self._leased(deployment_id, owner) as (connection, deployment):
            return _write(connection, change, rules.become(deployment, "failed"))

    def step(
        self, deployment_id: int, owner: str, ramp: RampState, evidence: JudgeState | None, change: Change
    ) -> Deployment:
        """A canary's ramp and evidence went on; returns the deployment as the registry has it now.

        A ramp that is promoted or rolled back ends the deployment. One in which little changed is not written: see
        `states.is_progress`.

        Raises RegistryError: it is no canary any more, or `owner` has lost the lease.
        """
        with self._leased(deployment_id, owner) as (connection, deployment):
            after = rules.step(deployment, ramp, evidence)
            return _write_begun(connection, after, change) if rules.is_progress(deployment, after) else deployment

    def step_shadow(self, deployment_id: int, owner: str, shadow: ShadowState, change: Change) -> Deployment:
        """More is known of a shadow, which may be over: it is ended, or begins its plan; returns it.

        Raises RegistryError: it is no shadow any more, or `owner` has lost the lease.
        """
        with self._leased(deployment_id, owner) as (connection, deployment):
            return _write_begun(connection, rules.step_shadow(deployment, shadow), change)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Begin a transaction that changes deployments; it waits until no other one does."""
        with write_transaction(self._engine) as connection:
            if connection.dialect.name == "postgresql":  # SQLite has one writer at a time anyway
                connection.execute(sa.text(f"LOCK TABLE {routes.name} IN SHARE ROW EXCLUSIVE MODE"))
            yield connection

    @contextlib.contextmanager
    def _leased(self, deployment_id: int, owner: str) -> Iterator[tuple[Connection, Deployment]]:
        """Begin a transaction for the owner of a deployment's lease; until its end no one else can take the lease.

        Raises RegistryError: `owner` does not hold the lease.
        """
        head = deployment_heads.c
        query = sa.select(head.owner).where(head.deployment_id == deployment_id).with_for_update()
        with self._transaction() as connection:
            holder = connection.scalar(query)
            deployment = read_deployment(connection, deployment_id)
            if holder != owner:
                state = f"server {holder} has it" if holder else "no server has it, or the deployment is finished"
                raise RegistryError(f"server {owner} does not hold the lease of {deployment.title}: {state}.")
            yield connection, deployment


def _insert(
    connection: Connection,
    endpoint: str,
    version: Version,
    plan: RampPlan | None,
    settings: DeploymentSettings,
    change: Change,
) -> tuple[Deployment, bool]:
    """Return the new deployment, or the unfinished one of the same command, and whether it was there.

    If it would change nothing, return the one that is serving.

    Raises RegistryError: another deployment of the endpoint is unfinished.
    """
    endpoint_id: int = connection.execute(sa.select(endpoints.c.id).where(endpoints.c.name == endpoint)).scalar_one()
    head = deployment_heads.c
    finished = sa.select(sa.func.max(head.deployment_id)).where(
        head.endpoint_id == endpoint_id, head.finished_at.is_not(None)
    )
    key = rules.request_key(version, plan, settings, connection.scalar(finished))
    unfinished = connection.execute(
        sa.select(deployments.c.id, deployments.c.request_key)
        .join(deployment_heads)
        .where(head.endpoint_id == endpoint_id, head.finished_at.is_(None))
    ).one_or_none()
    if unfinished is not None:
        deployment = read_deployment(connection, unfinished.id)
        if unfinished.request_key != key:
            raise rules.unfinished_error(deployment)
        return deployment, True
    for serving in read_deployments(connection, sa.and_(head.endpoint_id == endpoint_id, head.state == "serving")):
        if rules.changes_nothing(serving, version, plan, settings.shadow):
            return serving, True
    values = {
        "endpoint_id": endpoint_id,
        "request_key": key,
        "version_id": version.id,
        "settings": msgspec.json.encode(settings).decode(),
        "plan": msgspec.json.encode(plan).decode(),
        **msgspec.structs.asdict(change),
    }
    new: int = connection.execute(deployments.insert().values(values).returning(deployments.c.id)).scalar_one()
    values = {"deployment_id": new, "endpoint_id": endpoint_id, "state": "pending", "row_version": 1}
    connection.execute(deployment_heads.insert().values(values))
    values = {"deployment_id": new, "number": 1, "type": "pending", "traffic": 0.0, **msgspec.structs.asdict(change)}
    connection.execute(deployment_events.insert().values(values))
    return read_deployment(connection, new), False


def _present_version(connection: Connection, before: Deployment, serving: Deployment) -> Version:
    """Return the version of a deployment that is to serve again. Raises RegistryError: it was removed."""
    try:
        return find_version(connection, before.version.name)
    except RegistryError as error:
        raise RegistryError(f"{serving.version.name} goes on serving {serving.endpoint}: {error.message}") from error


def _write_begun(connection: Connection, after: Deployment, change: Change) -> Deployment:
    """Write a deployment that got further; if it serves from now on, also what becomes of the one that served."""
    if after.state != "serving":
        return _write(connection, change, after)
    serving = read_endpoint(connection, after.endpoint).serving
    if serving is None:
        return _write(connection, change, after)
    is_taken_away = after.rolls_back == serving.id
    return _write(connection, change, after, rules.become(serving, "rolled_back" if is_taken_away else "replaced"))


def _write(connection: Connection, change: Change, *changed: Deployment) -> Deployment:
    """Write the new states of deployments of one endpoint, and the routes that follow; returns the first one."""
    now = {one.id: one for one in [*read_routed(connection), *changed]}
    generation = write_routes(connection, rules.routes_of(now.values()), change.at)
    for after in changed:
        before = read_deployment(connection, after.id)
        head = {"state": after.state, "row_version": deployment_heads.c.row_version + 1}
        ended = {"finished_at": change.at, "owner": None, "lease_until": None}
        is_end = before.is_unfinished and not after.is_unfinished
        is_deployment = deployment_heads.c.deployment_id == after.id
        connection.execute(deployment_heads.update().where(is_deployment).values(head | ended if is_end else head))
        add_event(connection, after, before, "step" if after.state == before.state else after.state, change, generation)
    return read_deployment(connection, changed[0].id)
