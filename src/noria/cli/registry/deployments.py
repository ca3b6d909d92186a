"""`noria deploy`, `promote`, `rollback` and `status`: which version serves an endpoint, and canaries beside it."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan, parse_ramp
from noria.canary.shadow import ShadowPlan, describe, parse_shadow
from noria.cli.parser import Parser, add_command, argument_type
from noria.cli.registry.common import (
    add_json_flag,
    add_registry_settings,
    add_why_flag,
    as_json,
    change_of,
    format_table,
    print_use,
    registry_of,
)
from noria.cli.registry.deployment_text import (
    deploy_sentence,
    describe_verdict,
    event_lines,
    outcome,
    status_rows,
    undeployed_sentence,
)
from noria.errors import ConfigError, short_repr
from noria.observe.terminal_text import escape_for_terminal

if TYPE_CHECKING:
    from noria.registry.deployments.states import Deployment, EndpointStatus
    from noria.registry.deployments.store import DeploymentStore

_POLL_S = 0.5
_FAST_S = 2.0  # within which a running server finds that a version is of another kind than the endpoint's
_FOLLOW_S = 1.0  # within which the front ends follow the routes, once the registry has them
_MAX_WAIT_S = 30 * 86400.0


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
        "--max-rejection-increase",
        metavar="PERCENT",
        help="points by which a good canary may reject more requests (3); with 100 it may reject any",
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
        "--wait",
        metavar="SECONDS",
        type=argument_type(_seconds),
        help="wait so long until it serves; a shadow, or a canary without a ramp, until it is loaded",
    )
    promote = add_command(commands, "promote", run_promote, "ENDPOINT", "let an endpoint's canary or shadow go on")
    promote.add_argument("endpoint", metavar="ENDPOINT", help="the endpoint")
    rollback = add_command(commands, "rollback", run_rollback, "ENDPOINT", "take an endpoint's latest deployment away")
    rollback.add_argument("endpoint", metavar="ENDPOINT", help="the endpoint")
    undeploy = add_command(commands, "undeploy", run_undeploy, "ENDPOINT", "take all deployments of an endpoint away")
    undeploy.add_argument("endpoint", metavar="ENDPOINT", help="the endpoint")
    status = add_command(commands, "status", run_status, "[ENDPOINT]", "print which versions serve which endpoints")
    status.add_argument("endpoint", metavar="ENDPOINT", nargs="?", help="only this one, and what happened to it")
    parsers = [deploy, promote, rollback, undeploy, status]
    for parser in parsers:
        add_json_flag(parser)
        add_registry_settings(parser)
    for parser in (deploy, promote, rollback, undeploy):
        add_why_flag(parser)
    return parsers


def run_deploy(arguments: argparse.Namespace) -> int:
    """Let requests to an endpoint be answered by a version: all at once, or a share of them, as a canary.

    A server that runs with this registry takes it up within a second. The same command again changes nothing until
    that is finished; nor does a version that answers all requests already. The exit status is 1 if the version cannot
    be loaded, is rolled back, or with --wait if it is not loaded in time. --wait ends when the version serves, is a
    shadow, or is a canary that stays at its share; the ramp of one that does not goes on after it.
    """
    plan = _plan_of(arguments)
    settings = _judge_settings_of(arguments)
    with _store(arguments) as store:
        followed = store.followed().get(arguments.endpoint)
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
        was_serving = deployment.state == "serving"
        deployment = _wait(store, deployment, _FAST_S if arguments.wait is None else arguments.wait)
    is_done, sentence = outcome(deployment)
    is_late = deployment.state == "pending" and arguments.wait is not None
    if was_serving:
        sentence = f"{deployment.version.name} serves {deployment.endpoint} already"
    elif is_late:
        sentence = f"{sentence} after {arguments.wait:g} s. A server that follows this registry goes on to load it"
        sentence = f"{sentence}: noria status {deployment.endpoint}"
    elif deployment.state == "pending":
        sentence = deploy_sentence(deployment, was_there)
    if arguments.follow:
        sentence = f"{deployment.endpoint} now follows {arguments.version}; {sentence}"
    elif followed is not None:
        sentence = f"{deployment.endpoint} no longer follows {followed}; {sentence}"
    elif was_serving:
        sentence = f"nothing changes: {sentence}"
    _print_deployment(arguments, deployment, sentence)
    return int(is_late or is_done is False)


def run_promote(arguments: argparse.Namespace) -> int:
    """Let the canary of an endpoint answer all its requests, whatever its judge says.

    A shadow becomes the canary that its --canary or --ramp said; without them it answers all requests.
    """
    with _store(arguments) as store:
        deployment = store.promote(arguments.endpoint, change_of(arguments))
    _print_deployment(arguments, deployment, outcome(deployment)[1])
    return 0


def run_rollback(arguments: argparse.Namespace) -> int:
    """Take away the latest deployment of an endpoint.

    A canary gets no more requests, and one that is not loaded yet is cancelled. Instead of one that serves, the last
    version before with other content is deployed; if there was none, the configuration's model of that name serves
    again. If the latest deployment gets no requests any more, nothing changes, and it is an error.
    """
    with _store(arguments) as store:
        deployment = store.roll_back(arguments.endpoint, change_of(arguments))
    if deployment.state == "pending":
        sentence = (
            f"{deployment.version.name} serves {deployment.endpoint} again as soon as a server has loaded it; see "
            f"noria status {deployment.endpoint}"
        )
    elif deployment.has_served:
        sentence = undeployed_sentence(deployment)
    else:
        sentence = f"{deployment.version.name} gets no requests to {deployment.endpoint}"
    _print_deployment(arguments, deployment, sentence)
    return 0


def run_undeploy(arguments: argparse.Namespace) -> int:
    """Take away all that is deployed to an endpoint, and let it follow nothing; its history stays.

    Requests to it get the model of this name in a server's configuration, or 404 if there is none.
    """
    with _store(arguments) as store:
        deployment, followed = store.undeploy(arguments.endpoint, change_of(arguments))
    ending = "" if followed is None else f". {deployment.endpoint} followed {followed}, and does not any more"
    _print_deployment(arguments, deployment, undeployed_sentence(deployment) + ending)
    return 0


def run_status(arguments: argparse.Namespace) -> int:
    """Print what serves each endpoint, with which share of its requests, since when, by whom and why.

    Of a canary also what its judge says, and of a shadow how it compares. Of one endpoint also its last events.
    """
    from noria.registry.deployments.states import status_of

    with _store(arguments) as store:
        deployments, followed = store.all(arguments.endpoint), store.followed()
    found = [
        endpoint
        for endpoint in status_of(deployments, followed)
        if arguments.json or arguments.endpoint is not None or not _is_undeployed(endpoint, deployments)
    ]
    if arguments.json:
        for endpoint in found:
            print(as_json(endpoint))
        return 0
    if not found:
        print("nothing is deployed; deploy a version: noria deploy ENDPOINT MODEL")
        return 0
    rows = [row for endpoint in found for row in status_rows(endpoint)]
    print(format_table(("endpoint", "version", "state", "requests", "since", "by", "why"), rows))
    for endpoint in found:
        if endpoint.follows is not None:
            print(escape_for_terminal(f"{endpoint.endpoint} follows {endpoint.follows}"))
        if endpoint.verdict is not None:
            print(escape_for_terminal(f"judge of {endpoint.endpoint}: {describe_verdict(endpoint)}"))
        latest = next(deployment for deployment in deployments if deployment.id == endpoint.latest)
        if latest.shadow is not None and latest.state == "shadow":
            print(escape_for_terminal(f"shadow of {endpoint.endpoint}: {describe(latest.shadow.counts)}"))
        if latest.state in ("failed", "ended", "rolled_back"):
            print(escape_for_terminal(f"latest of {endpoint.endpoint}: {outcome(latest)[1]}"))
    if arguments.endpoint is not None:
        print("\n".join(event_lines(deployments)))
    return 0


def _is_undeployed(endpoint: "EndpointStatus", deployments: "list[Deployment]") -> bool:
    """Whether nothing is deployed to an endpoint any more, as somebody wanted."""
    if endpoint.serving is not None or endpoint.unfinished is not None or endpoint.follows is not None:
        return False
    latest = next(each for each in deployments if each.id == endpoint.latest)
    return latest.state == "rolled_back" and latest.last_change.by not in ("judge", "registrar")


def _plan_of(arguments: argparse.Namespace) -> RampPlan | None:
    """Return the plan that --canary or --ramp gives; None: neither is given. Raises ConfigError."""
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


def _shadow_of(arguments: argparse.Namespace) -> ShadowPlan | None:
    """Return the plan that --shadow gives; None: it is not given. Raises ConfigError."""
    try:
        return None if arguments.shadow is None else parse_shadow(arguments.shadow)
    except ValueError as error:
        raise ConfigError(f"--shadow is {error}.") from error


def _judge_settings_of(arguments: argparse.Namespace) -> JudgeSettings:
    """Return the judge's settings that are given. Raises ConfigError."""
    given: dict[str, Any] = {}
    if arguments.min_responses is not None:
        if not arguments.min_responses.isdecimal() or not 1 <= int(arguments.min_responses) <= 10**9:
            raise ConfigError(f"--min-responses is {short_repr(arguments.min_responses)}; allowed is 1 to {10**9}.")
        given["min_responses"] = int(arguments.min_responses)
    for name in ("max_error_increase", "max_rejection_increase"):
        if (text := getattr(arguments, name)) is not None:
            given[name] = _percent(f"--{name.replace('_', '-')}", text) / 100
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
    while outcome(deployment)[0] is None and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left_s))
        deployment = store.find(deployment.id)
        if outcome(deployment)[0]:
            time.sleep(_FOLLOW_S)
    return deployment


@contextlib.contextmanager
def _store(arguments: argparse.Namespace) -> "Iterator[DeploymentStore]":
    from noria.registry.deployments.store import DeploymentStore

    with registry_of(arguments) as engine:
        yield DeploymentStore(engine)


def _print_deployment(arguments: argparse.Namespace, deployment: "Deployment", sentence: str) -> None:
    print(as_json(deployment) if arguments.json else escape_for_terminal(sentence))
    print_use(arguments)
