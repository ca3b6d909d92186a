"""The front end as an ASGI application: its routes, and the one place where an error becomes a response.

Every refusal, on every route, has one shape (`refusals.py`), which is also the one that OpenAI's clients read.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from noria.config import Config, FrontendConfig
from noria.errors import (
    InternalError,
    MethodNotAllowed,
    NoriaError,
    RouteNotFound,
    Unauthorized,
    did_you_mean,
    short_repr,
)
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.api_keys import read_keys
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.error_body import error_body
from noria.frontend.http.event_loop_lag import monitor_event_loop_lag
from noria.frontend.http.middleware import AuthMiddleware, ObservabilityMiddleware
from noria.frontend.http.quotas import OPEN_PATHS, ClientDirectory
from noria.frontend.openapi.docs_page import DocsPage, docs_page
from noria.frontend.openapi.document import openapi
from noria.frontend.routes.a1111.routes import ROOT, A1111Routes
from noria.frontend.routes.image_metadata import ImageMetadataRoute
from noria.frontend.routes.images import ImageRoutes
from noria.frontend.routes.jobs import JobRoutes
from noria.frontend.routes.live import Live
from noria.frontend.routes.openai_images import OpenAIRoutes
from noria.frontend.routes.static_pages import PAGE_HEADERS, page_routes
from noria.frontend.services.generation import GenerationService
from noria.jobs.service import JobService, open_job_service, random_worker_id
from noria.observe.metrics.exposition import exposition
from noria.observe.traces.tracer import NO_TRACER, Tracer
from noria.protocol.model_spec import ModelSpec

PAGES = {
    "/": "playground.html",
    "/live": "live.html",
}


def build_app(
    config: Config,
    engine_pool: EnginePool,
    open_jobs: Callable[[], JobService] | None = None,
    tracer: Tracer = NO_TRACER,
) -> Starlette:
    """The application that serves what `link` reaches; it enters and leaves the link and the jobs with its own life.

    `open_jobs` opens them; by default as a front end that is alone. `tracer` is its caller's to close. `state.drain` is to be called when
    the server stops accepting.

    Raises:
        ConfigError: the file of API keys is not one.

    """
    clients = ClientDirectory(read_keys(config.frontend.keys_file), config.frontend.processes)
    generation_service = GenerationService(engine_pool, config.frontend, tracer=tracer, log_prompts=config.log_prompts)
    body_reader = JsonBodyReader(config.frontend.max_body_bytes)
    jobs = JobRoutes(
        generation_service,
        body_reader,
        config,
        open_jobs or functools.partial(open_job_service, config, random_worker_id(), tracer),
    )
    images = ImageRoutes(generation_service, body_reader)
    openai = OpenAIRoutes(generation_service, body_reader)
    live = Live(engine_pool, config.frontend)
    server_routes = ServerRoutes(config, engine_pool)
    routes = [
        Route("/t2i", images.t2i, methods=["POST"]),
        Route("/v1/images/generations", openai.generations, methods=["POST"]),
        Route("/v1/images/parameters", ImageMetadataRoute(generation_service).metadata, methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{model:path}", openai.model),
        *jobs.routes,
        *live.routes,
        *A1111Routes(generation_service, body_reader).routes,
        Route("/healthz", server_routes.healthz),
        Route("/readyz", server_routes.readyz),
        Route("/metrics", server_routes.metrics),
        Route("/openapi.json", server_routes.openapi),
        Route("/docs", server_routes.docs),
    ]
    routes = [route if route.path in OPEN_PATHS else _authenticated(route, clients) for route in routes]
    routes += page_routes(PAGES)  # open: a page shows nothing but what its reader's own key lets it ask for
    known_paths = [route.path for route in routes]

    def handle_noria_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, NoriaError), "registered for nothing else"
        headers = {"Connection": "close"} if getattr(http.state, "must_close", False) else None
        return error_response(error, http, headers)

    def handle_routing_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for nothing else"
        return _routing_response(http, error, known_paths)

    def drain() -> None:
        jobs.drain()
        live.drain()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with engine_pool:
            await jobs.start()
            lag_task = asyncio.create_task(monitor_event_loop_lag())
            try:
                yield
            finally:
                lag_task.cancel()
                await jobs.stop()

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(ObservabilityMiddleware, internal_error_response=_internal_error_response, tracer=tracer)
        ],
        exception_handlers={NoriaError: handle_noria_error, HTTPException: handle_routing_error},
        lifespan=lifespan,
    )
    app.state.drain = drain
    app.router.redirect_slashes = False  # "/t2i/" is not a path of ours, and a redirected POST is a riddle
    return app


def _authenticated(route: Route, clients: ClientDirectory) -> Route:
    return Route(
        route.path, route.endpoint, methods=route.methods, middleware=[Middleware(AuthMiddleware, clients=clients)]
    )


class ServerRoutes:
    """The routes about the server itself."""

    def __init__(self, config: Config, engine_pool: EnginePool) -> None:
        self._engine_pool = engine_pool
        # Open to all, and some milliseconds of work: done once for each model that was the first one last.
        self._api_docs = functools.lru_cache(maxsize=1)(functools.partial(_ApiDocs.build, config.frontend))

    async def healthz(self, _: Request) -> Response:
        """200 as long as this process answers at all."""
        return _json({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        """200 if an image request would be taken now, else 503; the state of each engine in both."""
        body = {"ready": self._engine_pool.ready, "engines": self._engine_pool.engines}
        return _json(body, 200 if self._engine_pool.ready else 503)

    async def metrics(self, http: Request) -> Response:
        """Prometheus' text format or OpenMetrics, summed over all processes."""
        # A thread: many files are read, and the event loop has images to answer.
        text, content_type = await asyncio.to_thread(exposition, http.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def openapi(self, _: Request) -> Response:
        """The HTTP interface as an OpenAPI 3.1 document."""
        return Response(self._api_docs(self._default_model_spec).document, media_type="application/json")

    async def docs(self, http: Request) -> Response:
        """The same document, for people."""
        page = self._api_docs(self._default_model_spec).page
        return HTMLResponse(page.with_origin(str(http.base_url).rstrip("/")), headers=PAGE_HEADERS)

    @property
    def _default_model_spec(self) -> ModelSpec | None:
        return next(iter(self._engine_pool.models.values()), None)


@dataclass(frozen=True)
class _ApiDocs:
    """What is said of the routes."""

    document: bytes
    page: DocsPage

    @classmethod
    def build(cls, config: FrontendConfig, spec: ModelSpec | None) -> Self:
        """`spec` is that of the first model; None: no engine was ready yet."""
        document = openapi(spec, config)
        return cls(msgspec.json.encode(document), docs_page(document))


def error_response(error: NoriaError, http: Request, headers: dict[str, str] | None = None) -> Response:
    """`error` as its HTTP response; Retry-After, in whole seconds, where the error knows when."""
    http.state.error_code = error.code
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    for_a1111 = http.url.path.startswith(f"{ROOT}/")
    response = _json(error_body(error, http.state.request_id, for_a1111=for_a1111), error.http_status, headers)
    if isinstance(error, Unauthorized):
        response.headers.append("WWW-Authenticate", 'Bearer realm="noria"')
        # A header of its own: Chromium finds none that stands behind another. Not for a page's script, which has a field for the key:
        # the browser would ask for a name and a password before that is seen.
        if "x-requested-with" not in http.headers:
            response.headers.append("WWW-Authenticate", 'Basic realm="noria", charset="UTF-8"')
    return response


def _routing_response(http: Request, error: HTTPException, known_paths: list[str]) -> Response:
    """Starlette's own 404 and 405, in our shape."""
    path = http.url.path
    if error.status_code == MethodNotAllowed.http_status:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        noria_error: NoriaError = MethodNotAllowed(
            f"{http.method} is not allowed for {short_repr(path)}; allowed is {allow}."
        )
        return error_response(noria_error, http, {"Allow": allow})
    noria_error = RouteNotFound(
        f"there is no {short_repr(path)}.{did_you_mean(path, known_paths)} GET /docs lists the routes."
    )
    return error_response(noria_error, http)


def _internal_error_response(request_id: str) -> Response:
    """The answer when our own code broke: says nothing of its insides, but names the line of the log."""
    message = f"the server failed on this request; its log has the details under {request_id}."
    error = InternalError(message)
    return _json(error_body(error, request_id), error.http_status)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
