"""The sentences and rows about deployments that the commands print."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from noria.canary.judge import describe_counts
from noria.canary.pace import describe_needs
from noria.canary.ramp import RampPlan
from noria.cli.registry.common import format_time
from noria.observe.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from noria.registry.deployments.states import Deployment, EndpointStatus

_MAX_EVENTS = 20  # that `status` prints
_CONFIGURED = "(configuration)"


def undeployed_sentence(deployment: "Deployment") -> str:
    """Say what an endpoint has whose deployments were taken away."""
    return (
        f"{deployment.version.name} serves {deployment.endpoint} no more, and nothing else is deployed there: requests "
        "get the model of this name in a server's configuration, or 404"
    )


def outcome(deployment: "Deployment") -> tuple[bool | None, str]:
    """Return whether a deployment got what it is for, None while that is open, and a sentence."""
    from noria.registry.deployments.states import format_share

    name, endpoint = deployment.version.name, deployment.endpoint
    if deployment.has_served and deployment.state != "rolled_back":
        return True, f"{name} serves all requests to {endpoint}"
    if deployment.state == "shadow":
        return True, f"{name} gets copies of requests to {endpoint}: {_describe_shadow(deployment)}"
    if deployment.state == "canary":
        assert deployment.plan is not None and deployment.ramp is not None, "a canary has a plan"
        sentence = f"{name} gets {format_share(deployment.traffic)} of the requests to {endpoint}"
        if deployment.ramp.status == "holding":
            needs = describe_needs(deployment.judge_settings, deployment.traffic)
            return True, f"{sentence} until it is promoted or rolled back; {needs}"
        step = f"step {deployment.ramp.step + 1} of {len(deployment.plan.percents)}, {deployment.ramp.status}"
        return None, f"{sentence}: {step}; planned {_describe_ramp(deployment.plan)}"
    if deployment.state == "pending":
        return None, f"{name} is still not loaded for {endpoint}"
    reason = deployment.last_change.why
    verb = {"failed": "could not be loaded", "ended": "was ended as a shadow"}.get(deployment.state, "was rolled back")
    return False, f"{name} {verb} by {deployment.last_change.by}{f': {reason}' if reason else ''}"


def deploy_sentence(deployment: "Deployment", was_there: bool) -> str:
    """Say what is to happen; `was_there`: the same deployment was wanted before."""
    begun = "is already being deployed" if was_there else "is to be deployed"
    return (
        f"{deployment.version.name} {begun} to {deployment.endpoint}, {_describe_plan(deployment)}. A "
        f"server that follows this registry takes it up within a second: noria status {deployment.endpoint}"
    )


def _describe_plan(deployment: "Deployment") -> str:
    if deployment.shadow_plan is not None:
        return f"for copies of requests: {_describe_shadow(deployment)}"
    return "for all requests" if deployment.plan is None else _describe_ramp(deployment.plan)


def _describe_shadow(deployment: "Deployment") -> str:
    plan, shadow = deployment.plan, deployment.shadow_plan
    assert shadow is not None, "it is a shadow"
    has_end = shadow.max_s is not None or shadow.max_answers is not None
    if has_end and plan is None:
        return str(shadow)
    wanted = "for all requests" if plan is None else _describe_ramp(plan)
    return f"{shadow}, then {'' if has_end else 'once it is promoted '}{wanted}"


def _describe_ramp(plan: RampPlan) -> str:
    if len(plan.percents) == 1:
        return f"for {plan.percents[0]:g} % of the requests, until it is promoted or rolled back"
    return f"for {', '.join(f'{percent:g}' for percent in plan.percents)} % of the requests, {plan.step_s:g} s each"


def status_rows(endpoint: "EndpointStatus") -> Iterator[tuple[str, ...]]:
    """The rows of an endpoint: its version, and a canary or shadow beside it."""
    from noria.registry.deployments.states import format_share

    rest = 1.0 if endpoint.unfinished is None else 1.0 - endpoint.unfinished.traffic
    if endpoint.serving is None:
        yield endpoint.endpoint, _CONFIGURED, "if configured", format_share(rest), "", "", ""
    for deployment in filter(None, (endpoint.serving, endpoint.unfinished)):
        ramp, created = deployment.ramp, deployment.created
        status = f", {ramp.status}" if ramp is not None and deployment.state == "canary" else ""
        share = format_share(rest if deployment.state == "serving" else deployment.traffic)
        state, version = deployment.state + status, deployment.version.name
        yield endpoint.endpoint, version, state, share, format_time(deployment.last_change.at), created.by, created.why


def describe_verdict(endpoint: "EndpointStatus") -> str:
    """Say what the judge of an endpoint's canary knows."""
    verdict, canary = endpoint.verdict, endpoint.unfinished
    assert verdict is not None and canary is not None, "a judge is of a canary"
    counts = "" if canary.evidence is None else f"; {describe_counts(canary.evidence)}"
    return f"{verdict.outcome}, {_describe_interval(*verdict.interval)}; {verdict.reason}{counts}"


def _describe_interval(low: float, high: float) -> str:
    """Say in words between which bounds the canary's error rate less the control's is."""
    if low <= -1 and high >= 1:
        return "nothing known yet of its error rate"
    low_text, high_text = (f"{abs(100 * end):.1f} {'lower' if end < 0 else 'higher'}" for end in (low, high))
    return f"its error rate is between {low_text} and {high_text} than the control's, in points"


def event_lines(deployments: "list[Deployment]") -> list[str]:
    """The last events of an endpoint's deployments, a line each."""
    from noria.registry.deployments.states import format_share

    events = [(event.change.at, deployment, event) for deployment in deployments for event in deployment.events]
    events.sort(key=lambda each: (each[0], each[1].id, each[2].number))
    lines = ["events, the latest last" if len(events) <= _MAX_EVENTS else f"the last {_MAX_EVENTS} events"]
    for at, deployment, event in events[-_MAX_EVENTS:]:
        state = event.type.replace("_", " ")
        if event.type in ("canary", "step") and event.ramp is not None:
            state = f"canary with {format_share(event.traffic)}, {event.ramp.status}"
        elif event.type == "follow":
            state = "changes what it follows"
        why = f": {event.change.why}" if event.change.why else ""
        what = f"{deployment.endpoint if event.type == 'follow' else deployment.version.name} {state}"
        lines.append(escape_for_terminal(f"  {format_time(at)}  {deployment.id}  {what}  by {event.change.by}{why}"))
    return lines
