"""Endpoints that follow an alias, tags or a model: what these name anew is deployed by itself."""

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan
from noria.canary.shadow import ShadowPlan
from noria.errors import RegistryError, short_repr
from noria.registry.changes import Change
from noria.registry.deployments.rows import add_event, read_deployment
from noria.registry.deployments.states import Deployment
from noria.registry.schema import deployment_heads, endpoints
from noria.registry.versions import Version, find_version


class Follow(Struct, frozen=True):
    """The column `follow` of an endpoint: what it follows, how that is deployed, and the last version that was."""

    spec: str  # MODEL@ALIAS, or MODEL@KEY=VALUE and MODEL alone for the latest version
    plan: RampPlan | None
    judge: JudgeSettings
    seen: int  # the version's id; it is not deployed again, also if it was rolled back
    shadow: ShadowPlan | None = None
    swap: bool = False


def check_followable(spec: str) -> None:
    """Raise RegistryError if a version is named by its number, which no other version will ever have."""
    if spec.partition("@")[2].isdecimal():
        raise RegistryError(
            f"{short_repr(spec)} names one version for good; follow MODEL@ALIAS, MODEL@KEY=VALUE for the latest "
            "version with a tag, or MODEL for the latest of all."
        )


def write_follow(connection: Connection, endpoint: str, follow: Follow | None) -> None:
    """Let an endpoint follow something, or nothing any more."""
    text = None if follow is None else msgspec.json.encode(follow).decode()
    connection.execute(endpoints.update().where(endpoints.c.name == endpoint).values(follow=text))


def change_follow(connection: Connection, deployment: Deployment, follow: Follow | None, change: Change) -> Deployment:
    """Let the endpoint of a deployment follow something else, or nothing; returns it, with an event if that is new."""
    before = read_follows(connection, deployment.endpoint).get(deployment.endpoint)
    write_follow(connection, deployment.endpoint, follow)
    if (before and before.spec) == (follow and follow.spec):
        return deployment
    what = "follows nothing any more" if follow is None else f"follows {follow.spec}"
    what += f", not {before.spec}" if before is not None else ""
    change = msgspec.structs.replace(change, why=f"{what}: {change.why}" if change.why else what)
    add_event(connection, deployment, deployment, "follow", change, None)
    return read_deployment(connection, deployment.id)


def read_follows(connection: Connection, endpoint: str | None = None) -> dict[str, Follow]:
    """Return what endpoints follow, by name; those that follow nothing are left out."""
    is_meant = sa.true() if endpoint is None else endpoints.c.name == endpoint
    rows = connection.execute(sa.select(endpoints.c.name, endpoints.c.follow).where(is_meant))
    return {row.name: msgspec.json.decode(row.follow, type=Follow) for row in rows if row.follow is not None}


def due_versions(connection: Connection, endpoint: str | None = None) -> dict[str, tuple[Follow, Version]]:
    """Return what is to be deployed now, by endpoint: it was named anew, and no deployment is unfinished."""
    due = {}
    for name, follow in read_follows(connection, endpoint).items():
        try:
            version = find_version(connection, follow.spec)
        except RegistryError:  # the alias is deleted, no version has the tags, or all versions are removed
            continue
        if version.id != follow.seen and not _has_unfinished(connection, name):
            due[name] = follow, version
    return due


def _has_unfinished(connection: Connection, endpoint: str) -> bool:
    query = (
        sa.select(deployment_heads.c.deployment_id)
        .join(endpoints, deployment_heads.c.endpoint_id == endpoints.c.id)
        .where(endpoints.c.name == endpoint, deployment_heads.c.finished_at.is_(None))
    )
    return connection.execute(query).first() is not None
