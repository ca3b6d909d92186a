"""The origins of a subject and what was made from it, as one graph whose edges all lead to what made something.

A step that states what it made is reached without the run that it is part of; that run is shown, too.
"""

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.registry.lineage.nodes import DeploymentNode, Node, NodeId, RunNode, describe_all
from noria.registry.lineage.trace import Graph, Role, trace
from noria.registry.schema import runs

_MAX_BYTES = 2 * 2**20
"""Bytes, in JSON, of the nodes of each direction, and of the runs that have steps among them."""

_UP: dict[Role, Role] = {"read by": "input", "output": "made by", "part of": "step", "deployed as": "version"}
"""The role of an edge of the way down, seen from its other end; of "serves" it is the deployment's state."""


class LineageEdge(Struct, frozen=True):
    """`source` is `role` of `product`: the run that it was made by, an input of it."""

    product: str  # a node's id
    source: str
    role: str


class LineageGraph(Struct, frozen=True):
    """The graph around the subjects. A loop is possible: events state what they like."""

    subjects: list[str]  # ids of nodes
    nodes: list[Node]
    edges: list[LineageEdge]
    is_cut: bool  # there is more than the allowed number of nodes, or bytes


def read_lineage(connection: Connection, subjects: Sequence[NodeId], max_nodes: int) -> LineageGraph:
    """Return what made the subjects and what was made from them, at most `max_nodes` in each direction."""
    up, down = (trace(connection, subjects, direction, max_nodes, _MAX_BYTES) for direction in ("up", "down"))
    nodes = {node.id: node for graph in (up, down) for node in graph.nodes}
    parents = _parents(connection, nodes.values())
    described = describe_all(connection, parents, _MAX_BYTES)
    nodes |= {node.id: node for node in described}
    edges = dict.fromkeys([*_edges(up), *_edges(down), *_steps(nodes)])
    is_cut = up.is_cut or down.is_cut or len(described) < len(parents)
    return LineageGraph([node.id for node in up.nodes[: up.num_subjects]], list(nodes.values()), list(edges), is_cut)


def _parents(connection: Connection, nodes: Iterable[Node]) -> list[NodeId]:
    """Return the runs that have steps among the nodes, and are none of them."""
    shown = [node for node in nodes if isinstance(node, RunNode)]
    wanted = {node.parent_id for node in shown} - {None} - {node.run_id for node in shown}
    known = connection.scalars(sa.select(runs.c.run_id).where(runs.c.run_id.in_(wanted)))
    return [NodeId("run", run_id) for run_id in known]


def _steps(nodes: Mapping[str, Node]) -> list[LineageEdge]:
    parents = {node.id: f"run:{node.parent_id}" for node in nodes.values() if isinstance(node, RunNode)}
    return [LineageEdge(parent, step, "step") for step, parent in parents.items() if parent in nodes]


def _edges(graph: Graph) -> list[LineageEdge]:
    edges = []
    for edge in graph.edges:
        start, to = graph.nodes[edge.start], graph.nodes[edge.to]
        if graph.direction == "up":
            edges.append(LineageEdge(start.id, to.id, edge.role))
        else:
            role = start.state if isinstance(start, DeploymentNode) else _UP[edge.role]
            edges.append(LineageEdge(to.id, start.id, role))
    return edges
