"""The nodes of a trace, and what the registry knows of each. Their length is bounded, whatever events state."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.registry.changes import Change
from noria.registry.deployments.states import State
from noria.registry.schema import (
    dataset_versions,
    datasets,
    deployment_heads,
    deployments,
    endpoints,
    lineage_events,
    models,
    run_entries,
    run_io,
    runs,
    struck_events,
    versions,
)
from noria.storage.field_copies import copy_fields

_MAX_ENTRIES, _MAX_CHARS = 100, 2000  # entries of a run: parameters and metrics each; characters of a value
_MAX_URIS, _MAX_NAMES = 20, 100  # URIs of data, names of a model

Kind = Literal["endpoint", "deployment", "model", "dataset", "run"]


class NodeId(NamedTuple):
    """An endpoint by its name, a deployment or a version of data by its number, a model by its digest, a run by its id.

    As text it is `KIND:KEY`.
    """

    kind: Kind
    key: str | int

    def __str__(self) -> str:
        return f"{self.kind}:{self.key}"


class EndpointNode(Struct, frozen=True, tag="endpoint"):
    """A name that requests give as `model`."""

    id: str  # text of its `NodeId`, as in all nodes
    name: str


class DeploymentNode(Struct, frozen=True, tag="deployment"):
    """A version that was given to an endpoint."""

    id: str
    number: int
    endpoint: str
    version: str  # MODEL@NUMBER
    state: State
    created: Change


class ModelNode(Struct, frozen=True, tag="model"):
    """Versions with the same content."""

    id: str
    names: list[str]  # MODEL@NUMBER
    digest: str


class DatasetNode(Struct, frozen=True, tag="dataset"):
    """A version of a dataset."""

    id: str
    namespace: str
    name: str
    version: str  # empty: not stated
    digest: str | None
    uris: list[str]


class RunNode(Struct, frozen=True, tag="run"):
    """A run, which may be a step of another."""

    id: str
    run_id: str
    job_namespace: str
    job_name: str
    status: str
    started_at: float
    ended_at: float | None
    received_at: float  # when its first event arrived; the other times are the sender's
    parent_id: str | None
    params: dict[str, Any]
    metrics: dict[str, float]
    error: str | None
    sender: str  # the API key, or the user of the command line, whose run it is
    struck_out: "StruckOut | None"  # its last events that count no more
    is_shortened: bool  # there are more parameters or metrics, or longer values


class StruckOut(Struct, frozen=True):
    """Events of a run that count no more."""

    num_events: int
    last: Change


Node = EndpointNode | DeploymentNode | ModelNode | DatasetNode | RunNode


DEPLOYMENT = (
    sa.select(deployments, endpoints.c.name, deployment_heads.c.state, versions.c.manifest_digest, versions.c.number)
    .add_columns(models.c.name.label("model"))
    .join(endpoints, deployments.c.endpoint_id == endpoints.c.id)
    .join(deployment_heads, deployment_heads.c.deployment_id == deployments.c.id)
    .join(versions, deployments.c.version_id == versions.c.id)
    .join(models, versions.c.model_id == models.c.id)
)
"""Deployments with their endpoints, states and versions."""


def describe_all(connection: Connection, wanted: Iterable[NodeId], max_bytes: int) -> list[Node]:
    """Return what the registry knows of nodes, up to the one at which their JSON is longer than `max_bytes`."""
    nodes: list[Node] = []
    num_bytes = 0
    for each in wanted:
        node = describe(connection, each)
        num_bytes += len(msgspec.json.encode(node))
        if num_bytes > max_bytes and nodes:
            break
        nodes.append(node)
    return nodes


def describe(connection: Connection, node: NodeId) -> Node:
    """Return what the registry knows of a node that it has."""
    match node.kind:
        case "endpoint":
            return EndpointNode(str(node), str(node.key))
        case "deployment":
            row = connection.execute(DEPLOYMENT.where(deployments.c.id == node.key)).one()
            created = Change(row.at, row.by, row.why)
            return DeploymentNode(str(node), row.id, row.name, f"{row.model}@{row.number}", row.state, created)
        case "model":
            query = (
                sa.select(models.c.name, versions.c.number)
                .join(versions)
                .where(versions.c.manifest_digest == node.key)
                .order_by(models.c.name, versions.c.number)
                .limit(_MAX_NAMES)
            )
            names = [f"{name}@{number}" for name, number in connection.execute(query)]
            return ModelNode(str(node), names, str(node.key))
        case "dataset":
            columns = (datasets.c.namespace, datasets.c.name, dataset_versions.c.version, dataset_versions.c.digest)
            row = connection.execute(sa.select(*columns).join(datasets).where(dataset_versions.c.id == node.key)).one()
            of_version = run_io.c.dataset_version_id == node.key
            found = sa.select(run_io.c.uri).where(of_version, run_io.c.uri.is_not(None)).distinct()
            uris = connection.scalars(found.order_by(run_io.c.uri).limit(_MAX_URIS))
            found_at = sorted(uri for uri in uris if uri is not None)
            return DatasetNode(str(node), row.namespace, row.name, row.version, row.digest, found_at)
        case "run":
            return _describe_run(connection, node)


def _describe_run(connection: Connection, node: NodeId) -> RunNode:
    row = connection.execute(sa.select(runs).where(runs.c.run_id == node.key)).one()
    arrival = sa.select(lineage_events.c.received_at).where(lineage_events.c.run_id == row.run_id)
    entries = {field: _read_entries(connection, row.run_id, field) for field in ("param", "metric", "error")}
    values = {field: {name: value for name, value, _ in found[:_MAX_ENTRIES]} for field, found in entries.items()}
    return copy_fields(
        RunNode,
        row,
        id=str(node),
        received_at=connection.execute(arrival.order_by(lineage_events.c.seq).limit(1)).scalar_one(),
        params=values["param"],
        metrics=values["metric"],
        error=values["error"].get(""),
        sender=row.owner,
        struck_out=_struck_out_of(connection, row.run_id),
        is_shortened=any(len(found) > _MAX_ENTRIES or any(each[2] for each in found) for found in entries.values()),
    )


def _read_entries(connection: Connection, run_id: str, field: str) -> list[tuple[str, Any, bool]]:
    """Return the names and values of a run's entries, one more than are shown, and whether each is shortened."""
    length = _MAX_CHARS + 1
    name, value = (sa.func.substr(column, 1, length) for column in (run_entries.c.name, run_entries.c.value))
    query = (
        sa.select(name, value)
        .where(run_entries.c.run_id == run_id, run_entries.c.field == field)
        .order_by(run_entries.c.name)
        .limit(_MAX_ENTRIES + 1)
    )
    return [
        (_shown(name), None if value is None else _shown(value), max(len(name), len(value or "")) > _MAX_CHARS)
        for name, value in connection.execute(query)
    ]


def _shown(json: str) -> Any:
    """Return a value, or the beginning of its JSON if that is too long."""
    return msgspec.json.decode(json) if len(json) <= _MAX_CHARS else f"{json[:_MAX_CHARS]}…"


def _struck_out_of(connection: Connection, run_id: str) -> StruckOut | None:
    of_run = sa.select(struck_events).join(lineage_events).where(lineage_events.c.run_id == run_id)
    last = connection.execute(of_run.order_by(struck_events.c.at.desc()).limit(1)).first()
    if last is None:
        return None
    count = connection.scalar(sa.select(sa.func.count()).select_from(of_run.subquery()))
    return StruckOut(count or 0, Change(last.at, last.by, last.why))
