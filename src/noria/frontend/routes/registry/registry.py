"""`/v1/registry`: the versions of models, what the server serves of them, and what made what."""

import re
from typing import Annotated

from msgspec import Meta, Struct
from sqlalchemy import Engine
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.errors import InvalidField, short_repr
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.json_response import json_response
from noria.frontend.http.paths import REGISTRY_PATH
from noria.frontend.routes.images.metadata import UploadedImages
from noria.frontend.routes.registry.lineage import sender_of
from noria.frontend.services.registry.connection import RegistryConnection
from noria.frontend.services.registry.served_versions import ServedVersionsService
from noria.frontend.services.registry.version_adding import VersionAdder, WantedVersion
from noria.images.metadata import GenerationMetadata
from noria.registry.lineage.graph import LineageGraph, read_lineage
from noria.registry.lineage.trace_subjects import MAX_CHARS, find_image_subjects, find_subjects
from noria.registry.version_list import VersionList, read_version_list
from noria.registry.versions import Change

DEFAULT_VERSIONS, MAX_VERSIONS = 100, 500
DEFAULT_NODES, MAX_NODES = 200, 500
"""Of a lineage, in each direction. Each takes some queries."""
_MAX_ROW = 2**53  # of numbers that JavaScript has
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
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [
            Route(f"{REGISTRY_PATH}/versions", self.versions, methods=["GET", "POST"]),
            Route(f"{REGISTRY_PATH}/served", self.served),
            Route(f"{REGISTRY_PATH}/trace", self.trace, methods=["GET", "POST"]),
        ]

    async def versions(self, http: Request) -> Response:
        """Return the versions of all models, page by page; or add one."""
        if http.method == "POST":
            return await self._add(http)
        page = page_of(http, DEFAULT_VERSIONS, MAX_VERSIONS)

        def read(engine: Engine) -> VersionList:
            with engine.connect() as connection:
                return read_version_list(connection, *page)

        return json_response(await self._registry.run(read))

    async def _add(self, http: Request) -> Response:
        """Add a version; 200 if it was there, else 201."""
        body = await self._body_reader.read_json(http, AddVersionBody)
        wanted = WantedVersion(body.model, body.source, body.alias, body.run_id, body.datasets)
        change = Change(self._registry.clock(), sender_of(http), body.why)
        version, was_there = await self._adding.add(wanted, change)
        return json_response(version, 200 if was_there else 201)

    async def served(self, _: Request) -> Response:
        """Return what engines hold, and how many requests each version answered; also while the registry is away."""
        return json_response(await self._registry.offload(self._served.read, self._served.engines()))

    async def trace(self, http: Request) -> Response:
        """Return what made something, and what was made from it; of a POST its body, an image file."""
        max_nodes = _number(http, "limit", MAX_NODES) or DEFAULT_NODES
        if http.method == "POST":
            metadata = await self._uploads.read(http, lambda found: found)
            return json_response(await self._registry.run(lambda engine: _trace_image(engine, metadata, max_nodes)))
        of = text_parameter(http, "of")

        def read(engine: Engine) -> LineageGraph:
            with engine.connect() as connection:
                return read_lineage(connection, find_subjects(connection, of), max_nodes)

        return json_response(await self._registry.run(read))


class ImageLineage(Struct, frozen=True):
    """What an image file says of its model, and the lineage of what made it."""

    model: str | None  # the endpoint that was asked
    version: str | None  # MODEL@NUMBER, as its server's registry named it; None: it was not deployed
    deployment: int | None
    digest: str | None
    fingerprint: str | None
    graph: LineageGraph


def _trace_image(engine: Engine, metadata: GenerationMetadata, max_nodes: int) -> ImageLineage:
    with engine.connect() as connection:
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
    return _number(http, "before", _MAX_ROW), _number(http, "limit", maximum) or default


def text_parameter(http: Request, name: str) -> str:
    """Return a parameter that has to be there. Raises InvalidField."""
    text = http.query_params.get(name, "")
    if not 1 <= len(text) <= MAX_CHARS or "\0" in text:
        raise InvalidField(f"{name} is {short_repr(text)}; allowed are 1 to {MAX_CHARS} characters.", field=name)
    return text


def _number(http: Request, name: str, maximum: int) -> int | None:
    """Return a parameter that may be there, 1 to `maximum`. Raises InvalidField."""
    text = http.query_params.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,16}", text) or not 1 <= int(text) <= maximum:
        raise InvalidField(f"{name} is {short_repr(text)}; allowed are 1 to {maximum}.", field=name)
    return int(text)
