"""A replica of the front-end deployment: the ASGI application of a front end, behind Ray's proxy."""

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray import serve
from starlette.types import ASGIApp

from noria.cluster.metrics_server import MetricsServer
from noria.cluster.ray_application import RayApplication, metrics_targets
from noria.cluster.registrar import ClusterRegistrarLink, statistics_of
from noria.cluster.replica_logs import set_up_logs
from noria.cluster.request_router import publish_other_replicas
from noria.config import Config
from noria.errors import NoriaError
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.jobs.service import open_job_service
from noria.observe.metrics.exposition import exposition
from noria.observe.traces.setup import open_tracer
from noria.protocol.tasks import random_worker_id
from noria.supervisor.served_models import endpoint_models, open_models


@serve.ingress()
class FrontendReplica:
    """Serves HTTP; sends requests to the engine replicas over ZeroMQ."""

    def __init__(self, config_json: str, engines: Mapping[str, Any], registrar: Any = None) -> None:
        """`engines` has the handle of each engine deployment, by its name, the default model's first.

        `registrar` is the handle of the registrar; None: deployments are not carried out.
        """
        config = msgspec.json.decode(config_json, type=Config)
        self._context = serve.get_replica_context()
        self._name, self._config = self._context.replica_id.unique_id, config
        set_up_logs(self._name, config)
        publish_other_replicas()
        # Each handle makes a router in this process, which reports the replicas. Options make the router at once.
        self._handles = {name: handle.options(method_name="engine_pid") for name, handle in engines.items()}
        self._registrar = registrar
        # That of the front ends is for their metrics.
        own = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        self._own_handle = own.options(method_name="check_health")
        render = functools.partial(exposition, with_exemplars=not config.frontend.api_keys_file)
        self._metrics = MetricsServer(ray.util.get_node_ip_address(), render)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where its metrics are. Ray asks once, and tells all front ends."""
        return {"name": self._name, "metrics": self._metrics.address}

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls this after the constructor.

        Raises RuntimeError: this node cannot run a front end, for example because the database is not there, or it
        lacks the code of an endpoint. Ray shows the message.
        """
        try:
            return await self._build()
        except NoriaError as error:
            raise RuntimeError(
                f"node {ray.util.get_node_ip_address()} cannot run a front end: {error.message}"
            ) from None

    async def _build(self) -> ASGIApp:
        config, worker_id = self._config, f"{random_worker_id().partition('/')[0]}/{self._name}"
        engine_pool = EnginePool([], config.frontend.restart_wait_s, worker_id, rebalance=config.frontend.rebalance)
        statistics = StatisticsRecorder(config.statistics)
        tracer, _ = open_tracer(config.traces_endpoint, config.traces_ratio, self._name)
        jobs = open_job_service(config, worker_id, tracer)
        encoders = endpoint_models(config, open_models(config)) if config.endpoints else {}
        read_statistics = functools.partial(statistics_of, functools.partial(self._call_registrar, "statistics"))
        app = build_app(
            config,
            engine_pool,
            lambda: jobs,
            tracer,
            endpoint_models=encoders,
            statistics=statistics,
            metrics_targets=functools.partial(metrics_targets, self._context.app_name),
            read_statistics=self._registrar and read_statistics,
        )
        await app.state.load()
        exchange = functools.partial(self._call_registrar, "exchange")
        link = self._registrar and ClusterRegistrarLink(app.state.submission, worker_id, exchange, statistics)
        return RayApplication(app, engine_pool, list(self._handles), link)

    async def _call_registrar(self, method: str, *arguments: bytes) -> bytes:
        response = getattr(self._registrar, method).remote(*arguments)
        try:
            return bytes(await response)
        except asyncio.CancelledError:
            response.cancel()  # else it would wait for the next registrar
            raise
