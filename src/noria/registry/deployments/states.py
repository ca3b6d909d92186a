"""Deployments: what they are, how their states follow each other, and which routes follow from them. Pure; no clock.

An endpoint is the name that requests give as `model`. A deployment gives it a version of a model: at once, or as a
canary beside the endpoint's control, whose share grows by a plan. The control is the version of the deployment that is
`serving`; without one it is the model of that name in the server's configuration.

| state | meaning | becomes |
|---|---|---|
| pending | wanted; no server has loaded it | shadow, canary, serving, failed, rolled_back |
| shadow | gets copies of requests, whose answers are discarded | canary, serving, ended, rolled_back |
| canary | gets a share of the requests | serving, rolled_back |
| serving | gets all requests, or all but the next one's | replaced, rolled_back |
| failed, ended, rolled_back, replaced | gets no requests | |

An endpoint has at most one deployment that is *unfinished*, pending, shadow or canary, and at most one that is serving.
Each change is an event; an event of the type `step` changes the share or the evidence of a canary or what is known of a
shadow, one of the type `follow` what the endpoint follows, each other one the state.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from noria.canary import ramp as ramps
from noria.canary.judge import JudgeSettings, JudgeState, Verdict, verdict
from noria.canary.pace import describe_pace
from noria.canary.ramp import RampPlan, RampState, weight
from noria.canary.shadow import ShadowPlan, ShadowState, end_of
from noria.errors import RegistryError
from noria.protocol.routes import Route, Target
from noria.registry.changes import Change
from noria.registry.versions import Version

State = Literal["pending", "shadow", "canary", "serving", "failed", "ended", "rolled_back", "replaced"]
EventType = State | Literal["step", "follow"]
STATELESS: tuple[EventType, ...] = ("step", "follow")
"""The types of events that leave the state."""

NEXT_STATES: dict[State, tuple[State, ...]] = {
    "pending": ("shadow", "canary", "serving", "failed", "rolled_back"),
    "shadow": ("canary", "serving", "ended", "rolled_back"),
    "canary": ("serving", "rolled_back"),
    "serving": ("replaced", "rolled_back"),
    "failed": (),
    "ended": (),
    "rolled_back": (),
    "replaced": (),
}
UNFINISHED: tuple[State, ...] = ("pending", "shadow", "canary")
ROUTED: tuple[State, ...] = ("shadow", "canary", "serving")
IN_USE: tuple[State, ...] = ("pending", *ROUTED)
"""The states of deployments that get requests, or will."""

_FIRST_PROGRESS_S = 30.0


class DeploymentSettings(Struct, frozen=True, omit_defaults=True):
    """The settings of a deployment beside its plan."""

    judge: JudgeSettings
    rolls_back: int | None = None
    shadow: ShadowPlan | None = None
    swap: bool = False


class DeploymentEvent(Struct, frozen=True):
    """Something that happened to a deployment."""

    number: int  # from 1
    type: EventType
    traffic: float  # share of the endpoint's requests from then on; the control's is 1, less the canary's
    generation: int | None  # generation of the routes that it wrote; None: they stayed
    change: Change
    ramp: RampState | None = None
    evidence: JudgeState | None = None
    shadow: ShadowState | None = None


class Deployment(Struct, frozen=True):
    """A deployment as of its last event."""

    id: int
    endpoint: str
    version: Version
    state: State
    plan: RampPlan | None  # None: all requests at once
    judge_settings: JudgeSettings
    created: Change
    rolls_back: int | None = None  # the deployment whose predecessor's version this one serves again
    traffic: float = 0.0  # as of events
    ramp: RampState | None = None  # None: no plan, or not loaded yet
    evidence: JudgeState | None = None  # None: none yet, or of another version of the judge
    shadow_plan: ShadowPlan | None = None  # None: it is no shadow first
    shadow: ShadowState | None = None  # None: it was no shadow yet
    swap: bool = False  # whether what serves is unloaded first
    events: tuple[DeploymentEvent, ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """Whether it is pending, a shadow or a canary."""
        return self.state in UNFINISHED

    @property
    def has_served(self) -> bool:
        """Whether it was the endpoint's control at some time."""
        return any(event.type == "serving" for event in self.events)

    @property
    def last_change(self) -> Change:
        """When it got into its state, by whom and why."""
        return next(event.change for event in reversed(self.events) if event.type not in STATELESS)

    @property
    def title(self) -> str:
        """Its number, version and state, for messages."""
        share = f" with {format_share(self.traffic)}" if self.state == "canary" else ""
        return f"deployment {self.id} ({self.version.name}, {self.state.replace('_', ' ')}{share})"


class Endpoint(Struct, frozen=True):
    """The deployments of an endpoint."""

    name: str
    serving: Deployment | None  # None: the configuration's model of this name serves
    unfinished: Deployment | None
    latest: Deployment  # the last of all


def format_share(share: float) -> str:
    """Return a share, 0 to 1, in per cent."""
    return f"{100 * share:.4g} %"


def begin(deployment: Deployment, now: float) -> Deployment:
    """Return a pending deployment after it was loaded: a shadow, a canary with its first share, or serving.

    Raises RegistryError: it is not pending.
    """
    if deployment.state != "pending":
        raise _not_allowed(deployment, "loaded", ("pending",))
    if deployment.shadow_plan is not None:
        return become(msgspec.structs.replace(deployment, shadow=ShadowState(updated_at=now)), "shadow")
    return _begin_plan(deployment, now)


def _begin_plan(deployment: Deployment, now: float) -> Deployment:
    if deployment.plan is None:
        return become(deployment, "serving")
    ramp = ramps.start_ramp(deployment.plan, now)
    return become(msgspec.structs.replace(deployment, ramp=ramp), "serving" if ramp.is_final else "canary")


def step(deployment: Deployment, ramp: RampState, evidence: JudgeState | None) -> Deployment:
    """Return a canary with its ramp in another state: also serving, if that is promoted, or rolled back.

    Raises RegistryError: it is no canary.
    """
    if deployment.state != "canary" or deployment.plan is None:
        raise _not_allowed(deployment, "stepped", ("canary",))
    after = msgspec.structs.replace(deployment, ramp=ramp, evidence=evidence or deployment.evidence)
    match ramp.status:
        case "promoted":
            return become(after, "serving")
        case "rolled_back":
            return become(after, "rolled_back")
        case _:
            return msgspec.structs.replace(after, traffic=weight(deployment.plan, ramp))


def step_shadow(deployment: Deployment, shadow: ShadowState) -> Deployment:
    """Return a shadow of which more is known. When it is over, it begins its plan, or it is ended: without one, or with
    too many errors.

    Raises RegistryError: it is no shadow.
    """
    if deployment.state != "shadow" or deployment.shadow_plan is None:
        raise _not_allowed(deployment, "stepped as a shadow", ("shadow",))
    after = msgspec.structs.replace(deployment, shadow=shadow)
    end = end_of(deployment.shadow_plan, shadow, deployment.judge_settings.max_error_increase)
    if end is None:
        return after
    begins = end.has_passed and deployment.plan is not None
    return _begin_plan(after, shadow.updated_at) if begins else become(after, "ended")


def is_progress(before: Deployment, after: Deployment) -> bool:
    """Whether a step is worth an event: state, share or status changed, or time or evidence doubled.

    So the events of a step are few, however long it is, and who continues a canary loses at most half of it.
    """
    assert before.ramp is not None and after.ramp is not None, "a canary has a ramp"
    if (before.state, before.ramp.step, before.ramp.status) != (after.state, after.ramp.step, after.ramp.status):
        return True
    windows, responses = (
        [getattr(each, name, 0) for each in (before.evidence, after.evidence)] for name in ("num_windows", "num_seen")
    )
    return (
        windows[1] >= max(1, 2 * windows[0])
        or responses[1] >= max(1, 2 * responses[0])
        or after.ramp.elapsed_s >= max(_FIRST_PROGRESS_S, 2 * before.ramp.elapsed_s)
    )


def promote(deployment: Deployment, now: float) -> Deployment:
    """Return a deployment after somebody promoted it: a canary serves, and a shadow begins its plan.

    Raises RegistryError: it is neither.
    """
    if deployment.state == "pending":
        raise RegistryError(
            f"{deployment.title} is not loaded yet, so it cannot be promoted. Wait, see noria status "
            f"{deployment.endpoint}, or cancel it: noria rollback {deployment.endpoint}."
        )
    if deployment.state == "shadow":
        return _begin_plan(deployment, now)
    if deployment.state != "canary" or deployment.plan is None or deployment.ramp is None:
        raise _not_allowed(deployment, "promoted", ("canary", "shadow"))
    ramp = ramps.promote(deployment.plan, deployment.ramp, now)
    return become(msgspec.structs.replace(deployment, ramp=ramp), "serving")


def roll_back(deployment: Deployment, now: float) -> Deployment:
    """Return a deployment after somebody cancelled it or took it away. Raises RegistryError: it gets no requests."""
    ramp = deployment.ramp
    if ramp is not None:
        deployment = msgspec.structs.replace(deployment, ramp=ramps.roll_back(ramp, now))
    return become(deployment, "rolled_back")


def become(deployment: Deployment, state: State) -> Deployment:
    """Return a deployment in another state, with its share. Raises RegistryError: that does not follow its own."""
    if state not in NEXT_STATES[deployment.state]:
        raise _not_allowed(deployment, state, tuple(old for old, new in NEXT_STATES.items() if state in new))
    traffic = 1.0 if state == "serving" else 0.0
    if state == "canary":
        assert deployment.plan is not None and deployment.ramp is not None, "a canary has a plan"
        traffic = weight(deployment.plan, deployment.ramp)
    return msgspec.structs.replace(deployment, state=state, traffic=traffic)


def predecessor(serving: Deployment, of_endpoint: Iterable[Deployment]) -> Deployment | None:
    """Return the deployment whose version serves again when `serving` is rolled back; None: the configuration's model.

    It is the last one before that served other content. `of_endpoint` are all deployments of the endpoint.

    Raises RegistryError: the latest one has failed, has ended or was rolled back, or `serving` is itself what a
    rollback brought back: a rollback would take away what is good.
    """
    of_endpoint = sorted(of_endpoint, key=lambda one: one.id)
    latest = of_endpoint[-1]
    is_failed_rollback = latest.state == "failed" and latest.rolls_back == serving.id  # which is tried again
    gone = serving.rolls_back if latest.id == serving.id or is_failed_rollback else latest.id
    if gone is not None:
        what_happened = {"failed": "failed", "ended": "ended"}.get(latest.state, "was rolled back already")
        raise RegistryError(
            f"there is nothing to roll back: deployment {gone} {what_happened}; {serving.version.name} serves "
            f"{serving.endpoint}. To serve another version: noria deploy {serving.endpoint} MODEL@VERSION."
        )
    replaced = [one for one in of_endpoint if one.state == "replaced" and one.id < serving.id]
    return next((one for one in reversed(replaced) if one.version.digest != serving.version.digest), None)


def changes_nothing(serving: Deployment, version: Version, plan: RampPlan | None, shadow: ShadowPlan | None) -> bool:
    """Return whether a deployment would give all requests at once to the content that has them."""
    is_at_once = shadow is None and (plan is None or plan.percents[0] == 100)
    return is_at_once and serving.version.digest == version.digest


def routes_of(deployments: Iterable[Deployment]) -> tuple[Route, ...]:
    """Return the routes of all endpoints, by name, that follow from their deployments.

    An endpoint without a shadow, a canary and a serving deployment has none: the configuration's model serves it.
    """
    found: dict[tuple[str, State], Deployment] = {}
    for deployment in deployments:
        if deployment.state in ROUTED:
            key = deployment.endpoint, deployment.state
            assert key not in found, "an endpoint has one deployment that serves, and one that is unfinished"
            found[key] = deployment
    routes = []
    for endpoint in sorted({endpoint for endpoint, _ in found}):
        control, canary, shadow = (found.get((endpoint, state)) for state in ("serving", "canary", "shadow"))
        share = 0.0 if canary is None else canary.traffic
        plan = None if shadow is None else shadow.shadow_plan
        shadow_share = 0.0 if plan is None else plan.percent / 100
        routes.append(Route(endpoint, _target(control), _target(canary), share, _target(shadow), shadow_share))
    return tuple(routes)


def _target(deployment: Deployment | None) -> Target | None:
    return None if deployment is None else target_of(deployment)


def target_of(deployment: Deployment) -> Target:
    """Return the version of a deployment as engines and front ends know it."""
    version = deployment.version
    return Target(deployment.id, version.name, version.digest, version.fingerprint, version.urls)


def endpoints_of(deployments: Iterable[Deployment]) -> list[Endpoint]:
    """Return what each endpoint has, by name."""
    found: dict[str, list[Deployment]] = {}
    for deployment in deployments:
        found.setdefault(deployment.endpoint, []).append(deployment)
    return [
        Endpoint(
            name,
            serving=next((one for one in of_endpoint if one.state == "serving"), None),
            unfinished=next((one for one in of_endpoint if one.is_unfinished), None),
            latest=max(of_endpoint, key=lambda one: one.id),
        )
        for name, of_endpoint in sorted(found.items())
    ]


class EndpointStatus(Struct, frozen=True):
    """The state of an endpoint, for people and programs."""

    endpoint: str
    serving: Deployment | None  # None: the configuration's model of this name serves
    unfinished: Deployment | None
    latest: int  # the number of the last deployment of all
    verdict: Verdict | None  # the judge's by the evidence that is stored, if there is a canary
    follows: str | None  # MODEL@ALIAS, MODEL@KEY=VALUE or MODEL, whose new versions are deployed by themselves


def status_of(deployments: Iterable[Deployment], followed: Mapping[str, str]) -> list[EndpointStatus]:
    """Return what each endpoint has, by name, with the judge's verdict of its canary, and what it follows."""
    return [
        EndpointStatus(
            each.name, each.serving, each.unfinished, each.latest.id, _verdict(each.unfinished), followed.get(each.name)
        )
        for each in endpoints_of(deployments)
    ]


def _verdict(canary: Deployment | None) -> Verdict | None:
    if canary is None or canary.state != "canary":
        return None
    evidence, settings = canary.evidence or JudgeState(), canary.judge_settings
    found = verdict(evidence, settings)
    if found.outcome != "inconclusive" or canary.ramp is None or not canary.traffic:
        return found
    elapsed_s = canary.ramp.updated_at - canary.last_change.at
    pace = describe_pace(evidence, settings, canary.traffic, elapsed_s)
    return msgspec.structs.replace(found, reason="; ".join(filter(None, (pace, found.reason))))


def request_key(
    version: Version, plan: RampPlan | None, settings: DeploymentSettings, last_finished: int | None
) -> str:
    """Return what is the same for the same command to an endpoint, until its deployment is finished."""
    parts = (version.id, plan, settings, last_finished)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def check_swap(plan: RampPlan | None, shadow: ShadowPlan | None, *, swap: bool) -> None:
    """Raise RegistryError if a swap would leave nothing that a canary or a shadow could be compared with."""
    if swap and (plan is not None or shadow is not None):
        raise RegistryError(
            "swap unloads the version that serves, so a canary or a shadow would have nothing to be compared with; "
            "leave out swap, or canary, ramp and shadow."
        )


def unfinished_error(deployment: Deployment) -> RegistryError:
    """Return the error of a second deployment, which says what can be done about the first."""
    begun = f"{deployment.endpoint} has an unfinished deployment: {deployment.title}, by {deployment.created.by}."
    if deployment.rolls_back is not None:
        return RegistryError(f"{begun} It rolls back deployment {deployment.rolls_back}. Wait until it is finished.")
    is_routed = deployment.state in ROUTED
    choices = f"promote it: noria promote {deployment.endpoint}, or " if is_routed else "or "
    return RegistryError(
        f"{begun} Wait until it is finished, {choices}roll it back: noria rollback {deployment.endpoint}."
    )


def _not_allowed(deployment: Deployment, what: str, states: tuple[State, ...]) -> RegistryError:
    needed = " or ".join(state.replace("_", " ") for state in states)
    return RegistryError(
        f"deployment {deployment.id} of {deployment.endpoint} is {deployment.state.replace('_', ' ')}, so it cannot "
        f"be {what.replace('_', ' ')}; one that is {needed} can."
    )
