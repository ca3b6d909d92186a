"""A replica of an engine deployment: an actor with one device, whose child is the ordinary engine process."""

import asyncio
import functools
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.metrics import Gauge

from noria.cluster.deployed_model import models_to_load
from noria.cluster.engine_runner import EngineRunner
from noria.cluster.metrics_server import MetricsServer
from noria.cluster.replica_list import metadata_of
from noria.cluster.replica_logs import set_up_logs
from noria.config import Config
from noria.errors import NoriaError
from noria.models.catalog import open_model
from noria.observe.metrics.exposition import exposition


class EngineReplica:
    """Starts the engine of one model, in the version that is deployed, and says where it is. No request passes it."""

    async def __init__(self, config_json: str, source: str, drain_s: float) -> None:  # type: ignore[misc] # Ray awaits it
        """Return when the engine serves. `source` is the model as `open_model` takes it.

        Raises RuntimeError: the model cannot be served on this node. Ray shows the message.
        """
        config, host = msgspec.json.decode(config_json, type=Config), ray.util.get_node_ip_address()
        name = serve.get_replica_context().replica_id.unique_id
        set_up_logs(name, config)
        self._drain_s = drain_s
        try:
            model = await asyncio.to_thread(open_model, source, config.engine)
        except NoriaError as error:
            raise RuntimeError(
                f"node {host} cannot serve {source!r}: {error.message} Every node that may run this deployment needs "
                "the model: use a hub id, or the same path on all of them, such as one on a shared file system."
            ) from None
        self._version = model.fingerprint
        models_now = functools.partial(models_to_load, config, model)
        models = await asyncio.to_thread(models_now) or [model]
        self._runner = EngineRunner(config, models, models_now, name, host)
        try:
            await asyncio.wrap_future(self._runner.ready)
        except BaseException:
            await asyncio.to_thread(self._runner.stop)
            raise
        render = functools.partial(
            exposition,
            with_exemplars=not config.frontend.api_keys_file,
            folder=self._runner.metrics_folder,
            process="engine-replica",
        )
        self._metrics = MetricsServer(host, render)
        gauge = Gauge("noria_engine_backlog_s", "Predicted seconds until all is done.", ("model",))
        gauge.set_default_tags({"model": model.name})
        self._backlog_gauge = gauge

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where the engine is and what it holds. Ray asks once, and tells the front ends."""
        return metadata_of(self._runner.endpoint, self._version, self._metrics.address)

    @property
    def _backlog_s(self) -> float:
        load = self._runner.engine.load
        return 0.0 if load is None else load.backlog_s

    def record_routing_stats(self) -> dict[str, float]:
        """Return the value that `BacklogRouter` ranks by. Ray asks regularly."""
        return {"backlog_s": self._backlog_s}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the value that `autoscaling.py` decides by. Ray asks regularly."""
        self._backlog_gauge.set(self._backlog_s)
        return {"backlog_s": self._backlog_s}

    def check_health(self) -> None:
        """Raise if the engine was given up; Ray then replaces this replica. An engine that restarts is no failure."""
        if self._runner.failure:
            raise RuntimeError(self._runner.failure)

    def engine_pid(self) -> int | None:
        """The process id of the engine, for tests and operators."""
        return self._runner.engine.pid

    async def __del__(self) -> None:
        """Let other engines go on with what it has, or finish it; then end it. Ray calls this to stop the replica."""
        if (runner := getattr(self, "_runner", None)) is not None:
            await runner.drain(self._drain_s)
            await asyncio.to_thread(runner.stop)
        if (metrics := getattr(self, "_metrics", None)) is not None:
            await asyncio.to_thread(metrics.close)
