"""The routes about the server itself: whether it serves, its metrics, its documentation."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from noria.config import Config
from noria.errors import EngineUnavailable, Unauthorized
from noria.frontend.access.auth import ClientDirectory
from noria.frontend.access.rejection_log import RejectionLog
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import Operation, Served
from noria.frontend.http.request_head import base_url
from noria.frontend.openapi.docs_page import DocsPage, docs_page
from noria.frontend.openapi.document import openapi
from noria.frontend.pages.routes import PAGE_HEADERS, without_other_kinds
from noria.observe.metrics.exposition import exposition
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.text import EncoderModelSpec


class ServerRoutes:
    """The routes about the server itself."""

    def __init__(
        self,
        config: Config,
        engine_pool: EnginePool,
        clients: ClientDirectory,
        rejection_log: RejectionLog,
        jobs_outage: Callable[[], str | None],
        find_metrics_targets: Callable[[], object] | None,
        all_operations: Callable[[], Sequence[Operation]],
    ) -> None:
        """`find_metrics_targets` returns where Prometheus finds the replicas; None: there is no such route."""
        self._jobs_outage, self._find_metrics_targets = jobs_outage, find_metrics_targets
        self._engine_pool, self._clients, self._rejection_log = engine_pool, clients, rejection_log
        # Needs no key and takes some milliseconds, so the last result is cached, by default models.
        self._api_docs = functools.lru_cache(maxsize=1)(
            lambda spec, embedding_spec: _ApiDocs.of(all_operations(), Served(spec, embedding_spec, config.frontend))
        )

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        get = functools.partial(Operation, method="GET", group="The server itself", scopes=None)
        operations = [
            get(
                path="/healthz",
                handler=self._healthz,
                summary="Check liveness",
                description="200 as long as the process responds.",
                response=Any,
                is_probe=True,
                is_polled=True,
            ),
            get(
                path="/readyz",
                handler=self._readyz,
                summary="Check readiness",
                description="200 if of each kind of model an engine is ready, else 503; the body has the state of "
                "each engine, and `jobs_unavailable`, which makes no 503, if jobs could not be stored or read in the "
                "last minute.",
                response=Any,
                other_responses={503: ("no engine is ready", Any)},
                is_probe=True,
                is_polled=True,
            ),
            get(
                path="/metrics",
                handler=self._metrics,
                summary="Get the metrics",
                description="Prometheus' text format, or OpenMetrics if the client accepts it, summed over all "
                "processes; with exemplars if the client's key has the scope `metrics`, or the server has no keys. On "
                "`frontend.metrics_address` alone, if that is set.",
                response={"text/plain": {}},
                is_polled=True,
            ),
            get(
                path="/openapi.json",
                handler=self._openapi,
                summary="Get this document",
                description="OpenAPI 3.1.",
                response=Any,
            ),
            get(
                path="/docs",
                handler=self._docs,
                summary="Read the documentation of this API",
                description="One page that loads nothing from other servers.",
                response={"text/html": {}},
            ),
        ]
        if self._find_metrics_targets is not None:  # addresses are for keys only, unlike metrics
            operations.append(
                get(path="/metrics/targets", handler=self._metrics_targets, scopes=("metrics",), is_polled=True)
            )
        return operations

    async def _healthz(self, _: Request) -> Response:
        return json_response({"status": "alive"})

    async def _readyz(self, _: Request) -> Response:
        """Return 200 if an engine is ready, else 503; the body has the state of each engine, and why jobs fail.

        Jobs that cannot be stored make no 503: other requests need no database.
        """
        body: dict[str, object] = {"ready": self._engine_pool.ready, "engines": self._engine_pool.engines}
        if (outage := self._jobs_outage()) is not None:
            body["jobs_unavailable"] = outage
        return json_response(body, 200 if self._engine_pool.ready else 503)

    async def _metrics(self, http: Request) -> Response:
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

    async def _metrics_targets(self, _: Request) -> Response:
        assert self._find_metrics_targets is not None
        return json_response(self._find_metrics_targets())

    async def _openapi(self, _: Request) -> Response:
        return Response(self._built_docs.document, media_type="application/json")

    async def _docs(self, http: Request) -> Response:
        page = self._built_docs.page
        text = without_other_kinds(page.with_origin(base_url(http).rstrip("/")), self._engine_pool.kinds)
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
    document: bytes
    page: DocsPage

    @classmethod
    def of(cls, operations: Sequence[Operation], served: Served) -> Self:
        """Return both forms of the documentation of `operations`."""
        document = openapi(operations, served)
        return cls(msgspec.json.encode(document), docs_page(operations, document))
