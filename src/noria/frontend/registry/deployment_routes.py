"""`/v1/deployments`: what `noria status`, `deploy`, `promote` and `rollback` do, over HTTP."""

import functools
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.canary.judge import GUARD_PATTERN, MAX_GUARDS, JudgeSettings
from noria.canary.ramp import RampPlan, parse_ramp
from noria.canary.shadow import MAX_CHARS, ShadowPlan, parse_shadow
from noria.errors import InvalidField, RegistryConflict, RegistryUnavailable
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import Operation
from noria.frontend.registry.connection import RegistryConnection, reading
from noria.frontend.registry.lineage_routes import sender_of
from noria.frontend.registry.version_routes import (
    Name,
    Reason,
    needed_parameter,
    page_of,
    page_parameters,
    text_parameter,
)
from noria.registry.changes import Change
from noria.registry.deployments.history import DeploymentHistory, read_history
from noria.registry.deployments.states import Deployment, EndpointStatus, status_of
from noria.registry.deployments.store import DeploymentStore

DEFAULT_HISTORY, MAX_HISTORY = 20, 100  # deployments


class DeployRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/deployments`."""

    endpoint: Name
    version: Name
    canary: Annotated[float, Meta(gt=0, lt=100)] | None = None
    ramp: Annotated[str, Meta(max_length=200)] | None = None
    shadow: Annotated[str, Meta(max_length=MAX_CHARS)] | None = None
    swap: bool = False
    min_responses: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    max_error_increase: Annotated[float, Meta(gt=0, le=100)] | None = None
    max_rejection_increase: Annotated[float, Meta(gt=0, le=100)] | None = None
    guards: Annotated[tuple[Annotated[str, Meta(pattern=GUARD_PATTERN)], ...], Meta(max_length=MAX_GUARDS)] = ()
    follow: bool = False
    why: Reason = ""


class DeploymentChangeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a promotion or a rollback."""

    endpoint: Name
    why: Reason = ""


class DeploymentList(Struct, frozen=True):
    """The status of each endpoint: what is deployed there."""

    data: list[EndpointStatus]


_FIELDS = {
    "endpoint": "the name that requests give as `model`",
    "version": "MODEL, MODEL@NUMBER, MODEL@ALIAS or MODEL@KEY=VALUE; by a tag or a model alone the latest version",
    "canary": "per cent of the requests that it gets, until it is promoted or rolled back",
    "ramp": "a growing share, such as `5,25,50,100 every 10m`",
    "shadow": "first copies of this share of the requests, such as `20%`, `20% for 10m` or `20% for 500` (answers); "
    "they are compared and discarded",
    "swap": "unload what serves before the version is loaded, where memory does not hold both; requests to the "
    "endpoint get 503 meanwhile",
    "min_responses": "responses of a canary before it can fail; by default 80",
    "max_error_increase": "points by which the error rate of a canary that passes may be higher; by default 3",
    "max_rejection_increase": "points by which the share of requests that a canary rejects (4xx) may be higher; one "
    "that rejects more is rolled back, with 100 none is; by default 3",
    "guards": "counted variables, such as `image_brightness`, of which a canary that passes has the same distribution",
    "follow": "deploy each version that `version`, MODEL@ALIAS, MODEL@KEY=VALUE or MODEL, names later, too, until the "
    "next deployment without it",
    "why": "the reason, which is kept",
}


class DeploymentRoutes:
    """The routes of deployments. What they write, the registrars of running servers carry out."""

    def __init__(self, registry: RegistryConnection, body_reader: JsonBodyReader) -> None:
        self._registry, self._body_reader = registry, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        get = functools.partial(Operation, method="GET", group="Deployments", scopes=("lineage", "deploy"))
        post = functools.partial(Operation, method="POST", group="Deployments", scopes=("deploy",), fields=_FIELDS)
        return [
            get(
                path="/v1/deployments",
                handler=self._deployments,
                summary="List what is deployed",
                description="For each endpoint the deployment that serves and the one that is not finished, with their "
                "events, and what the judge of a canary says.",
                response=DeploymentList,
                errors=[RegistryUnavailable],
            ),
            post(
                path="/v1/deployments",
                handler=self._deploy,
                summary="Deploy a version",
                description="Lets a version of the registry answer the requests to an endpoint: all of them, or a "
                "share as a canary. The same request again changes nothing until that is finished.",
                body=DeployRequestBody,
                example={"endpoint": "t2i", "version": "shapes@3", "ramp": "5,25,50,100 every 10m"},
                response=Deployment,
                other_responses={202: ("accepted", Deployment)},
            ),
            get(
                path="/v1/deployments/history",
                handler=self._history,
                summary="List what happened to an endpoint",
                description="Its deployments, the latest first, each with its events, and of canaries what the judge "
                "had seen and said at each. `next` is the `before` of the next page.",
                parameters=[needed_parameter("endpoint"), *page_parameters(DEFAULT_HISTORY, MAX_HISTORY)],
                response=DeploymentHistory,
                errors=[InvalidField, RegistryConflict, RegistryUnavailable],
            ),
            post(
                path="/v1/deployments/promote",
                handler=self._promote,
                summary="Promote a canary or a shadow",
                description="A canary answers all requests to the endpoint. A shadow becomes the canary of its plan; "
                "without a plan it answers all requests, too.",
                body=DeploymentChangeBody,
                example={"endpoint": "t2i"},
                response=Deployment,
            ),
            post(
                path="/v1/deployments/rollback",
                handler=self._roll_back,
                summary="Roll a deployment back",
                description="Takes away the latest one of the endpoint: a canary at once; instead of one that serves, "
                "the version that served before is deployed.",
                body=DeploymentChangeBody,
                example={"endpoint": "t2i"},
                response=Deployment,
            ),
        ]

    async def _deployments(self, _: Request) -> Response:
        found = await self._registry.run(lambda engine: _status(DeploymentStore(engine)))
        return json_response(DeploymentList(found))

    async def _history(self, http: Request) -> Response:
        endpoint = text_parameter(http, "endpoint")
        page = page_of(http, DEFAULT_HISTORY, MAX_HISTORY)
        read = reading(lambda connection: read_history(connection, endpoint, *page))
        return json_response(await self._registry.run(read))

    async def _deploy(self, http: Request) -> Response:
        body = await self._body_reader.read_json(http, DeployRequestBody)
        plan, settings, change = _plan_of(body), _judge_settings_of(body), self._change(http, body.why)
        shadow = _shadow_of(body)
        deployment, was_there = await self._registry.run(
            lambda engine: DeploymentStore(engine).deploy(
                body.endpoint,
                body.version,
                plan,
                settings,
                change,
                follow=body.follow,
                shadow=shadow,
                swap=body.swap,
            )
        )
        return json_response(deployment, 200 if was_there else 202)

    async def _promote(self, http: Request) -> Response:
        return await self._change_endpoint(http, DeploymentStore.promote)

    async def _roll_back(self, http: Request) -> Response:
        return await self._change_endpoint(http, DeploymentStore.roll_back)

    async def _change_endpoint(
        self, http: Request, method: Callable[[DeploymentStore, str, Change], Deployment]
    ) -> Response:
        body = await self._body_reader.read_json(http, DeploymentChangeBody)
        change = self._change(http, body.why)
        return json_response(
            await self._registry.run(lambda engine: method(DeploymentStore(engine), body.endpoint, change))
        )

    def _change(self, http: Request, why: str) -> Change:
        return Change(self._registry.clock(), sender_of(http), why)


def _status(store: DeploymentStore) -> list[EndpointStatus]:
    return status_of(store.current(), store.followed())


def _plan_of(body: DeployRequestBody) -> RampPlan | None:
    """Return the plan; None: all requests at once. Raises InvalidField."""
    if body.canary is not None and body.ramp is not None:
        raise InvalidField("canary and ramp are given; send one: canary stays at its share, ramp grows.", field="ramp")
    try:
        if body.ramp is not None:
            return parse_ramp(body.ramp)
    except ValueError as error:
        raise InvalidField(f"ramp is {error}.", field="ramp") from error
    return None if body.canary is None else RampPlan((body.canary,))


def _shadow_of(body: DeployRequestBody) -> ShadowPlan | None:
    """Return the plan of the shadow; None: there is to be none. Raises InvalidField."""
    try:
        return None if body.shadow is None else parse_shadow(body.shadow)
    except ValueError as error:
        raise InvalidField(f"shadow is {error}.", field="shadow") from error


def _judge_settings_of(body: DeployRequestBody) -> JudgeSettings:
    """Return the judge's settings that are given. Raises InvalidField."""
    given: dict[str, object] = {} if body.min_responses is None else {"min_responses": body.min_responses}
    for name in ("max_error_increase", "max_rejection_increase"):
        if (points := getattr(body, name)) is not None:
            given[name] = points / 100
    if body.guards:
        given["guards"] = body.guards
    if given and body.canary is None and body.ramp is None:
        name = next(iter(given))
        raise InvalidField(f"{name} is for the judge of a canary; send canary or ramp, too.", field=name)
    try:
        return JudgeSettings(**given)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidField(f"{error}.", field="guards") from error
