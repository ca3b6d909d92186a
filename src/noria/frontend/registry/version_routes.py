"""`/v1/registry`: the versions of models, what the server serves of them, and what made what."""

import functools
from typing import Annotated

from msgspec import Meta, Struct
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidField,
    RateLimited,
    RegistryConflict,
    RegistryUnavailable,
    UnreadableImage,
    short_repr,
)
from noria.frontend.access.auth import client_id_of
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import IMAGE_CONTENT, JsonObject, Operation, parameter
from noria.frontend.http.request_head import read_number
from noria.frontend.protocols.t2i.metadata import UploadedImages
from noria.frontend.registry.connection import RegistryConnection, reading
from noria.frontend.registry.lineage_routes import sender_of
from noria.frontend.registry.served_versions import ServedVersions, ServedVersionsService
from noria.frontend.registry.version_adding import VersionAdder, WantedVersion
from noria.images.metadata import GenerationMetadata
from noria.registry.changes import Change
from noria.registry.lineage.graph import LineageGraph, read_lineage
from noria.registry.lineage.struck_events import LineageEventList, StruckEvents, list_events, strike_out
from noria.registry.lineage.trace_subjects import MAX_CHARS, find_image_subjects, find_subjects
from noria.registry.version_list import VersionList, read_version_list
from noria.registry.versions import Version

DEFAULT_VERSIONS, MAX_VERSIONS = 100, 500
DEFAULT_EVENTS, MAX_EVENTS = 100, 500
DEFAULT_NODES, MAX_NODES = 200, 500
"""Nodes of a lineage in each direction. A node takes some queries."""
_MAX_ROW = 2**53  # limit of JavaScript's exact integers
_MAX_DATASETS = 100

NO_NUL = r"^[^\x00]*$"
"""PostgreSQL stores no text with NUL."""
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=NO_NUL)]
Reason = Annotated[str, Meta(max_length=1000, pattern=NO_NUL)]
_Location = Annotated[str, Meta(min_length=1, max_length=2000, pattern=NO_NUL)]


class AddVersionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/registry/versions`."""

    model: Name
    source: _Location
    alias: Name | None = None
    run_id: Name | None = None
    datasets: Annotated[tuple[_Location, ...], Meta(max_length=_MAX_DATASETS)] = ()
    why: Reason = ""


class StrikeOutBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/registry/struck-events`: a run or an event."""

    run_id: Name | None = None
    digest: Name | None = None
    why: Reason = ""


_FIELDS = {
    "model": "the model; it is created if it is new",
    "source": "bundled, minilm, hf://OWNER/NAME[@REVISION], mlflow:models:/NAME@ALIAS, mlflow:models:/NAME/NUMBER, or "
    "a folder or URL below one of `registry.source_roots`",
    "alias": "let it name this version",
    "run_id": "the run that made it, if its events do not name its digest; or the run that is struck out",
    "digest": "of the event that is struck out",
    "datasets": "URI@VERSION of data that it was made from",
    "why": "the reason, which is kept",
}


def page_parameters(default: int, maximum: int) -> list[JsonObject]:
    """Return the parameters that `page_of` reads."""
    limit = parameter("limit", "query", type="integer", minimum=1, maximum=maximum, default=default)
    return [limit, parameter("before", "query", type="integer", minimum=1, maximum=2**53)]


def needed_parameter(name: str) -> JsonObject:
    """Return a parameter that `text_parameter` reads."""
    return _text_parameter(name) | {"required": True}


def _text_parameter(name: str) -> JsonObject:
    return parameter(name, "query", minLength=1, maxLength=MAX_CHARS, pattern=r"^[^\u0000]*$")


class RegistryRoutes:
    """The routes of models' versions."""

    def __init__(
        self,
        registry: RegistryConnection,
        adding: VersionAdder,
        served: ServedVersionsService,
        uploads: UploadedImages,
        body_reader: JsonBodyReader,
    ) -> None:
        self._registry, self._adding, self._served = registry, adding, served
        self._uploads, self._body_reader = uploads, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        get = functools.partial(Operation, method="GET", scopes=("lineage", "deploy"))
        post = functools.partial(Operation, method="POST")
        limit = parameter("limit", "query", type="integer", minimum=1, maximum=MAX_NODES, default=DEFAULT_NODES)
        reading = [InvalidField, RegistryConflict, RegistryUnavailable]
        return [
            get(
                path="/v1/registry/versions",
                handler=self._versions,
                group="Deployments",
                summary="List the versions of models",
                description="The latest first, removed ones included, with the deployments that name each. `next` is "
                "the `before` of the next page.",
                parameters=page_parameters(DEFAULT_VERSIONS, MAX_VERSIONS),
                response=VersionList,
                errors=[InvalidField, RegistryUnavailable],
            ),
            post(
                path="/v1/registry/versions",
                handler=self._add,
                group="Deployments",
                scopes=("deploy",),
                summary="Add a version of a model",
                description="As `noria models add` does. If the connection breaks, it goes on, and the same request "
                "waits for it or finds the version.",
                body=AddVersionBody,
                fields=_FIELDS,
                example={"model": "shapes", "source": "hf://org/shapes@v1", "alias": "prod"},
                response=Version,
                other_responses={201: ("added", Version)},
            ),
            get(
                path="/v1/registry/served",
                handler=self.served,
                group="Deployments",
                summary="List the versions that are served",
                description="What each engine holds, and how many requests each version answered since the server's "
                "start. Needs no database.",
                response=ServedVersions,
            ),
            get(
                path="/v1/registry/trace",
                handler=self._trace,
                group="Lineage",
                summary="Trace what made something, and what was made from it",
                description="`of` is what `noria trace` takes, or the `id` of a node. `limit` is of the nodes in each "
                "direction.",
                parameters=[needed_parameter("of"), limit],
                response=LineageGraph,
                errors=reading,
            ),
            post(
                path="/v1/registry/trace",
                handler=self._trace_image,
                group="Lineage",
                scopes=("lineage", "deploy"),
                summary="Trace what made an image file",
                description="The body is the file, with the metadata of Noria.",
                parameters=[limit],
                body=IMAGE_CONTENT,
                response=ImageLineage,
                errors=[InvalidBody, BodyTooLarge, UnreadableImage, RateLimited, *reading],
            ),
            get(
                path="/v1/registry/events",
                handler=self._events,
                group="Lineage",
                summary="List lineage events",
                description="The newest first, without their bodies, with who sent each and whether it is struck out; "
                "of all runs without `run`. `next` is the `before` of the next page.",
                parameters=[_text_parameter("run"), *page_parameters(DEFAULT_EVENTS, MAX_EVENTS)],
                response=LineageEventList,
                errors=reading,
            ),
            post(
                path="/v1/registry/struck-events",
                handler=self._strike_out,
                group="Lineage",
                scopes=("deploy",),
                summary="Strike out lineage",
                description="The event with this digest, or all events of the run, count no more; they stay, and "
                "traces show that they are struck out, by whom and why. Answers with the digests of the events that "
                "counted until then.",
                body=StrikeOutBody,
                fields=_FIELDS,
                example={"run_id": "01a2028d-9625-77a9-a141-efbbcc3a6ef9", "why": "the wrong data set"},
                response=StruckEvents,
            ),
        ]

    async def _versions(self, http: Request) -> Response:
        page = page_of(http, DEFAULT_VERSIONS, MAX_VERSIONS)
        return json_response(await self._registry.run(reading(lambda connection: read_version_list(connection, *page))))

    async def _add(self, http: Request) -> Response:
        body = await self._body_reader.read_json(http, AddVersionBody)
        wanted = WantedVersion(body.model, body.source, body.alias, body.run_id, body.datasets)
        change = Change(self._registry.clock(), sender_of(http), body.why)
        version, was_there = await self._adding.add(wanted, change)
        return json_response(version, 200 if was_there else 201)

    async def served(self, _: Request) -> Response:
        """Return what engines hold, and how many requests each version answered; also while the registry is away."""
        return json_response(await self._registry.offload(self._served.read, self._served.engines()))

    async def _trace(self, http: Request) -> Response:
        max_nodes = read_number(http, "limit", MAX_NODES) or DEFAULT_NODES
        of = text_parameter(http, "of")
        read = reading(lambda connection: read_lineage(connection, find_subjects(connection, of), max_nodes))
        return json_response(await self._registry.run_lineage(client_id_of(http), read))

    async def _trace_image(self, http: Request) -> Response:
        max_nodes = read_number(http, "limit", MAX_NODES) or DEFAULT_NODES
        metadata = await self._uploads.read(http, lambda found: found)
        read = reading(lambda connection: _trace_image(connection, metadata, max_nodes))
        return json_response(await self._registry.run_lineage(client_id_of(http), read))

    async def _events(self, http: Request) -> Response:
        page = page_of(http, DEFAULT_EVENTS, MAX_EVENTS)
        run_id = text_parameter(http, "run") if "run" in http.query_params else None
        read = reading(lambda connection: list_events(connection, run_id, *page))
        return json_response(await self._registry.run_lineage(client_id_of(http), read))

    async def _strike_out(self, http: Request) -> Response:
        body = await self._body_reader.read_json(http, StrikeOutBody)
        if (what := body.run_id or body.digest) is None or (body.run_id and body.digest):
            raise InvalidField("run_id and digest: send one, a run's id or an event's digest.", field="run_id")
        change = Change(self._registry.clock(), sender_of(http), body.why)
        return json_response(await self._registry.run(lambda engine: strike_out(engine, what, change)))


class ImageLineage(Struct, frozen=True):
    """The facts about its model that an image file contains, and the lineage of what made it."""

    model: str | None  # the endpoint that was asked
    version: str | None  # MODEL@NUMBER, as its server's registry named it; None: it was not deployed
    deployment: int | None
    digest: str | None
    fingerprint: str | None
    graph: LineageGraph


def _trace_image(connection: Connection, metadata: GenerationMetadata, max_nodes: int) -> ImageLineage:
    subjects = find_image_subjects(connection, metadata, "the file")
    return ImageLineage(
        metadata.model,
        metadata.registered_version,
        metadata.deployment,
        metadata.model_digest,
        metadata.model_version,
        read_lineage(connection, subjects, max_nodes),
    )


def page_of(http: Request, default: int, maximum: int) -> tuple[int | None, int]:
    """Return the parameters `before` and `limit` of a list. Raises InvalidField."""
    return read_number(http, "before", _MAX_ROW), read_number(http, "limit", maximum) or default


def text_parameter(http: Request, name: str) -> str:
    """Return a parameter that has to be there. Raises InvalidField."""
    text = http.query_params.get(name, "")
    if not 1 <= len(text) <= MAX_CHARS or "\0" in text:
        raise InvalidField(f"{name} is {short_repr(text)}; allowed are 1 to {MAX_CHARS} characters.", field=name)
    return text
