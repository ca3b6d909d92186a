"""What happened to the deployments of an endpoint, page by page, with the judge's opinion at each event."""

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection

from noria.canary.judge import JudgeSettings, JudgeState, Verdict, verdict
from noria.canary.ramp import RampPlan, RampStatus
from noria.canary.shadow import ShadowPlan, ShadowState
from noria.registry.deployments.rows import read_deployments, unknown_endpoint
from noria.registry.deployments.states import Deployment, DeploymentEvent, EventType, State
from noria.registry.schema import deployments, endpoints
from noria.registry.versions import Change

MAX_EVENTS = 200
"""Of one deployment in a history: its latest ones."""


class JudgedEvidence(Struct, frozen=True):
    """What the judge had seen, and its opinion."""

    num_control: int
    control_errors: int
    num_canary: int
    canary_errors: int
    verdict: Verdict


class HistoryEvent(Struct, frozen=True):
    """An event of a deployment."""

    number: int
    type: EventType
    traffic: float  # share of the endpoint's requests from then on; the control's is 1, less the canary's
    change: Change
    status: RampStatus | None  # of the ramp
    step: int | None  # of the plan, from 0
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

    Raises:
        RegistryError: nothing was ever deployed to it.

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
    events = deployment.events[-MAX_EVENTS:]
    return HistoryDeployment(
        id=deployment.id,
        version=deployment.version.name,
        digest=deployment.version.digest,
        state=deployment.state,
        plan=deployment.plan,
        shadow_plan=deployment.shadow_plan,
        judge_settings=deployment.judge_settings,
        created=deployment.created,
        rolls_back=deployment.rolls_back,
        num_events=len(deployment.events),
        events=[_described_event(event, deployment.judge_settings) for event in events],
    )


def _described_event(event: DeploymentEvent, settings: JudgeSettings) -> HistoryEvent:
    return HistoryEvent(
        number=event.number,
        type=event.type,
        traffic=event.traffic,
        change=event.change,
        status=None if event.ramp is None else event.ramp.status,
        step=None if event.ramp is None else event.ramp.step,
        evidence=None if event.evidence is None else _judged(event.evidence, settings),
        shadow=event.shadow,
    )


def _judged(evidence: JudgeState, settings: JudgeSettings) -> JudgedEvidence:
    return JudgedEvidence(
        evidence.num_control,
        evidence.control_errors,
        evidence.num_canary,
        evidence.canary_errors,
        verdict(evidence, settings),
    )
