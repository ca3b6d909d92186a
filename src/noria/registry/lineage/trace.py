"""Walks from an endpoint, a deployment, a model or data to what made it, or down to all that was made from it.

A run's inputs are its own and those of its steps; its outputs are its own. So the way up goes from an output to its
run, to that run's inputs and to its steps, and theirs; the way down goes the same ways backwards. It is one of
versions: data whose version no event states leads nowhere, because any run may have written what was read.

A model is a dataset whose version is the digest of its manifest, whatever name a run gave it. An endpoint leads up to
the deployments that get its requests now, and these to the models that they serve; down, models lead to them. A
deployment that gets no requests any more leads up to its model, so that old images can be traced.
"""

import itertools
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.errors import RegistryError, short_repr
from noria.registry.deployments.states import ROUTED
from noria.registry.lineage.nodes import DEPLOYMENT, Node, NodeId, describe_all
from noria.registry.schema import (
    dataset_versions,
    datasets,
    deployment_heads,
    deployments,
    endpoints,
    lineage_events,
    run_io,
    runs,
    versions,
)

MAX_NODES = 2000
MAX_BYTES = 16 * 2**20  # size of the nodes of a trace, in JSON
_MAX_EDGES = 20_000  # also those to nodes that are left out
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


class Edge(NamedTuple):
    """`to` is `role` of `start`: the run that it was made by, an input of it."""

    start: int  # index in `Graph.nodes`
    to: int
    role: Role


class Graph(Struct, frozen=True):
    """The nodes that were found, with their edges, the subjects first."""

    direction: Direction
    num_subjects: int
    nodes: list[Node]
    edges: list[Edge]
    is_cut: bool  # there is more than the allowed number of nodes


def trace(
    connection: Connection,
    subjects: Iterable[NodeId],
    direction: Direction,
    max_nodes: int = MAX_NODES,
    max_bytes: int = MAX_BYTES,
) -> Graph:
    """Walk in one direction from all `subjects`, breadth first, to at most `max_nodes` and `max_bytes` of nodes."""
    found = {subject: number for number, subject in enumerate(itertools.islice(subjects, max_nodes))}
    num_subjects, num_edges, edges, is_cut = len(found), 0, [], False
    queue = list(found)
    for node in queue:
        nearest = _NEXT[direction, node.kind](connection, node, max_nodes + 1)
        num_edges += len(nearest)
        is_cut |= len(nearest) > max_nodes or num_edges > _MAX_EDGES
        for role, other in nearest[: max(0, _MAX_EDGES - num_edges + len(nearest))]:
            if other not in found:
                if len(found) >= max_nodes:
                    is_cut = True
                    continue
                found[other] = len(found)
                queue.append(other)
            edges.append(Edge(found[node], found[other], role))
        if num_edges > _MAX_EDGES:
            break
    nodes = describe_all(connection, queue, max_bytes)
    is_cut |= len(nodes) < len(queue)
    shown = [edge for edge in edges if max(edge.start, edge.to) < len(nodes)]
    return Graph(direction, min(num_subjects, len(nodes)), nodes, shown, is_cut)


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

    Raises RegistryError: it is not one, the registry does not have it, or it has several that begin so.
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
    rows = connection.execute(VERSIONS_OF_DATA.where(dataset_versions.c.digest == digest).limit(MAX_NODES)).all()
    return sorted({node_of(row) for row in rows}) or [NodeId("model", digest)]  # a model that no run has named


def find_dataset(connection: Connection, namespace: str, name: str, version: str) -> NodeId:
    """Return a version of a dataset. Raises RegistryError: the registry does not have it."""
    of_dataset = sa.and_(datasets.c.namespace == namespace, datasets.c.name == name)
    row = connection.execute(VERSIONS_OF_DATA.where(of_dataset, dataset_versions.c.version == version)).first()
    if row is not None:
        return node_of(row)
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


VERSIONS_OF_DATA = (
    sa.select(dataset_versions.c.id, dataset_versions.c.digest, versions.c.id.label("model_version"))
    .join(datasets, dataset_versions.c.dataset_id == datasets.c.id)
    .outerjoin(versions, versions.c.manifest_digest == dataset_versions.c.digest)
)
"""Versions of datasets, each also with the versions of models that it is."""


_ROUTED = DEPLOYMENT.where(deployment_heads.c.state.in_(ROUTED)).order_by(endpoints.c.name, deployments.c.id)
"""The deployments that get requests now: of each endpoint the control before the canary."""


def node_of(row: Any) -> NodeId:
    """Return the node of a row of `VERSIONS_OF_DATA`."""
    return NodeId("dataset", row.id) if row.model_version is None else NodeId("model", row.digest)


def _runs_of(connection: Connection, node: NodeId, limit: int, direction: str, role: Role) -> list[tuple[Role, NodeId]]:
    """Return the runs that have a model or data as input, or as output."""
    is_node = dataset_versions.c.digest == node.key if node.kind == "model" else dataset_versions.c.id == node.key
    query = (
        sa.select(runs.c.run_id, runs.c.owner, sa.func.min(lineage_events.c.seq).label("arrival"))
        .join(run_io, run_io.c.run_id == runs.c.run_id)
        .join(dataset_versions, run_io.c.dataset_version_id == dataset_versions.c.id)
        .join(lineage_events, run_io.c.digest == lineage_events.c.digest)
        .where(is_node, dataset_versions.c.version != "", run_io.c.direction == direction)
        .group_by(runs.c.run_id, runs.c.owner)
    )
    return [(role, run) for run in _in_turns(connection, query, limit)]


def _in_turns(connection: Connection, query: sa.Select[Any], limit: int) -> list[NodeId]:
    """Return the first runs by their `arrival`: of each `owner` one, then of each the second, and so on.

    A sender chooses an event's time, not its arrival. However many runs one names, those of others are among the first.
    """
    found = query.subquery()
    turn = sa.func.row_number().over(partition_by=found.c.owner, order_by=(found.c.arrival, found.c.run_id))
    ordered = sa.select(found.c.run_id).order_by(turn, found.c.arrival, found.c.run_id).limit(limit)
    return [NodeId("run", run_id) for run_id in connection.scalars(ordered)]


def _io_of(connection: Connection, run: NodeId, limit: int, direction: str, role: Role) -> list[tuple[Role, NodeId]]:
    """Return the inputs, or the outputs, of a run."""
    query = (
        VERSIONS_OF_DATA.join(run_io, run_io.c.dataset_version_id == dataset_versions.c.id)
        .where(run_io.c.run_id == run.key, run_io.c.direction == direction)
        .order_by(datasets.c.namespace, datasets.c.name, dataset_versions.c.version)
        .limit(limit)
    )
    return [(role, node) for node in dict.fromkeys(map(node_of, connection.execute(query)))]


def _deployments_of(connection: Connection, endpoint: NodeId, _: int) -> list[tuple[Role, NodeId]]:
    rows = connection.execute(_ROUTED.where(endpoints.c.name == endpoint.key))
    return [(row.state, NodeId("deployment", row.id)) for row in rows]


def _model_of(connection: Connection, deployment: NodeId, _: int) -> list[tuple[Role, NodeId]]:
    row = connection.execute(DEPLOYMENT.where(deployments.c.id == deployment.key)).one()
    return [("version", NodeId("model", row.manifest_digest))]


def _endpoint_of(connection: Connection, deployment: NodeId, _: int) -> list[tuple[Role, NodeId]]:
    rows = connection.execute(_ROUTED.where(deployments.c.id == deployment.key))
    return [("serves", NodeId("endpoint", row.name)) for row in rows]


def _read_by_or_deployed(connection: Connection, model: NodeId, limit: int) -> list[tuple[Role, NodeId]]:
    rows = connection.execute(_ROUTED.where(versions.c.manifest_digest == model.key))
    deployed: list[tuple[Role, NodeId]] = [("deployed as", NodeId("deployment", row.id)) for row in rows]
    return deployed + _runs_of(connection, model, limit, "input", "read by")


def _above(connection: Connection, run: NodeId, limit: int) -> list[tuple[Role, NodeId]]:
    of_run = lineage_events.c.run_id == runs.c.run_id
    arrival = sa.select(sa.func.min(lineage_events.c.seq)).where(of_run).scalar_subquery().label("arrival")
    steps = sa.select(runs.c.run_id, runs.c.owner, arrival).where(runs.c.parent_id == run.key)
    found: list[tuple[Role, NodeId]] = [("step", step) for step in _in_turns(connection, steps, limit)]
    return _io_of(connection, run, limit, "input", "input") + found


def _below(connection: Connection, run: NodeId, limit: int) -> list[tuple[Role, NodeId]]:
    parent = sa.select(runs.c.parent_id).where(runs.c.run_id == run.key).scalar_subquery()
    known = connection.scalars(sa.select(runs.c.run_id).where(runs.c.run_id == parent))
    found: list[tuple[Role, NodeId]] = [("part of", NodeId("run", run_id)) for run_id in known]
    return _io_of(connection, run, limit, "output", "output") + found


_NEXT: dict[tuple[Direction, str], Callable[[Connection, NodeId, int], list[tuple[Role, NodeId]]]] = {
    ("up", "endpoint"): _deployments_of,
    ("up", "deployment"): _model_of,
    ("up", "model"): lambda connection, node, limit: _runs_of(connection, node, limit, "output", "made by"),
    ("up", "dataset"): lambda connection, node, limit: _runs_of(connection, node, limit, "output", "made by"),
    ("up", "run"): _above,
    ("down", "endpoint"): lambda *_: [],
    ("down", "deployment"): _endpoint_of,
    ("down", "model"): _read_by_or_deployed,
    ("down", "dataset"): lambda connection, node, limit: _runs_of(connection, node, limit, "input", "read by"),
    ("down", "run"): _below,
}
