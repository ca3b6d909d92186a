"""The ASGI application of a front end: its routes, middleware and exception handlers."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer
from starlette.applications import Starlette

from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import read_keys
from noria.frontend.access.auth import ClientDirectory
from noria.frontend.access.key_reload import follow_keys
from noria.frontend.access.rejection_log import RejectionLog
from noria.frontend.access.request_origin import RequestOriginCheck
from noria.frontend.engines.checkpoints import Checkpoints
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.submission import Submission
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.middleware import ObservabilityMiddleware
from noria.frontend.http.operations import Operation
from noria.frontend.jobs.routes import JobRoutes
from noria.frontend.jobs.running_jobs import RunningJobs
from noria.frontend.jobs.text_routes import TextJobRoutes
from noria.frontend.live.routes import LiveRoutes
from noria.frontend.pages.routes import page_operations
from noria.frontend.protocols.a1111.operations import a1111_operations
from noria.frontend.protocols.a1111.routes import A1111Routes
from noria.frontend.protocols.open_inference.operations import open_inference_operations
from noria.frontend.protocols.open_inference.routes import OpenInferenceRoutes
from noria.frontend.protocols.open_inference.service import OpenInferenceService
from noria.frontend.protocols.openai.edits import EditRoutes
from noria.frontend.protocols.openai.embeddings import EmbeddingRoutes
from noria.frontend.protocols.openai.images import GenerationRoutes
from noria.frontend.protocols.openai.models import ModelRoutes
from noria.frontend.protocols.rerank.routes import RerankRoutes
from noria.frontend.protocols.t2i.metadata import ImageMetadataRoute, UploadedImages
from noria.frontend.protocols.t2i.routes import ImageRoutes
from noria.frontend.protocols.tei.operations import tei_operations
from noria.frontend.protocols.tei.routes import TeiRoutes
from noria.frontend.registry.connection import RegistryConnection
from noria.frontend.registry.deployment_routes import DeploymentRoutes
from noria.frontend.registry.lineage import LineageService
from noria.frontend.registry.lineage_routes import LineageRoutes
from noria.frontend.registry.served_versions import ServedVersionsService
from noria.frontend.registry.statistics_routes import StatisticsRoutes
from noria.frontend.registry.statistics_service import ReadSnapshot, StatisticsFile, StatisticsService
from noria.frontend.registry.version_adding import VersionAdder
from noria.frontend.registry.version_routes import RegistryRoutes
from noria.frontend.routing import ErrorResponder, route_by_path, routes_of, untraced
from noria.frontend.server.event_loop_lag import monitor_event_loop_lag
from noria.frontend.server.routes import ServerRoutes
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.frontend.user_code.endpoints import UserEndpoints
from noria.frontend.user_code.routes import UserEndpointRoutes
from noria.jobs.service import JobService, open_job_service
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.models.encoder.tokenizers.tokens import Tokenizer
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.tasks import random_worker_id
from noria.protocol.text import EncoderModelSpec
from noria.registry.schema import open_registry
from noria.registry.statistics.file import statistics_file

if TYPE_CHECKING:
    from noria.frontend.protocols.open_inference.grpc_server import GrpcServer


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
    checkpoints: Sequence[str] = (),
) -> Starlette:
    """Return the application in front of `engine_pool`. Its lifespan connects the pool and runs the jobs.

    `app.state.submission` has the choice among versions, for a link to the registrar.

    `open_jobs` opens the jobs; by default as the only front end. The caller closes `tracer`, calls `app.state.load`,
    which loads the code of endpoints, before the lifespan begins, `app.state.drain` when the server stops accepting
    connections, and `app.state.stop` to end what is in flight after that; or, if it need not stop soon,
    `app.state.retire`, which also waits for the end of jobs and gRPC calls.
    `metrics_port` is the port that serves /metrics alone; None: there is none. `load_tokenizer` loads the tokenizer of
    a text encoder; by default that of its folder. `endpoint_models` are those of endpoints, by the endpoint's name.
    `num_frontends` share the clients' limits, until `app.state.share_limits` is called with another number.
    `statistics` counts the variables of `config.statistics`; by default one is made.
    `metrics_targets` returns the answer to GET /metrics/targets; None: there is no such route.
    `read_statistics` reads what the registrar has counted; None: from the file in this data folder.
    `checkpoints` are the names of what can be loaded from `config.engine.checkpoints`.

    Raises ConfigError: the file of API keys is invalid, or variables of `config.statistics` are not allowed.
    """
    keys = read_keys(config.frontend.api_keys_file)
    clients, uploads = ClientDirectory(keys, num_frontends, config.frontend.client_header), UploadedImages()
    submission = Submission(engine_pool, Checkpoints(engine_pool, config.engine, checkpoints))
    statistics = statistics or StatisticsRecorder(config.statistics)
    generation_service = GenerationService(
        submission,
        config.frontend,
        tracer,
        config.log_prompts,
        statistics,
        AdapterFolders.of(config.engine),
    )
    body_reader = JsonBodyReader(config.frontend.max_body_bytes, config.frontend.max_image_bytes, uploads.limiter)
    encoding_service = EncodingService(
        submission,
        config.frontend,
        load_tokenizer or _load_tokenizer,
        tracer,
        statistics,
        generation_service.upload_threads,
    )
    open_inference, rejection_log = OpenInferenceService(encoding_service), RejectionLog(clients)
    endpoints = UserEndpoints(
        config.endpoints,
        endpoint_models,
        encoding_service,
        generation_service,
        config.frontend.user_code_threads,
        tracer,
        statistics,
    )
    grpc_server = _grpc_server(open_inference, clients, rejection_log, config.frontend, tracer)
    running_jobs = RunningJobs(
        generation_service,
        encoding_service,
        config.jobs,
        open_jobs or functools.partial(open_job_service, config, random_worker_id(), tracer),
        lambda: clients.num_processes,
    )
    jobs = JobRoutes(generation_service, body_reader, running_jobs)
    registry = RegistryConnection(functools.partial(open_registry, config))
    adding, live = VersionAdder(registry, config), LiveRoutes(engine_pool, config.frontend)
    lineage = LineageService(registry, config.registry, lambda: clients.num_processes)
    operations: list[Operation] = []
    server_routes = ServerRoutes(
        config, engine_pool, clients, rejection_log, lambda: running_jobs.outage, metrics_targets, lambda: operations
    )
    operations += [
        *ImageRoutes(generation_service, body_reader).operations,
        *GenerationRoutes(generation_service, body_reader).operations,
        *EditRoutes(generation_service, body_reader).operations,
        *ImageMetadataRoute(generation_service, uploads).operations,
        *EmbeddingRoutes(encoding_service, body_reader).operations,
        *RerankRoutes(encoding_service, body_reader).operations,
        *tei_operations(TeiRoutes(encoding_service, body_reader, config, lambda: clients.num_processes)),
        *UserEndpointRoutes(endpoints, body_reader, config.frontend).operations,
        *ModelRoutes(generation_service).operations,
        *TextJobRoutes(jobs, running_jobs, encoding_service, config).operations,  # before /v1/jobs/{id}
        *jobs.operations,
        *live.operations,
        *DeploymentRoutes(registry, body_reader).operations,
        *RegistryRoutes(registry, adding, ServedVersionsService(submission, config), uploads, body_reader).operations,
        *StatisticsRoutes(
            StatisticsService(read_statistics or StatisticsFile(statistics_file(config)).read)
        ).operations,
        *LineageRoutes(lineage, body_reader).operations,
        *a1111_operations(A1111Routes(generation_service, body_reader)),
        *open_inference_operations(OpenInferenceRoutes(open_inference, body_reader)),
        *server_routes.operations,
        *page_operations(lambda: engine_pool.kinds),
    ]
    routes, responder = routes_of(operations, clients), ErrorResponder(operations, rejection_log)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with engine_pool:
            await running_jobs.start()
            try:
                async with (
                    _background_work(rejection_log, endpoints, statistics, clients, config.frontend.api_keys_file),
                    grpc_server or contextlib.nullcontext(),
                    contextlib.aclosing(adding),
                    contextlib.aclosing(submission.shadows),
                ):
                    yield
            finally:
                await running_jobs.service.stop()
                await registry.close()
                encoding_service.close()

    app = Starlette(routes=routes, lifespan=lifespan)
    # Starlette's own stack has two layers more, for errors; ours responds to all errors.
    probe_paths = [operation.path for operation in operations if operation.is_probe]
    app.middleware_stack = ObservabilityMiddleware(
        RequestOriginCheck(route_by_path(routes, app.router, metrics_port), config.frontend, probe_paths),
        responder.respond,
        responder.respond_to_unexpected,
        untraced(operations),
        tracer,
        config.frontend.sticky_header,
    )
    app.state.operations, app.state.submission = operations, submission
    app.state.load, app.state.stop = endpoints.load, engine_pool.submitter.stop
    app.state.drain = functools.partial(_drain, running_jobs, live, grpc_server)
    app.state.retire = functools.partial(_retire, running_jobs, live, grpc_server)
    app.state.share_limits = clients.share_among
    app.router.redirect_slashes = False  # "/t2i/" is a 404: clients handle a redirected POST differently
    return app


def _drain(jobs: RunningJobs, live: LiveRoutes, grpc_server: "GrpcServer | None") -> None:
    """Begin no more work, and end what has no end."""
    jobs.drain()
    live.drain()
    if grpc_server is not None:
        grpc_server.drain()


async def _retire(jobs: RunningJobs, live: LiveRoutes, grpc_server: "GrpcServer | None", limit_s: float) -> None:
    """Drain as `_drain` does, and wait for the end of what was begun; cancel gRPC calls after `limit_s` seconds."""
    jobs.drain()
    live.drain()
    calls = [] if grpc_server is None else [grpc_server.retire(limit_s)]
    await asyncio.gather(jobs.service.wait_until_idle(), *calls)


@contextlib.asynccontextmanager
async def _background_work(
    rejection_log: RejectionLog,
    endpoints: UserEndpoints,
    statistics: StatisticsRecorder,
    clients: ClientDirectory,
    keys_file: str,
) -> AsyncIterator[None]:
    works = (monitor_event_loop_lag(), rejection_log.run(), endpoints.follow(), statistics.run())
    tasks = [asyncio.create_task(work) for work in works]
    if keys_file:
        tasks.append(asyncio.create_task(follow_keys(keys_file, clients.update)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def _grpc_server(
    open_inference: OpenInferenceService,
    clients: ClientDirectory,
    rejection_log: RejectionLog,
    config: FrontendConfig,
    tracer: Tracer,
) -> "GrpcServer | None":
    """Return the gRPC server, if there is one; front ends without one never import the library."""
    if not config.grpc_port:
        return None
    from noria.frontend.protocols.open_inference.grpc_server import GrpcServer

    return GrpcServer(open_inference, clients, rejection_log, config, tracer)


def _load_tokenizer(spec: EncoderModelSpec) -> Tokenizer:
    """Return the tokenizer of a folder; front ends without text encoders never import the library."""
    from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(spec)
