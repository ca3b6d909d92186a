"""A replica of the front-end deployment: the ASGI application of a front end, behind Ray's proxy."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from noria.cluster.replica_list import REPLICAS
from noria.cluster.replica_logs import set_up_logs
from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.jobs.service import open_job_service, random_worker_id
from noria.observe.traces.setup import open_tracer
from noria.protocol.transport import EngineEndpoint

_FIRST_ENGINES_WAIT_S = 10.0
"""A replica that joins others serves when it knows the engines; the first one of an application finds none."""


@serve.ingress()
class FrontendReplica:
    """Serves HTTP; sends requests to the engine replicas over ZeroMQ."""

    def __init__(self, config_json: str, engines: Mapping[str, Any]) -> None:
        """`engines` has the handle of each engine deployment, by its name, the default model's first."""
        config = msgspec.json.decode(config_json, type=Config)
        self._name, self._config = serve.get_replica_context().replica_id.unique_id, config
        set_up_logs(self._name, config)
        # Each handle makes a router in this process, which reports the replicas. Options make the router at once.
        self._handles = {name: handle.options(method_name="engine_pid") for name, handle in engines.items()}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls this after the constructor."""
        config, worker_id = self._config, f"{random_worker_id().partition('/')[0]}/{self._name}"
        engine_pool = EnginePool([], config.frontend.restart_wait_s, worker_id)
        tracer, _ = open_tracer(config.traces_endpoint, config.traces_ratio, self._name)
        jobs = open_job_service(config, worker_id, tracer)
        app = build_app(config, engine_pool, lambda: jobs, tracer)
        return _Application(app, engine_pool, list(self._handles))


class _Application:
    """The application of a front end, with what uvicorn and the supervisor do for it on one machine."""

    def __init__(self, app: Any, engine_pool: EnginePool, deployments: Sequence[str]) -> None:
        self._app, self._engine_pool = app, engine_pool
        self._endpoints: dict[str, list[EngineEndpoint]] = {name: [] for name in deployments}
        self._found = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        # uvicorn makes it. Ray ends a response whose client does not read, so `abort` has nothing to do.
        scope.setdefault("state", {}).setdefault("abort", lambda: None)
        await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.state.load()
        self._loop = asyncio.get_running_loop()
        REPLICAS.follow(self._on_replicas)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_ENGINES_WAIT_S):
                    await self._found.wait()
            await self._app(scope, receive, send)
        finally:
            REPLICAS.unfollow(self._on_replicas)

    def _on_replicas(self, deployment: str, endpoints: list[EngineEndpoint]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_engines, deployment, endpoints)

    def _set_engines(self, deployment: str, endpoints: list[EngineEndpoint]) -> None:
        if deployment not in self._endpoints:  # of another application of this process
            return
        self._endpoints[deployment] = endpoints
        if any(self._endpoints.values()):
            self._found.set()
        self._engine_pool.set_engines(each for group in self._endpoints.values() for each in group)
