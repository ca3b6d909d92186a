"""The history of an endpoint's deployments, page by page, with the judge's opinion at each event."""

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.canary.judge import JudgeSettings, Verdict, verdict
from noria.canary.ramp import RampPlan, RampStatus
from noria.canary.shadow import ShadowPlan, ShadowState
from noria.registry.changes import Change
from noria.registry.deployments.rows import read_deployments, unknown_endpoint
from noria.registry.deployments.states import Deployment, DeploymentEvent, EventType, State
from noria.registry.schema import deployments, endpoints
from noria.storage.field_copies import copy_fields

MAX_EVENTS = 200
"""Of one deployment in a history: its latest ones."""


class JudgedEvidence(Struct, frozen=True):
    """The evidence that the judge had seen, and its opinion."""

    num_control: int  # responses, rejections among them
    control_errors: int
    control_rejections: int
    control_repeats: int  # responses to sticky keys that had counted before
    num_canary: int
    canary_errors: int
    canary_rejections: int
    canary_repeats: int
    verdict: Verdict


class HistoryEvent(Struct, frozen=True):
    """An event of a deployment."""

    number: int
    type: EventType
    traffic: float  # share of the endpoint's requests from then on; the control's is 1, less the canary's
    change: Change
    status: RampStatus | None  # status of the ramp
    step: int | None  # step of the plan, from 0
    evidence: JudgedEvidence | None
    shadow: ShadowState | None


class HistoryDeployment(Struct, frozen=True):
    """A deployment, with its events."""

    id: int
    version: str  # MODEL@NUMBER
    digest: str
    state: State
    plan: RampPlan | None
    shadow_plan: ShadowPlan | None
    judge_settings: JudgeSettings
    created: Change
    rolls_back: int | None
    num_events: int
    events: list[HistoryEvent]  # the latest, the oldest of them first


class DeploymentHistory(Struct, frozen=True):
    """A page of the deployments of one endpoint, the latest first."""

    endpoint: str
    data: list[HistoryDeployment]
    next: int | None  # the `before` of the next page; None: there is none


def read_history(connection: Connection, endpoint: str, before: int | None, limit: int) -> DeploymentHistory:
    """Return at most `limit` deployments of an endpoint, those with numbers below `before`.

    Raises RegistryError: nothing was ever deployed to it.
    """
    endpoint_id = connection.scalar(sa.select(endpoints.c.id).where(endpoints.c.name == endpoint))
    if endpoint_id is None:
        raise unknown_endpoint(connection, endpoint)
    query = sa.select(deployments.c.id).where(deployments.c.endpoint_id == endpoint_id)
    if before is not None:
        query = query.where(deployments.c.id < before)
    ids = list(connection.scalars(query.order_by(deployments.c.id.desc()).limit(limit + 1)))
    found = read_deployments(connection, deployments.c.id.in_(ids[:limit]))
    data = [_described(deployment) for deployment in reversed(found)]
    return DeploymentHistory(endpoint, data, data[-1].id if len(ids) > limit else None)


def _described(deployment: Deployment) -> HistoryDeployment:
    return copy_fields(
        HistoryDeployment,
        deployment,
        version=deployment.version.name,
        digest=deployment.version.digest,
        num_events=len(deployment.events),
        events=[_described_event(event, deployment.judge_settings) for event in deployment.events[-MAX_EVENTS:]],
    )


def _described_event(event: DeploymentEvent, settings: JudgeSettings) -> HistoryEvent:
    evidence = event.evidence
    return copy_fields(
        HistoryEvent,
        event,
        status=None if event.ramp is None else event.ramp.status,
        step=None if event.ramp is None else event.ramp.step,
        evidence=evidence and copy_fields(JudgedEvidence, evidence, verdict=verdict(evidence, settings)),
    )
