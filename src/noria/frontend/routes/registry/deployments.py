"""`/v1/deployments`: what `noria status`, `deploy`, `promote` and `rollback` do, over HTTP."""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct
from sqlalchemy import Engine
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.canary.judge import GUARD_PATTERN, MAX_GUARDS, JudgeSettings
from noria.canary.ramp import RampPlan, parse_ramp
from noria.canary.shadow import MAX_CHARS, ShadowPlan, parse_shadow
from noria.errors import InvalidField
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.json_response import json_response
from noria.frontend.http.paths import DEPLOYMENTS_PATH
from noria.frontend.routes.registry.lineage import sender_of
from noria.frontend.routes.registry.registry import Name, Reason, page_of, text_parameter
from noria.frontend.services.registry.connection import RegistryConnection
from noria.registry.deployments.history import DeploymentHistory, read_history
from noria.registry.deployments.states import Deployment, EndpointStatus, status_of
from noria.registry.deployments.store import DeploymentStore
from noria.registry.versions import Change

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
    guards: Annotated[tuple[Annotated[str, Meta(pattern=GUARD_PATTERN)], ...], Meta(max_length=MAX_GUARDS)] = ()
    follow: bool = False
    why: Reason = ""


class DeploymentChangeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a promotion or a rollback."""

    endpoint: Name
    why: Reason = ""


class DeploymentList(Struct, frozen=True):
    """What is deployed, by endpoint."""

    data: list[EndpointStatus]


class DeploymentRoutes:
    """The routes of deployments. What they write, the registrars of running servers carry out."""

    def __init__(self, registry: RegistryConnection, body_reader: JsonBodyReader) -> None:
        self._registry, self._body_reader = registry, body_reader

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [
            Route(DEPLOYMENTS_PATH, self.deployments, methods=["GET", "POST"]),
            Route(f"{DEPLOYMENTS_PATH}/history", self.history),
            Route(f"{DEPLOYMENTS_PATH}/promote", self.promote, methods=["POST"]),
            Route(f"{DEPLOYMENTS_PATH}/rollback", self.roll_back, methods=["POST"]),
        ]

    async def deployments(self, http: Request) -> Response:
        """Return what each endpoint has, or deploy a version."""
        if http.method == "POST":
            return await self._deploy(http)
        found = await self._registry.run(lambda engine: _status(DeploymentStore(engine)))
        return json_response(DeploymentList(found))

    async def history(self, http: Request) -> Response:
        """Return the deployments of an endpoint, page by page, with all that happened to them."""
        endpoint = text_parameter(http, "endpoint")
        page = page_of(http, DEFAULT_HISTORY, MAX_HISTORY)

        def read(engine: Engine) -> DeploymentHistory:
            with engine.connect() as connection:
                return read_history(connection, endpoint, *page)

        return json_response(await self._registry.run(read))

    async def _deploy(self, http: Request) -> Response:
        """Deploy a version; 200 if the same is being deployed already, else 202."""
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

    async def promote(self, http: Request) -> Response:
        """Let an endpoint's canary serve all its requests, or its shadow begin its plan."""
        return await self._change_endpoint(http, DeploymentStore.promote)

    async def roll_back(self, http: Request) -> Response:
        """Take away an endpoint's latest deployment."""
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
    given: dict[str, object] = {
        "min_responses": body.min_responses,
        "max_error_increase": None if body.max_error_increase is None else body.max_error_increase / 100,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if body.guards:
        given["guards"] = body.guards
    if given and body.canary is None and body.ramp is None:
        name = next(iter(given))
        raise InvalidField(f"{name} is for the judge of a canary; send canary or ramp, too.", field=name)
    try:
        return JudgeSettings(**given)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidField(f"{error}.", field="guards") from error
