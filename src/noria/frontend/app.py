"""The ASGI application of a front end: its routes, middleware and exception handlers."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from noria.config import Config, FrontendConfig
from noria.errors import NoriaError
from noria.frontend.access.api_keys import read_keys
from noria.frontend.access.auth import AuthenticatedEndpoint, ClientDirectory
from noria.frontend.access.key_reload import follow_keys
from noria.frontend.access.rejection_log import RejectionLog
from noria.frontend.access.request_origin import RequestOriginCheck
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.errors import error_response, internal_error_response, routing_error_response
from noria.frontend.http.event_loop_lag import monitor_event_loop_lag
from noria.frontend.http.json_response import json_response
from noria.frontend.http.middleware import ObservabilityMiddleware
from noria.frontend.http.paths import METRICS_TARGETS_PATH, is_open, needed_scope
from noria.frontend.open_inference.routes import OpenInferenceRoutes
from noria.frontend.open_inference.service import OpenInferenceService
from noria.frontend.routes.a1111.routes import A1111Routes
from noria.frontend.routes.images.metadata import ImageMetadataRoute, UploadedImages
from noria.frontend.routes.images.t2i import ImageRoutes
from noria.frontend.routes.jobs.routes import JobRoutes
from noria.frontend.routes.live import LiveRoutes
from noria.frontend.routes.openai.edits import EditRoutes
from noria.frontend.routes.openai.embeddings import EmbeddingRoutes
from noria.frontend.routes.openai.images import GenerationRoutes
from noria.frontend.routes.openai.models import ModelRoutes
from noria.frontend.routes.registry.deployments import DeploymentRoutes
from noria.frontend.routes.registry.lineage import LineageRoutes
from noria.frontend.routes.registry.registry import RegistryRoutes
from noria.frontend.routes.registry.statistics import StatisticsRoutes
from noria.frontend.routes.server import ServerRoutes
from noria.frontend.routes.static_pages import page_routes
from noria.frontend.routes.tei.routes import TeiRoutes
from noria.frontend.routes.user_endpoints import UserEndpointRoutes
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.registry.connection import RegistryConnection
from noria.frontend.services.registry.lineage import LineageService
from noria.frontend.services.registry.served_versions import ServedVersionsService
from noria.frontend.services.registry.statistics import ReadSnapshot, StatisticsFile, StatisticsService
from noria.frontend.services.registry.version_adding import VersionAdder
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.frontend.text_jobs.routes import TextJobRoutes
from noria.frontend.user_code.endpoints import UserEndpoints
from noria.jobs.service import JobService, open_job_service, random_worker_id
from noria.models.controlnet_folders import ControlNetFolders
from noria.models.encoder.tokens import Tokenizer
from noria.models.lora_folders import LoraFolders
from noria.models.refiner_folders import RefinerFolders
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.text import EncoderModelSpec
from noria.registry.schema import open_registry
from noria.registry.statistics.file import statistics_file

if TYPE_CHECKING:
    from noria.frontend.open_inference.grpc_server import GrpcServer

PAGES = {
    "/": "playground.html",
    "/text": "text.html",
    "/live": "live.html",
    "/models": "models.html",
    "/deployments": "deployments.html",
    "/lineage": "lineage.html",
    "/drift": "drift.html",
}


def build_app(
    config: Config,
    engine_pool: EnginePool,
    open_jobs: Callable[[], JobService] | None = None,
    tracer: Tracer = GLOBAL_TRACER,
    metrics_port: int | None = None,
    load_tokenizer: Callable[[EncoderModelSpec], Tokenizer] | None = None,
    endpoint_models: Mapping[str, EncoderModelSpec] = MappingProxyType({}),
    num_frontends: int = 1,
    statistics: StatisticsRecorder | None = None,
    metrics_targets: Callable[[], object] | None = None,
    read_statistics: ReadSnapshot | None = None,
) -> Starlette:
    """Return the application in front of `engine_pool`. Its lifespan connects the pool and runs the jobs.

    `open_jobs` opens the jobs; by default as the only front end. The caller closes `tracer`, calls `app.state.load`,
    which loads the code of endpoints, before the lifespan begins, and `app.state.drain` when the server stops accepting
    connections; or, if it need not stop soon, `app.state.retire`, which also waits for the end of jobs and gRPC calls.
    `metrics_port` is the port that serves /metrics alone; None: there is none. `load_tokenizer` loads the tokenizer of
    a text encoder; by default that of its folder. `endpoint_models` are those of endpoints, by the endpoint's name.
    `num_frontends` share the clients' limits, until `app.state.share_limits` is called with another number.
    `statistics` counts the variables of `config.statistics`; by default one is made.
    `metrics_targets` returns the answer to GET /metrics/targets; None: there is no such route.
    `read_statistics` reads what the registrar has counted; None: from the file in this data folder.

    Raises:
        ConfigError: the file of API keys is invalid, or variables of `config.statistics` are not allowed.

    """
    clients, uploads = ClientDirectory(read_keys(config.frontend.api_keys_file), num_frontends), UploadedImages()
    statistics = statistics or StatisticsRecorder(config.statistics)
    generation_service = GenerationService(
        engine_pool,
        config.frontend,
        tracer=tracer,
        log_prompts=config.log_prompts,
        statistics=statistics,
        loras=LoraFolders.of(config.engine),
        controlnets=ControlNetFolders.of(config.engine),
        refiners=RefinerFolders.of(config.engine),
    )
    body_reader = JsonBodyReader(config.frontend.max_body_bytes, config.frontend.max_image_bytes, uploads.limiter)
    encoding_service = EncodingService(
        engine_pool, config.frontend, load_tokenizer or _load_tokenizer, tracer, statistics
    )
    open_inference = OpenInferenceService(encoding_service)
    endpoints = UserEndpoints(
        config.endpoints,
        endpoint_models,
        encoding_service,
        generation_service,
        config.frontend.user_code_threads,
        tracer,
        statistics,
    )
    rejection_log = RejectionLog(clients)
    grpc_server = _grpc_server(open_inference, clients, rejection_log, config.frontend, tracer)
    jobs = JobRoutes(
        generation_service,
        encoding_service,
        body_reader,
        config,
        open_jobs or functools.partial(open_job_service, config, random_worker_id(), tracer),
        lambda: clients.num_processes,
    )
    registry = RegistryConnection(functools.partial(open_registry, config))
    adding = VersionAdder(registry, config)
    live = LiveRoutes(engine_pool, config.frontend)
    server_routes = ServerRoutes(config, engine_pool, clients, rejection_log)
    routes = [
        Route("/t2i", ImageRoutes(generation_service, body_reader).t2i, methods=["POST"]),
        *GenerationRoutes(generation_service, body_reader).routes,
        *EditRoutes(generation_service, body_reader).routes,
        Route("/v1/embeddings", EmbeddingRoutes(encoding_service, body_reader).embeddings, methods=["POST"]),
        Route(
            "/v1/endpoints/{name}",
            UserEndpointRoutes(endpoints, body_reader, config.frontend).endpoint,
            methods=["POST"],
        ),
        Route("/v1/images/metadata", ImageMetadataRoute(generation_service, uploads).metadata, methods=["POST"]),
        *ModelRoutes(generation_service).routes,
        *TextJobRoutes(jobs, encoding_service, config).routes,  # before /v1/jobs/{id}
        *jobs.routes,
        *live.routes,
        *LineageRoutes(LineageService(registry), body_reader).routes,
        *DeploymentRoutes(registry, body_reader).routes,
        *StatisticsRoutes(StatisticsService(read_statistics or StatisticsFile(statistics_file(config)).read)).routes,
        *RegistryRoutes(registry, adding, ServedVersionsService(engine_pool, config), uploads, body_reader).routes,
        *A1111Routes(generation_service, body_reader).routes,
        *TeiRoutes(encoding_service, body_reader, config, lambda: clients.num_processes).routes,
        *OpenInferenceRoutes(open_inference, body_reader).routes,
        Route("/healthz", server_routes.healthz),
        Route("/readyz", server_routes.readyz),
        Route("/metrics", server_routes.metrics),
        *_metrics_targets_routes(metrics_targets),
        Route("/openapi.json", server_routes.openapi),
        Route("/docs", server_routes.docs),
    ]
    routes = [
        route if any(is_open(method, route.path) for method in route.methods or ()) else _authenticated(route, clients)
        for route in routes
    ]
    # Pages need no key: a page requests all that it shows with its reader's key.
    routes = _with_pages(routes, page_routes(PAGES, lambda: engine_pool.kinds))
    known_paths = [route.path for route in routes]

    def respond_to_error(http: Request, error: NoriaError | HTTPException) -> Response:
        if isinstance(error, HTTPException):
            return routing_error_response(http, error, known_paths)
        rejection_log.record(http, error)
        headers = {"Connection": "close"} if http.scope["state"].get("must_close") else None
        return error_response(error, http, headers)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with engine_pool:
            await jobs.start()
            try:
                async with (
                    _background_work(rejection_log, endpoints, statistics, clients, config.frontend.api_keys_file),
                    grpc_server,
                    contextlib.aclosing(adding),
                ):
                    yield
            finally:
                await jobs.stop()
                await registry.close()
                encoding_service.close()

    app = Starlette(routes=routes, lifespan=lifespan)
    # Starlette's own stack has two layers more, for errors; ours responds to all errors.
    app.middleware_stack = ObservabilityMiddleware(
        RequestOriginCheck(_route_by_path(routes, app.router, metrics_port), config.frontend),
        respond_to_error,
        internal_error_response,
        tracer,
        config.frontend.sticky_header,
    )
    app.state.load, app.state.drain = endpoints.load, functools.partial(_drain, jobs, live, grpc_server)
    app.state.retire = functools.partial(_retire, jobs, live, grpc_server)
    app.state.share_limits = clients.share_among
    app.router.redirect_slashes = False  # "/t2i/" is a 404: clients handle a redirected POST differently
    return app


def _drain(jobs: JobRoutes, live: LiveRoutes, grpc_server: "GrpcServer | _NoGrpcServer") -> None:
    """Begin no more work, and end what has no end."""
    jobs.drain()
    live.drain()
    grpc_server.drain()


async def _retire(jobs: JobRoutes, live: LiveRoutes, grpc_server: "GrpcServer | _NoGrpcServer", limit_s: float) -> None:
    """As `_drain`, and wait for the end of what was begun; gRPC calls are cancelled after `limit_s` seconds."""
    jobs.drain()
    live.drain()
    await asyncio.gather(jobs.wait_until_idle(), grpc_server.retire(limit_s))


@contextlib.asynccontextmanager
async def _background_work(
    rejection_log: RejectionLog,
    endpoints: UserEndpoints,
    statistics: StatisticsRecorder,
    clients: ClientDirectory,
    keys_file: str,
) -> AsyncIterator[None]:
    """Run what a front end does beside requests."""
    works = (monitor_event_loop_lag(), rejection_log.run(), endpoints.follow(), statistics.run())
    tasks = [asyncio.create_task(work) for work in works]
    if keys_file:
        tasks.append(asyncio.create_task(follow_keys(keys_file, clients.update)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


class _NoGrpcServer(contextlib.nullcontext[None]):
    """In place of a `GrpcServer`, if there is none."""

    def drain(self) -> None:
        """Do nothing."""

    async def retire(self, limit_s: float) -> None:
        """Do nothing."""


def _grpc_server(
    open_inference: OpenInferenceService,
    clients: ClientDirectory,
    rejection_log: RejectionLog,
    config: FrontendConfig,
    tracer: Tracer,
) -> "GrpcServer | _NoGrpcServer":
    """Return the gRPC server; front ends without one never import the library."""
    if not config.grpc_port:
        return _NoGrpcServer()
    from noria.frontend.open_inference.grpc_server import GrpcServer

    return GrpcServer(open_inference, clients, rejection_log, config, tracer)


def _load_tokenizer(spec: EncoderModelSpec) -> Tokenizer:
    """Return the tokenizer of a folder; front ends without text encoders never import the library."""
    from noria.models.encoder.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(spec)


def _with_pages(routes: list[Route], pages: list[Route]) -> list[Route]:
    """Return all routes; a page and the POST of its path are one, so that its 405 names both methods."""
    posts = {route.path: route for route in routes if route.methods == {"POST"}}
    merged = [
        Route(page.path, _PageAndPost(page.app, posts.pop(page.path).app), methods=["GET", "POST"])
        if page.path in posts
        else page
        for page in pages
    ]
    replaced = {route.path for route in merged}
    return [*(route for route in routes if route.path not in replaced), *merged]


class _PageAndPost:
    """The endpoint of a page and of the POST of its path."""

    def __init__(self, page: ASGIApp, post: ASGIApp) -> None:
        self._page, self._post = page, post

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await (self._post if scope["method"] == "POST" else self._page)(scope, receive, send)


def _metrics_targets_routes(find_targets: Callable[[], object] | None) -> list[Route]:
    """The route of what `find_targets` returns; none without it."""
    if find_targets is None:
        return []

    async def answer(_: Request) -> Response:
        return json_response(find_targets())

    return [Route(METRICS_TARGETS_PATH, answer)]


def _authenticated(route: Route, clients: ClientDirectory) -> Route:
    endpoint = AuthenticatedEndpoint(route.endpoint, clients, needed_scope(route.path))
    return Route(route.path, endpoint, methods=route.methods)


def _route_by_path(routes: list[Route], router: ASGIApp, metrics_port: int | None) -> ASGIApp:
    """Return an application that looks up a path without parameters among `routes`, and leaves any other to `router`.

    With a `metrics_port`, that port has no path but /metrics, and no other port has this path. Starlette's router
    matches one regular expression after another: 20 µs for the last route.
    """
    known = {(method, route.path): route for route in routes if "{" not in route.path for method in route.methods or ()}

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if metrics_port is not None and scope["type"] == "http" and not _port_has_path(metrics_port, scope):
            raise HTTPException(404)
        route = known.get((scope.get("method", ""), scope.get("path", "")))
        if route is None:
            await router(scope, receive, send)
            return
        scope["route"] = route
        await route.handle(scope, receive, send)

    return serve


def _port_has_path(metrics_port: int, scope: Scope) -> bool:
    """Return whether the port that a request came to has its path."""
    return bool((scope["path"] == "/metrics") == (scope["server"][1] == metrics_port))
