"""The routes about the server itself: whether it serves, its metrics, its documentation."""

import asyncio
import functools
from dataclasses import dataclass
from typing import Self

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from noria.config import Config, FrontendConfig
from noria.errors import EngineUnavailable, Unauthorized
from noria.frontend.access.auth import ClientDirectory
from noria.frontend.access.rejection_log import RejectionLog
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.json_response import json_response
from noria.frontend.openapi.docs_page import DocsPage, docs_page
from noria.frontend.openapi.document import openapi
from noria.frontend.routes.static_pages import PAGE_HEADERS, without_other_kinds
from noria.observe.metrics.exposition import exposition
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.text import EncoderModelSpec


class ServerRoutes:
    """The routes about the server itself."""

    def __init__(
        self, config: Config, engine_pool: EnginePool, clients: ClientDirectory, rejection_log: RejectionLog
    ) -> None:
        self._engine_pool, self._clients, self._rejection_log = engine_pool, clients, rejection_log
        # Needs no key and takes some milliseconds, so the last result is cached, by default models.
        self._api_docs = functools.lru_cache(maxsize=1)(functools.partial(_ApiDocs.build, config.frontend))

    async def healthz(self, _: Request) -> Response:
        """Return 200 as long as this process answers at all."""
        return json_response({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        """Return 200 if an engine is ready, else 503; the body has the state of each engine."""
        body = {"ready": self._engine_pool.ready, "engines": self._engine_pool.engines}
        return json_response(body, 200 if self._engine_pool.ready else 503)

    async def metrics(self, http: Request) -> Response:
        """Return the metrics, summed over all processes, in Prometheus' text format or OpenMetrics.

        Exemplars name requests, so only keys with the scope `metrics` get them, if the server has keys.
        """
        try:
            with_exemplars = self._clients.find(http.headers).has_scope("metrics")
        except Unauthorized as error:
            self._rejection_log.record(http, error)
            with_exemplars = False
        # In a thread, because it reads many files.
        accept = http.headers.get("accept", "")
        text, content_type = await asyncio.to_thread(exposition, accept, with_exemplars=with_exemplars)
        return Response(text, headers={"Content-Type": content_type})

    async def openapi(self, _: Request) -> Response:
        """Return the OpenAPI 3.1 document of this server."""
        return Response(self._built_docs.document, media_type="application/json")

    async def docs(self, http: Request) -> Response:
        """Return the OpenAPI document as a page."""
        page = self._built_docs.page
        text = without_other_kinds(page.with_origin(str(http.base_url).rstrip("/")), self._engine_pool.kinds)
        return HTMLResponse(text, headers=PAGE_HEADERS)

    @property
    def _built_docs(self) -> "_ApiDocs":
        try:
            spec = self._engine_pool.default_model(DiffusionModelSpec)
        except EngineUnavailable:
            spec = None
        encoders = self._engine_pool.models_of(EncoderModelSpec).values()
        return self._api_docs(spec, next((each for each in encoders if each.task == "embedding"), None))


@dataclass(frozen=True)
class _ApiDocs:
    """The documentation of the routes, as JSON and as a page."""

    document: bytes
    page: DocsPage

    @classmethod
    def build(
        cls, config: FrontendConfig, spec: DiffusionModelSpec | None, embedding_spec: EncoderModelSpec | None
    ) -> Self:
        """The specs are of the default models; None: there is none, or no engine was ready yet."""
        document = openapi(spec, config, embedding_spec)
        return cls(msgspec.json.encode(document), docs_page(document))
