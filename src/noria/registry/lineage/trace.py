"""Walks from an endpoint, a deployment, a model or data to what made it, or down to all that was made from it.

A run's inputs are its own and those of its steps; its outputs are its own. So the way up goes from an output to its
run, to that run's inputs and to its steps, and theirs; the way down goes the same ways backwards. It is one of
versions: data whose version no event states leads nowhere, because any run may have written what was read.

A model is a dataset whose version is the digest of its manifest, whatever name a run gave it. An endpoint leads up to
the deployments that get its requests now, and these to the models that they serve; down, models lead to them. A
deployment that gets no requests any more leads up to its model, so that old images can be traced.
"""

import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.errors import RegistryError, short_repr
from noria.registry.deployments.states import ROUTED, State
from noria.registry.lineage.openlineage import RunState, Statement
from noria.registry.schema import (
    dataset_versions,
    datasets,
    deployment_heads,
    deployments,
    endpoints,
    models,
    run_io,
    runs,
    versions,
)
from noria.registry.versions import Change

MAX_NODES = 2000
_DIGEST = re.compile(r"sha256:([0-9a-f]{8,64})")

Direction = Literal["up", "down"]
Role = Literal[
    "serving",
    "canary",
    "shadow",
    "version",
    "made by",
    "input",
    "step",
    "read by",
    "output",
    "part of",
    "deployed as",
    "serves",
]
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

    id: str  # of its `NodeId`, as in all nodes
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
    parent_id: str | None
    params: dict[str, Any]
    metrics: dict[str, float]
    error: str | None


Node = EndpointNode | DeploymentNode | ModelNode | DatasetNode | RunNode


class Edge(NamedTuple):
    """`to` is `role` of `start`: the run that it was made by, an input of it."""

    start: int  # of `Graph.nodes`
    to: int
    role: Role


class Graph(Struct, frozen=True):
    """What was found, the subjects first."""

    direction: Direction
    num_subjects: int
    nodes: list[Node]
    edges: list[Edge]
    is_cut: bool  # there is more than the allowed number of nodes


def trace(
    connection: Connection, subjects: Iterable[NodeId], direction: Direction, max_nodes: int = MAX_NODES
) -> Graph:
    """Walk in one direction from all `subjects`, breadth first, to at most `max_nodes`."""
    found = {subject: number for number, subject in enumerate(subjects)}
    num_subjects, edges, is_cut = len(found), [], False
    queue = list(found)
    for node in queue:
        for role, other in _NEXT[direction, node.kind](connection, node):
            if other not in found:
                if len(found) >= max_nodes:
                    is_cut = True
                    continue
                found[other] = len(found)
                queue.append(other)
            edges.append(Edge(found[node], found[other], role))
    return Graph(direction, num_subjects, [describe(connection, node) for node in queue], edges, is_cut)


def find_endpoint(connection: Connection, name: str) -> NodeId | None:
    """Return an endpoint that versions are deployed to; None: the registry has none of this name."""
    is_routed = connection.execute(_ROUTED.where(endpoints.c.name == name)).first() is not None
    return NodeId("endpoint", name) if is_routed else None


def find_deployment(connection: Connection, number: int) -> NodeId:
    """Return a deployment. Raises RegistryError: the registry does not have it."""
    if connection.scalar(sa.select(deployments.c.id).where(deployments.c.id == number)) is None:
        raise RegistryError(f"the registry has no deployment {number}. See noria status.")
    return NodeId("deployment", number)


def find_digest(connection: Connection, text: str) -> list[NodeId]:
    """Return the model or the data with a digest: `sha256:` and at least its first 8 digits.

    Raises:
        RegistryError: it is not one, the registry does not have it, or it has several that begin so.

    """
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise RegistryError(f"{short_repr(text)} is no digest; allowed is sha256: and its first 8 to 64 digits.")
    columns = (versions.c.manifest_digest, dataset_versions.c.digest)
    digests = {
        digest
        for column in columns
        for digest in connection.scalars(sa.select(column).where(column.startswith(text)).distinct().limit(3))
    }
    if not digests:
        raise RegistryError(f"the registry has no model and no data with the digest {text}.")
    if len(digests) > 1:
        raise RegistryError(f"several digests begin with {text}: {', '.join(sorted(digests))}. Give more digits.")
    digest = digests.pop()
    rows = connection.execute(_VERSION.where(dataset_versions.c.digest == digest)).all()
    return sorted({_node_of(row) for row in rows}) or [NodeId("model", digest)]  # a model that no run has named


def find_dataset(connection: Connection, namespace: str, name: str, version: str) -> NodeId:
    """Return a version of a dataset. Raises RegistryError: the registry does not have it."""
    of_dataset = sa.and_(datasets.c.namespace == namespace, datasets.c.name == name)
    row = connection.execute(_VERSION.where(of_dataset, dataset_versions.c.version == version)).first()
    if row is not None:
        return _node_of(row)
    query = sa.select(dataset_versions.c.version).join(datasets).where(of_dataset).limit(20)
    known = sorted(version or "(not stated)" for version in connection.scalars(query))
    listed = f"Its versions are {', '.join(known)}." if known else "There is no such dataset."
    raise RegistryError(f"the registry has no version {short_repr(version)} of {namespace} {name}. {listed}")


def find_run(connection: Connection, run_id: str) -> NodeId:
    """Return a run. Raises RegistryError: the registry does not have it."""
    known = connection.scalar(sa.select(runs.c.run_id).where(runs.c.run_id == str(uuid.UUID(run_id))))
    if known is None:
        raise RegistryError(f"the registry has no run {run_id}.")
    return NodeId("run", known)


_VERSION = (
    sa.select(dataset_versions.c.id, dataset_versions.c.digest, versions.c.id.label("model_version"))
    .join(datasets, dataset_versions.c.dataset_id == datasets.c.id)
    .outerjoin(versions, versions.c.manifest_digest == dataset_versions.c.digest)
)
"""Versions of datasets, each also with the versions of models that it is."""


_DEPLOYMENT = (
    sa.select(deployments, endpoints.c.name, deployment_heads.c.state, versions.c.manifest_digest, versions.c.number)
    .add_columns(models.c.name.label("model"))
    .join(endpoints, deployments.c.endpoint_id == endpoints.c.id)
    .join(deployment_heads, deployment_heads.c.deployment_id == deployments.c.id)
    .join(versions, deployments.c.version_id == versions.c.id)
    .join(models, versions.c.model_id == models.c.id)
)
_ROUTED = _DEPLOYMENT.where(deployment_heads.c.state.in_(ROUTED)).order_by(endpoints.c.name, deployments.c.id)
"""The deployments that get requests now: of each endpoint the control before the canary."""


def _node_of(row: Any) -> NodeId:
    return NodeId("dataset", row.id) if row.model_version is None else NodeId("model", row.digest)


def _runs_of(connection: Connection, node: NodeId, direction: str, role: Role) -> list[tuple[Role, NodeId]]:
    """Return the runs that have a model or data as input, or as output."""
    is_node = dataset_versions.c.digest == node.key if node.kind == "model" else dataset_versions.c.id == node.key
    query = (
        sa.select(runs.c.run_id)
        .join(run_io, run_io.c.run_id == runs.c.run_id)
        .join(dataset_versions, run_io.c.dataset_version_id == dataset_versions.c.id)
        .where(is_node, dataset_versions.c.version != "", run_io.c.direction == direction)
        .group_by(runs.c.run_id, runs.c.started_at)
        .order_by(runs.c.started_at, runs.c.run_id)
    )
    return [(role, NodeId("run", run_id)) for run_id in connection.scalars(query)]


def _io_of(connection: Connection, run: NodeId, direction: str, role: Role) -> list[tuple[Role, NodeId]]:
    """Return the inputs, or the outputs, of a run."""
    query = (
        _VERSION.join(run_io, run_io.c.dataset_version_id == dataset_versions.c.id)
        .where(run_io.c.run_id == run.key, run_io.c.direction == direction)
        .order_by(datasets.c.namespace, datasets.c.name, dataset_versions.c.version)
    )
    return [(role, node) for node in dict.fromkeys(map(_node_of, connection.execute(query)))]


def _deployments_of(connection: Connection, endpoint: NodeId) -> list[tuple[Role, NodeId]]:
    rows = connection.execute(_ROUTED.where(endpoints.c.name == endpoint.key))
    return [(row.state, NodeId("deployment", row.id)) for row in rows]


def _model_of(connection: Connection, deployment: NodeId) -> list[tuple[Role, NodeId]]:
    row = connection.execute(_DEPLOYMENT.where(deployments.c.id == deployment.key)).one()
    return [("version", NodeId("model", row.manifest_digest))]


def _endpoint_of(connection: Connection, deployment: NodeId) -> list[tuple[Role, NodeId]]:
    rows = connection.execute(_ROUTED.where(deployments.c.id == deployment.key))
    return [("serves", NodeId("endpoint", row.name)) for row in rows]


def _read_by_or_deployed(connection: Connection, model: NodeId) -> list[tuple[Role, NodeId]]:
    rows = connection.execute(_ROUTED.where(versions.c.manifest_digest == model.key))
    deployed: list[tuple[Role, NodeId]] = [("deployed as", NodeId("deployment", row.id)) for row in rows]
    return _runs_of(connection, model, "input", "read by") + deployed


def _above(connection: Connection, run: NodeId) -> list[tuple[Role, NodeId]]:
    steps = sa.select(runs.c.run_id).where(runs.c.parent_id == run.key).order_by(runs.c.started_at, runs.c.run_id)
    found: list[tuple[Role, NodeId]] = [("step", NodeId("run", run_id)) for run_id in connection.scalars(steps)]
    return _io_of(connection, run, "input", "input") + found


def _below(connection: Connection, run: NodeId) -> list[tuple[Role, NodeId]]:
    parent = sa.select(runs.c.parent_id).where(runs.c.run_id == run.key).scalar_subquery()
    known = connection.scalars(sa.select(runs.c.run_id).where(runs.c.run_id == parent))
    found: list[tuple[Role, NodeId]] = [("part of", NodeId("run", run_id)) for run_id in known]
    return _io_of(connection, run, "output", "output") + found


_NEXT: dict[tuple[Direction, str], Callable[[Connection, NodeId], list[tuple[Role, NodeId]]]] = {
    ("up", "endpoint"): _deployments_of,
    ("up", "deployment"): _model_of,
    ("up", "model"): lambda connection, node: _runs_of(connection, node, "output", "made by"),
    ("up", "dataset"): lambda connection, node: _runs_of(connection, node, "output", "made by"),
    ("up", "run"): _above,
    ("down", "endpoint"): lambda *_: [],
    ("down", "deployment"): _endpoint_of,
    ("down", "model"): _read_by_or_deployed,
    ("down", "dataset"): lambda connection, node: _runs_of(connection, node, "input", "read by"),
    ("down", "run"): _below,
}


def describe(connection: Connection, node: NodeId) -> Node:
    """Return what the registry knows of a node that it has."""
    match node.kind:
        case "endpoint":
            return EndpointNode(str(node), str(node.key))
        case "deployment":
            row = connection.execute(_DEPLOYMENT.where(deployments.c.id == node.key)).one()
            created = Change(row.at, row.by, row.why)
            return DeploymentNode(str(node), row.id, row.name, f"{row.model}@{row.number}", row.state, created)
        case "model":
            query = (
                sa.select(models.c.name, versions.c.number)
                .join(versions)
                .where(versions.c.manifest_digest == node.key)
                .order_by(models.c.name, versions.c.number)
            )
            names = [f"{name}@{number}" for name, number in connection.execute(query)]
            return ModelNode(str(node), names, str(node.key))
        case "dataset":
            columns = (datasets.c.namespace, datasets.c.name, dataset_versions.c.version, dataset_versions.c.digest)
            row = connection.execute(sa.select(*columns).join(datasets).where(dataset_versions.c.id == node.key)).one()
            of_version = run_io.c.dataset_version_id == node.key
            uris = connection.scalars(sa.select(run_io.c.uri).where(of_version, run_io.c.uri.is_not(None)).distinct())
            found_at = sorted(uri for uri in uris if uri is not None)
            return DatasetNode(str(node), row.namespace, row.name, row.version, row.digest, found_at)
        case "run":
            row = connection.execute(sa.select(runs).where(runs.c.run_id == node.key)).one()
            state = msgspec.json.decode(row.state, type=RunState)
            return RunNode(
                id=str(node),
                run_id=row.run_id,
                job_namespace=row.job_namespace,
                job_name=row.job_name,
                status=row.status,
                started_at=row.started_at,
                ended_at=row.ended_at,
                parent_id=row.parent_id,
                params=_values(state.params),
                metrics=_values(state.metrics),
                error=None if state.error is None else state.error.value,
            )


def _values(entries: dict[str, Statement]) -> dict[str, Any]:
    return {name: entries[name].value for name in sorted(entries)}
