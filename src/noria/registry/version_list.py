"""The versions of all models, page by page, with the deployments that name them. Calls block."""

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.registry.deployments.states import State
from noria.registry.schema import deployment_heads, deployments, endpoints, versions
from noria.registry.versions import Version, read_versions

MAX_DEPLOYMENTS = 5
"""Of one version in a list: its latest ones."""


class DeploymentOfVersion(Struct, frozen=True):
    """A deployment that names a version."""

    id: int
    endpoint: str
    state: State


class ListedVersion(Struct, frozen=True):
    """A version, and where it is or was deployed."""

    name: str  # MODEL@NUMBER
    version: Version
    num_deployments: int
    deployments: list[DeploymentOfVersion]  # the latest first


class VersionList(Struct, frozen=True):
    """A page of versions, the latest first, removed ones included."""

    data: list[ListedVersion]
    next: int | None  # the `before` of the next page; None: there is none


def read_version_list(connection: Connection, before: int | None, limit: int) -> VersionList:
    """Return at most `limit` versions, those that were added before the version with the id `before`."""
    query = sa.select(versions.c.id).order_by(versions.c.id.desc()).limit(limit + 1)
    ids = list(connection.scalars(query if before is None else query.where(versions.c.id < before)))
    page = ids[:limit]
    found = sorted(read_versions(connection, versions.c.id.in_(page)), key=lambda version: -version.id)
    counts, latest = _deployments_of(connection, page)
    data = [ListedVersion(each.name, each, counts.get(each.id, 0), latest.get(each.id, [])) for each in found]
    return VersionList(data, page[-1] if len(ids) > limit else None)


def _deployments_of(
    connection: Connection, ids: list[int]
) -> tuple[dict[int, int], dict[int, list[DeploymentOfVersion]]]:
    """Return by version how many deployments name it, and the latest ones."""
    rank = sa.func.row_number().over(partition_by=deployments.c.version_id, order_by=deployments.c.id.desc())
    total = sa.func.count().over(partition_by=deployments.c.version_id)
    ranked = (
        sa.select(deployments, rank.label("rank"), total.label("total"))
        .where(deployments.c.version_id.in_(ids))
        .subquery()
    )
    rows = connection.execute(
        sa.select(ranked.c.version_id, ranked.c.id, ranked.c.total, endpoints.c.name, deployment_heads.c.state)
        .join(endpoints, ranked.c.endpoint_id == endpoints.c.id)
        .join(deployment_heads, deployment_heads.c.deployment_id == ranked.c.id)
        .where(ranked.c.rank <= MAX_DEPLOYMENTS)
        .order_by(ranked.c.id.desc())
    )
    counts: dict[int, int] = {}
    latest: dict[int, list[DeploymentOfVersion]] = {}
    for row in rows:
        counts[row.version_id] = row.total
        latest.setdefault(row.version_id, []).append(DeploymentOfVersion(row.id, row.name, row.state))
    return counts, latest
