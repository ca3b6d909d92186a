"""`noria deploy`, `promote`, `rollback` and `status`: which version serves an endpoint, and canaries beside it."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noria.cli.parser import Parser, add_command, argument_type
from noria.cli.registry.common import (
    add_json_flag,
    add_registry_settings,
    add_why_flag,
    as_json,
    change_of,
    format_table,
    format_time,
    registry_of,
)
from noria.errors import ConfigError, short_repr
from noria.observe.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from noria.canary.judge import JudgeSettings, Verdict
    from noria.canary.ramp import RampPlan
    from noria.canary.shadow import ShadowPlan
    from noria.registry.deployments.states import Deployment, EndpointStatus
    from noria.registry.deployments.store import DeploymentStore

_POLL_S = 0.5
_FOLLOW_S = 1.0  # within which the front ends follow the routes, once the registry has them
_MAX_WAIT_S = 30 * 86400.0
_MAX_EVENTS = 20  # that `status` prints
_CONFIGURED = "(configuration)"


def add_to(commands: Any) -> list[Parser]:
    """Add the commands; returns their parsers."""
    deploy = add_command(commands, "deploy", run_deploy, "ENDPOINT VERSION", "let a version of a model serve requests")
    deploy.add_argument("endpoint", metavar="ENDPOINT", help="the name that requests give as model")
    deploy.add_argument(
        "version",
        metavar="VERSION",
        help="MODEL, MODEL@NUMBER, MODEL@ALIAS or MODEL@KEY=VALUE; by a tag or a model alone the latest version",
    )
    deploy.add_argument("--canary", metavar="PERCENT", help="this share of the requests, until promoted or rolled back")
    deploy.add_argument(
        "--ramp", metavar="PLAN", help="a growing share, such as '5,25,50,100 every 10m'; 100 serves all if it is good"
    )
    deploy.add_argument(
        "--shadow",
        metavar="PLAN",
        help="first copies of this share of the requests, such as '20%%' or '20%% for 10m', whose answers are compared "
        "and discarded",
    )
    deploy.add_argument(
        "--swap",
        action="store_true",
        help="unload what serves before VERSION is loaded, where memory does not hold both; requests get 503 meanwhile",
    )
    deploy.add_argument(
        "--follow",
        action="store_true",
        help="deploy each version that VERSION, MODEL@ALIAS, MODEL@KEY=VALUE or MODEL, names later, too",
    )
    deploy.add_argument("--min-responses", metavar="N", help="responses of a canary before it can fail (80)")
    deploy.add_argument(
        "--max-error-increase", metavar="PERCENT", help="points by which a good canary's error rate may be higher (3)"
    )
    deploy.add_argument(
        "--guard",
        metavar="VARIABLE",
        action="append",
        default=[],
        help="a counted variable, such as image_brightness, of which a good canary has the same distribution; may be "
        "repeated",
    )
    deploy.add_argument(
        "--wait", metavar="SECONDS", type=argument_type(_seconds), help="wait until it serves, or the canary is loaded"
    )
    promote = add_command(commands, "promote", run_promote, "ENDPOINT", "let an endpoint's canary or shadow go on")
    promote.add_argument("endpoint", metavar="ENDPOINT", help="the endpoint")
    rollback = add_command(commands, "rollback", run_rollback, "ENDPOINT", "take an endpoint's latest deployment away")
    rollback.add_argument("endpoint", metavar="ENDPOINT", help="the endpoint")
    status = add_command(commands, "status", run_status, "[ENDPOINT]", "print which versions serve which endpoints")
    status.add_argument("endpoint", metavar="ENDPOINT", nargs="?", help="only this one, and what happened to it")
    parsers = [deploy, promote, rollback, status]
    for parser in parsers:
        add_json_flag(parser)
        add_registry_settings(parser)
    for parser in (deploy, promote, rollback):
        add_why_flag(parser)
    return parsers


def run_deploy(arguments: argparse.Namespace) -> int:
    """Let requests to an endpoint be answered by a version: all at once, or a share of them, as a canary.

    A server that runs with this registry takes it up within a second. The same command again changes nothing until
    that is finished. With --wait the exit status is 1 if the version cannot be loaded, is rolled back, or in time
    neither serves nor is a shadow or a canary that stays at its share.
    """
    plan = _plan_of(arguments)
    settings = _judge_settings_of(arguments)
    with _store(arguments) as store:
        deployment, was_there = store.deploy(
            arguments.endpoint,
            arguments.version,
            plan,
            settings,
            change_of(arguments),
            follow=arguments.follow,
            shadow=_shadow_of(arguments),
            swap=arguments.swap,
        )
        if arguments.wait is None:
            _print_deployment(arguments, deployment, _deploy_sentence(deployment, was_there))
            return 0
        deployment = _wait(store, deployment, arguments.wait)
    is_done, sentence = _outcome(deployment)
    waited = "" if is_done or deployment.state == "canary" else " Does a server run with this registry?"
    sentence = sentence if is_done is not None else f"{sentence} after {arguments.wait:g} s.{waited}"
    _print_deployment(arguments, deployment, sentence)
    return 0 if is_done else 1


def run_promote(arguments: argparse.Namespace) -> int:
    """Let the canary of an endpoint answer all its requests, whatever its judge says.

    A shadow becomes the canary that its --canary or --ramp said; without them it answers all requests.
    """
    with _store(arguments) as store:
        deployment = store.promote(arguments.endpoint, change_of(arguments))
    _print_deployment(arguments, deployment, _outcome(deployment)[1])
    return 0


def run_rollback(arguments: argparse.Namespace) -> int:
    """Take away the latest deployment of an endpoint.

    A canary gets no more requests, and one that is not loaded yet is cancelled. Instead of one that serves, the version
    that served before is deployed; if there was none, the configuration's model of that name serves again.
    """
    with _store(arguments) as store:
        deployment = store.roll_back(arguments.endpoint, change_of(arguments))
    if deployment.state == "pending":
        sentence = (
            f"{deployment.version.name} serves {deployment.endpoint} again as soon as a server has loaded it; see "
            f"noria status {deployment.endpoint}"
        )
    elif deployment.has_served:
        sentence = f"the configuration's model {deployment.endpoint} serves again, not {deployment.version.name}"
    else:
        sentence = f"{deployment.version.name} gets no requests to {deployment.endpoint}"
    _print_deployment(arguments, deployment, sentence)
    return 0


def run_status(arguments: argparse.Namespace) -> int:
    """Print what serves each endpoint, with which share of its requests, since when, by whom and why.

    Of a canary also what its judge says, and of a shadow how it compares. Of one endpoint also its last events.
    """
    from noria.canary.shadow import describe
    from noria.registry.deployments.states import status_of

    with _store(arguments) as store:
        deployments, followed = store.all(arguments.endpoint), store.followed()
    found = status_of(deployments, followed)
    if arguments.json:
        for endpoint in found:
            print(as_json(endpoint))
        return 0
    if not found:
        print("nothing is deployed; deploy a version: noria deploy ENDPOINT MODEL")
        return 0
    rows = [row for endpoint in found for row in _status_rows(endpoint)]
    print(format_table(("endpoint", "version", "state", "requests", "since", "by", "why"), rows))
    for endpoint in found:
        if endpoint.follows is not None:
            print(escape_for_terminal(f"{endpoint.endpoint} follows {endpoint.follows}"))
        if endpoint.verdict is not None:
            print(escape_for_terminal(f"judge of {endpoint.endpoint}: {_describe_verdict(endpoint.verdict)}"))
        latest = next(deployment for deployment in deployments if deployment.id == endpoint.latest)
        if latest.shadow is not None and latest.state == "shadow":
            print(escape_for_terminal(f"shadow of {endpoint.endpoint}: {describe(latest.shadow.counts)}"))
        if latest.state in ("failed", "ended", "rolled_back"):
            print(escape_for_terminal(f"latest of {endpoint.endpoint}: {_outcome(latest)[1]}"))
    if arguments.endpoint is not None:
        print("\n".join(_event_lines(deployments)))
    return 0


def _plan_of(arguments: argparse.Namespace) -> "RampPlan | None":
    """Return the plan that --canary or --ramp gives; None: neither is given. Raises ConfigError."""
    from noria.canary.ramp import RampPlan, parse_ramp

    if arguments.canary is not None and arguments.ramp is not None:
        raise ConfigError("--canary and --ramp are given; use one: --canary stays at its share, --ramp grows.")
    try:
        if arguments.ramp is not None:
            return parse_ramp(arguments.ramp)
    except ValueError as error:
        raise ConfigError(f"--ramp is {error}.") from error
    if arguments.canary is None:
        return None
    percent = _percent("--canary", arguments.canary)
    if percent == 100:
        raise ConfigError("--canary is 100 %, which leaves no control; leave --canary out to serve all requests.")
    return RampPlan((percent,))


def _shadow_of(arguments: argparse.Namespace) -> "ShadowPlan | None":
    """Return the plan that --shadow gives; None: it is not given. Raises ConfigError."""
    from noria.canary.shadow import parse_shadow

    try:
        return None if arguments.shadow is None else parse_shadow(arguments.shadow)
    except ValueError as error:
        raise ConfigError(f"--shadow is {error}.") from error


def _judge_settings_of(arguments: argparse.Namespace) -> "JudgeSettings":
    """Return the judge's settings that are given. Raises ConfigError."""
    from noria.canary.judge import JudgeSettings

    given: dict[str, Any] = {}
    if arguments.min_responses is not None:
        if not arguments.min_responses.isdecimal() or not 1 <= int(arguments.min_responses) <= 10**9:
            raise ConfigError(f"--min-responses is {short_repr(arguments.min_responses)}; allowed is 1 to {10**9}.")
        given["min_responses"] = int(arguments.min_responses)
    if arguments.max_error_increase is not None:
        given["max_error_increase"] = _percent("--max-error-increase", arguments.max_error_increase) / 100
    if arguments.guard:
        given["guards"] = tuple(arguments.guard)
    if given and arguments.canary is None and arguments.ramp is None:
        raise ConfigError("a judge is of a canary; give --canary or --ramp, too.")
    try:
        return JudgeSettings(**given)
    except ValueError as error:
        raise ConfigError(f"--guard: {error}.") from error


def _percent(flag: str, text: str) -> float:
    """Return the number of `5` or `5 %`. Raises ConfigError."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise ConfigError(f"{flag} is {short_repr(text)}; allowed are per cents above 0 and at most 100, such as 5%.")
    return percent


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_WAIT_S:
        raise ValueError(f"{short_repr(text)}; allowed are seconds above 0 and at most {_MAX_WAIT_S:g} (30 days)")
    return seconds


def _wait(store: "DeploymentStore", deployment: "Deployment", timeout_s: float) -> "Deployment":
    """Return the deployment when it is done, or as it is after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while _outcome(deployment)[0] is None and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left_s))
        deployment = store.find(deployment.id)
        if _outcome(deployment)[0]:
            time.sleep(_FOLLOW_S)
    return deployment


def _outcome(deployment: "Deployment") -> tuple[bool | None, str]:
    """Return whether a deployment got what it is for, None while that is open, and a sentence."""
    from noria.registry.deployments.states import format_share

    name, endpoint = deployment.version.name, deployment.endpoint
    if deployment.has_served and deployment.state != "rolled_back":
        return True, f"{name} serves all requests to {endpoint}"
    if deployment.state == "shadow":
        return True, f"{name} gets copies of requests to {endpoint}: {deployment.shadow_plan}"
    if deployment.state == "canary":
        holds = deployment.ramp is not None and deployment.ramp.status == "holding"
        return holds or None, f"{name} gets {format_share(deployment.traffic)} of the requests to {endpoint}"
    if deployment.state == "pending":
        return None, f"{name} is still not loaded for {endpoint}"
    reason = deployment.last_change.why
    verbs = {"failed": "could not be loaded", "ended": "was ended as a shadow"}
    verb = verbs.get(deployment.state, "was rolled back")
    return False, f"{name} {verb} by {deployment.last_change.by}{f': {reason}' if reason else ''}"


def _deploy_sentence(deployment: "Deployment", was_there: bool) -> str:
    begun = "is already being deployed" if was_there else "is to be deployed"
    return (
        f"{deployment.version.name} {begun} to {deployment.endpoint}, {_describe_plan(deployment)}. A running "
        f"server takes it up within a second: noria status {deployment.endpoint}"
    )


def _describe_plan(deployment: "Deployment") -> str:
    plan, shadow = deployment.plan, deployment.shadow_plan
    if shadow is not None:
        return f"for copies of requests: {shadow}"
    if plan is None:
        return "for all requests"
    if len(plan.percents) == 1:
        return f"for {plan.percents[0]:g} % of the requests, until it is promoted or rolled back"
    return f"for {', '.join(f'{percent:g}' for percent in plan.percents)} % of the requests, {plan.step_s:g} s each"


def _status_rows(endpoint: "EndpointStatus") -> Iterator[tuple[str, ...]]:
    from noria.registry.deployments.states import format_share

    unfinished = endpoint.unfinished
    rest = 1.0 if unfinished is None else 1.0 - unfinished.traffic
    if endpoint.serving is None:
        yield endpoint.endpoint, _CONFIGURED, "serving", format_share(rest), "", "", ""
    for deployment in (endpoint.serving, unfinished):
        if deployment is None:
            continue
        ramp, created = deployment.ramp, deployment.created
        status = f", {ramp.status}" if ramp is not None and deployment.state == "canary" else ""
        share = format_share(rest if deployment.state == "serving" else deployment.traffic)
        since = format_time(deployment.last_change.at)
        state, version = deployment.state + status, deployment.version.name
        yield endpoint.endpoint, version, state, share, since, created.by, created.why


def _describe_verdict(verdict: "Verdict") -> str:
    low, high = (100 * end for end in verdict.interval)
    return f"{verdict.outcome}, error rate {low:+.1f} to {high:+.1f} points; {verdict.reason}"


def _event_lines(deployments: "list[Deployment]") -> list[str]:
    from noria.registry.deployments.states import format_share

    events = [(event.change.at, deployment, event) for deployment in deployments for event in deployment.events]
    events.sort(key=lambda each: (each[0], each[1].id, each[2].number))
    lines = ["events, the latest last" if len(events) <= _MAX_EVENTS else f"the last {_MAX_EVENTS} events"]
    for at, deployment, event in events[-_MAX_EVENTS:]:
        state = event.type.replace("_", " ")
        if event.type in ("canary", "step") and event.ramp is not None:
            state = f"canary with {format_share(event.traffic)}, {event.ramp.status}"
        why = f": {event.change.why}" if event.change.why else ""
        what = f"{deployment.version.name} {state}"
        lines.append(escape_for_terminal(f"  {format_time(at)}  {deployment.id}  {what}  by {event.change.by}{why}"))
    return lines


@contextlib.contextmanager
def _store(arguments: argparse.Namespace) -> "Iterator[DeploymentStore]":
    from noria.registry.deployments.store import DeploymentStore

    with registry_of(arguments) as engine:
        yield DeploymentStore(engine)


def _print_deployment(arguments: argparse.Namespace, deployment: "Deployment", sentence: str) -> None:
    print(as_json(deployment) if arguments.json else escape_for_terminal(sentence))
