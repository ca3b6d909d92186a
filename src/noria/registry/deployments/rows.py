"""Reads deployments and routes from their tables, and writes routes and events. Calls block."""

from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.canary.judge import JudgeState
from noria.canary.ramp import RampPlan, RampState
from noria.canary.shadow import ShadowState
from noria.errors import RegistryError, did_you_mean, short_list, short_repr
from noria.protocol.routes import Route, Routes
from noria.registry.changes import Change
from noria.registry.deployments.states import (
    ROUTED,
    Deployment,
    DeploymentEvent,
    DeploymentSettings,
    Endpoint,
    EventType,
    endpoints_of,
)
from noria.registry.schema import deployment_events, deployment_heads, deployments, endpoints, routes, versions
from noria.registry.versions import read_versions
from noria.storage.field_copies import copy_fields


class StoredEvidence(Struct, frozen=True):
    """The column `evidence` of an event."""

    ramp: RampState | None
    judge: msgspec.Raw = msgspec.Raw(b"null")  # written by another version of the judge, perhaps
    shadow: ShadowState | None = None


def read_routes(connection: Connection) -> Routes:
    """Return the latest generation of the routes."""
    row = connection.execute(sa.select(routes).order_by(routes.c.generation.desc()).limit(1)).one_or_none()
    if row is None:
        return Routes()
    return Routes(row.generation, msgspec.json.decode(row.routes, type=tuple[Route, ...]))


def read_routed(connection: Connection) -> list[Deployment]:
    """Return the deployments that get requests."""
    return read_deployments(connection, deployment_heads.c.state.in_(ROUTED))


def read_endpoint(connection: Connection, name: str) -> Endpoint:
    """Return what an endpoint has. Raises RegistryError: nothing was ever deployed to it."""
    found = endpoints_of(read_deployments(connection, endpoints.c.name == name))
    if not found:
        raise unknown_endpoint(connection, name)
    return found[0]


def unknown_endpoint(connection: Connection, name: str) -> RegistryError:
    """Return the error that names the endpoints that have deployments."""
    known = sorted(connection.scalars(sa.select(endpoints.c.name)))
    listed = f"Known are {short_list(known, 20)}." if known else "There is none yet: noria deploy ENDPOINT MODEL."
    return RegistryError(
        f"nothing was ever deployed to the endpoint {short_repr(name)}.{did_you_mean(name, known)} {listed}"
    )


def read_deployment(connection: Connection, deployment_id: int) -> Deployment:
    """Return the deployment with a number. Raises RegistryError: there is none."""
    found = read_deployments(connection, deployments.c.id == deployment_id)
    if not found:
        raise RegistryError(f"there is no deployment {deployment_id}. See noria status.")
    return found[0]


def read_deployments(connection: Connection, condition: sa.ColumnElement[bool]) -> list[Deployment]:
    """Return the deployments for which `condition` holds, the oldest first."""
    query = (
        sa.select(deployments, endpoints.c.name, deployment_heads.c.state)
        .join(endpoints, deployments.c.endpoint_id == endpoints.c.id)
        .join(deployment_heads, deployment_heads.c.deployment_id == deployments.c.id)
        .where(condition)
        .order_by(deployments.c.id)
    )
    rows = connection.execute(query).all()
    if not rows:
        return []
    is_used = versions.c.id.in_({row.version_id for row in rows})
    of_versions = {version.id: version for version in read_versions(connection, is_used)}
    events = _read_events(connection, [row.id for row in rows])
    found = []
    for row in rows:
        settings = msgspec.json.decode(row.settings, type=DeploymentSettings)
        found.append(
            copy_fields(
                Deployment,
                events[row.id][-1],
                id=row.id,
                endpoint=row.name,
                version=of_versions[row.version_id],
                state=row.state,
                plan=msgspec.json.decode(row.plan, type=RampPlan | None),
                judge_settings=settings.judge,
                created=Change(row.at, row.by, row.why),
                rolls_back=settings.rolls_back,
                shadow_plan=settings.shadow,
                swap=settings.swap,
                events=tuple(events[row.id]),
            )
        )
    return found


def _read_events(connection: Connection, ids: Sequence[int]) -> Mapping[int, list[DeploymentEvent]]:
    query = (
        sa.select(deployment_events)
        .where(deployment_events.c.deployment_id.in_(ids))
        .order_by(deployment_events.c.deployment_id, deployment_events.c.number)
    )
    events: dict[int, list[DeploymentEvent]] = {}
    for row in connection.execute(query):
        stored = (
            StoredEvidence(None) if row.evidence is None else msgspec.json.decode(row.evidence, type=StoredEvidence)
        )
        event = copy_fields(
            DeploymentEvent,
            row,
            change=Change(row.at, row.by, row.why),
            ramp=stored.ramp,
            evidence=_judge_state(stored.judge),
            shadow=stored.shadow,
        )
        events.setdefault(row.deployment_id, []).append(event)
    return events


def _judge_state(raw: msgspec.Raw) -> JudgeState | None:
    """Return the evidence; None if there is none, or if it is of another version of the judge."""
    try:
        return msgspec.json.decode(raw, type=JudgeState | None)
    except msgspec.ValidationError:
        return None


def write_routes(connection: Connection, table: tuple[Route, ...], at: float) -> int | None:
    """Write the next generation of the routes; returns its number, None if they stayed."""
    latest = read_routes(connection)
    if latest.routes == table:
        return None
    generation = latest.generation + 1
    values = {"generation": generation, "routes": msgspec.json.encode(table).decode(), "at": at}
    connection.execute(routes.insert().values(values))
    return generation


def add_event(
    connection: Connection,
    after: Deployment,
    before: Deployment,
    event_type: EventType,
    change: Change,
    generation: int | None,  # generation of the routes that the change wrote
) -> None:
    """Add an event to a deployment, which is `after` from now on."""
    judge = msgspec.Raw(msgspec.json.encode(after.evidence))
    evidence = StoredEvidence(after.ramp, judge, after.shadow)
    has_evidence = after.ramp is not None or after.evidence is not None or after.shadow is not None
    event = {
        "deployment_id": after.id,
        "number": len(before.events) + 1,
        "type": event_type,
        "traffic": after.traffic,
        "generation": generation,
        "evidence": msgspec.json.encode(evidence).decode() if has_evidence else None,
        **msgspec.structs.asdict(change),
    }
    connection.execute(deployment_events.insert().values(event))
