"""The application of a front end as Ray's proxy calls it, with what uvicorn and the supervisor do on one machine."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from noria.cluster.metrics_server import targets
from noria.cluster.registrar import ClusterRegistrarLink
from noria.cluster.replica_list import REPLICAS
from noria.frontend.access.auth import is_this_machine
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.disconnects import DisconnectWatcher
from noria.observe.metrics import declarations
from noria.protocol.transport import EngineEndpoint

_FIRST_ENGINES_WAIT_S = 10.0
"""A replica that joins others serves when it knows the engines and the routes; the first one of an application finds
none."""


def metrics_targets(application: str) -> list[dict[str, Any]]:
    """Return the answer to `GET /metrics/targets` of a front end of this application of Ray Serve."""
    return targets(application, REPLICAS.metadata())


class RayApplication:
    """Wraps `app`, whose engines are the replicas of `deployments`, the default model's first."""

    def __init__(
        self,
        app: Any,
        engine_pool: EnginePool,
        deployments: Sequence[str],
        registrar: ClusterRegistrarLink | None = None,
    ) -> None:
        self._app, self._engine_pool, self._registrar = app, engine_pool, registrar
        self._endpoints: dict[str, list[EngineEndpoint]] = {name: [] for name in deployments}
        self._found = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        if is_this_machine(scope.get("client")):
            scope["client"] = None  # it is the proxy's: clients of this machine have rights without a key
        # As `connection.py` puts there. Ray ends a response whose client does not read: `abort` has nothing to do.
        watcher = DisconnectWatcher(receive)
        scope.setdefault("state", {}).update(abort=lambda: None, watch_disconnect=watcher.watch_disconnect)
        await watcher.run(self._app(scope, watcher.receive, _without_request_id(scope, send)))

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        declarations.FRONTENDS.set(1)
        REPLICAS.follow(self._on_replicas)
        linking = None if self._registrar is None else asyncio.create_task(self._registrar.run())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_ENGINES_WAIT_S):
                    await self._found.wait()
                    if self._registrar is not None:
                        await self._registrar.has_routes.wait()
            await self._app(scope, receive, send)
        finally:
            REPLICAS.unfollow(self._on_replicas)
            if linking is not None:  # only now: what was in flight needed its versions
                linking.cancel()

    def _on_replicas(self, deployment: str, endpoints: list[EngineEndpoint]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_engines, deployment, endpoints)

    def _set_engines(self, deployment: str, endpoints: list[EngineEndpoint]) -> None:
        if deployment not in self._endpoints:  # belongs to another application of this process
            return
        self._endpoints[deployment] = endpoints
        if any(self._endpoints.values()):
            self._found.set()
        endpoints = [each for group in self._endpoints.values() for each in group]
        self._engine_pool.set_engines(endpoints, list(self._endpoints))


def _without_request_id(scope: Scope, send: Send) -> Send:
    """Return `send` without the X-Request-Id that the request has: Ray's proxy adds that one to the response."""
    from_ray = b"x-request-id", dict(scope.get("headers", ())).get(b"x-request-id")

    async def send_without_request_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [each for each in message["headers"] if each != from_ray]
        await send(message)

    return send_without_request_id
