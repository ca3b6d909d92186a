"""A trace for other catalogs of lineage, such as Marquez: OpenLineage's events. Calls block.

The events of runs are those that the registry received and that are not struck out. A deployment has some of Noria's
own: a run of the job `deploy.ENDPOINT` that read a version of a model and wrote the endpoint. It starts when the
deployment is wanted; its other event is the last change of the deployment's state. The same trace gives the same ids of
runs, so events that arrive twice are no new runs.
"""

import uuid
from collections.abc import Iterator

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from noria.registry.deployments.states import STATELESS, State
from noria.registry.lineage.nodes import DeploymentNode, ModelNode, RunNode
from noria.registry.lineage.openlineage import DatasetRef, EventType
from noria.registry.lineage.run_events import MODELS_NAMESPACE, PRODUCER, RunId, model_ref, run_event
from noria.registry.lineage.struck_events import is_counting
from noria.registry.lineage.trace import Graph
from noria.registry.schema import deployment_events, lineage_events

_EVENT_TYPES: dict[State, EventType] = {
    "shadow": "RUNNING",
    "canary": "RUNNING",
    "failed": "FAIL",
    "rolled_back": "ABORT",
}
"""The event type of a run that has started, by the state of its deployment; others are COMPLETE."""


def export_events(connection: Connection, graph: Graph) -> Iterator[str]:
    """Yield the events of a trace as JSON, the oldest of runs first, then those of deployments."""
    run_ids = [node.run_id for node in graph.nodes if isinstance(node, RunNode)]
    query = sa.select(lineage_events.c.body).where(lineage_events.c.run_id.in_(run_ids), is_counting())
    yield from connection.scalars(query.order_by(lineage_events.c.at, lineage_events.c.seq))
    for edge in graph.edges:
        pair = graph.nodes[edge.start], graph.nodes[edge.to]
        match pair if edge.role == "version" else pair[::-1]:
            case DeploymentNode() as deployment, ModelNode() as model:
                yield _deployment_event("START", deployment.created.at, deployment, model)
                if deployment.state != "pending":
                    event_type = _EVENT_TYPES.get(deployment.state, "COMPLETE")
                    yield _deployment_event(event_type, _last_change(connection, deployment), deployment, model)


def _last_change(connection: Connection, deployment: DeploymentNode) -> float:
    query = sa.select(deployment_events.c.at).order_by(deployment_events.c.number.desc()).limit(1)
    of_deployment = deployment_events.c.deployment_id == deployment.number
    at: float = connection.execute(query.where(of_deployment, deployment_events.c.type.not_in(STATELESS))).scalar_one()
    return at


def _deployment_event(event_type: EventType, at: float, deployment: DeploymentNode, model: ModelNode) -> str:
    created = deployment.created
    run_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{PRODUCER}/deployments/{deployment.number}/{created.at}")
    event = run_event(
        event_type,
        at,
        RunId(str(run_id), MODELS_NAMESPACE, f"deploy.{deployment.endpoint}"),
        inputs={model_ref(deployment.version.partition("@")[0], model.digest): None},
        outputs={DatasetRef(MODELS_NAMESPACE, f"endpoints/{deployment.endpoint}", ""): None},
        params={"version": deployment.version, "by": created.by, "why": created.why},
    )
    return msgspec.json.encode(event, order="sorted").decode()
