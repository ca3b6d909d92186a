"""The replica of the registrar deployment: an actor without a device, of which there is one."""

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray import serve

from noria.cluster.metrics_server import MetricsServer
from noria.cluster.registrar import ClusterRegistrar
from noria.cluster.replica_list import REPLICAS
from noria.cluster.replica_logs import set_up_logs
from noria.config import Config
from noria.errors import NoriaError
from noria.observe.metrics.exposition import exposition
from noria.protocol.transport import EngineEndpoint
from noria.supervisor.served_models import open_models


class RegistrarReplica:
    """Carries out the registry's deployments on the engine replicas."""

    async def __init__(self, config_json: str, engines: Mapping[str, Any]) -> None:  # type: ignore[misc] # Ray awaits it
        """`engines` has the handle of each engine deployment, by its name, in the order of the models.

        Raises RuntimeError: a model of the configuration is not on this node. Ray shows the message.
        """
        config = msgspec.json.decode(config_json, type=Config)
        self._name = serve.get_replica_context().replica_id.unique_id
        set_up_logs(self._name, config)
        try:
            models = await asyncio.to_thread(open_models, config)
        except NoriaError as error:
            raise RuntimeError(
                f"node {ray.util.get_node_ip_address()} cannot carry out deployments: {error.message} Every node that "
                "may run the registrar needs the models: use hub ids, or the same paths on all of them, or set "
                "registry.deployments to false."
            ) from None
        self._loop = asyncio.get_running_loop()
        self._registrar = ClusterRegistrar(config, dict(zip(engines, models, strict=True)))
        self._running = asyncio.create_task(self._registrar.run())
        # Each handle makes a router in this process, which reports the replicas. Options make the router at once.
        self._handles = [handle.options(method_name="engine_pid") for handle in engines.values()]
        REPLICAS.follow(self._on_replicas)
        render = functools.partial(exposition, process="registrar")
        self._metrics = MetricsServer(ray.util.get_node_ip_address(), render)

    def _on_replicas(self, deployment: str, endpoints: list[EngineEndpoint]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._registrar.set_engines, deployment, endpoints)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where its metrics are. Ray asks once, and tells the front ends."""
        return {"name": self._name, "metrics": self._metrics.address}

    async def exchange(self, report: bytes) -> bytes:
        """Front ends call it: see `ClusterRegistrar`."""
        return self._registrar.exchange(report)

    async def statistics(self) -> bytes:
        """Front ends call it: see `ClusterRegistrar`."""
        return await self._registrar.statistics()

    def check_health(self) -> None:
        """Raise what has ended the registrar; Ray then replaces this replica."""
        if self._running.done():
            self._running.result()
            raise RuntimeError("the registrar has ended")

    async def __del__(self) -> None:
        """End it. Ray calls this when it stops the replica."""
        if (running := getattr(self, "_running", None)) is not None:
            REPLICAS.unfollow(self._on_replicas)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if (metrics := getattr(self, "_metrics", None)) is not None:
            await asyncio.to_thread(metrics.close)
