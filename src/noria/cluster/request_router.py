"""Ray's request router of engine replicas: of those of the model, the one with the smallest backlog first.

In a front end it also passes the replicas that Ray reports to `replica_list`, from which the front end knows the
engines: requests go to them over ZeroMQ, and are distributed by `frontend/engines/router.py` from loads that are half a
second or an iteration old at most. Calls by handle, of other Ray applications, are distributed here.
"""

from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from noria.protocol.model_spec import ModelKey
from noria.scheduling.cluster.router import ReplicaLoad, rank_replicas


class BacklogRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by their backlog in seconds, as each last reported it, among those of the wanted model."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls this when the running replicas have changed."""
        super().update_replicas(replicas)
        _publish(self)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Ray calls this when a call has found a replica dead."""
        super().on_replica_actor_died(replica_id)
        _publish(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return a rank for each replica of the request's `model` and `version`, the smallest backlog first."""
        wanted = {} if pending_request is None else pending_request.kwargs
        loads = [_load_of(str(number), each) for number, each in enumerate(candidate_replicas)]
        model = ModelKey(wanted.get("model", ""), wanted.get("version", ""))
        if not model.name:
            loads = [each._replace(models=frozenset({model})) for each in loads]
        return [[candidate_replicas[int(name)]] for name in rank_replicas(loads, model)]


def publish_other_replicas() -> None:
    """Have Ray's own router pass on the replicas of deployments that name none: front ends and registrar, for metrics.

    Call it once in a process, before it makes handles. Under HAProxy a deployment of front ends can name no router.
    """
    # Where a process gets the class: Ray pickles its own with their base by value, so each process has a copy.
    get_request_router_class = RequestRouterConfig.get_request_router_class

    def get_publishing_class(config: RequestRouterConfig) -> type[RequestRouter]:
        class PublishingRouter(get_request_router_class(config)):  # type: ignore[misc]
            def update_replicas(self, replicas: list[RunningReplica]) -> None:
                super().update_replicas(replicas)
                _publish(self)

        return PublishingRouter

    RequestRouterConfig.get_request_router_class = get_publishing_class


def _publish(router: RequestRouter) -> None:
    # Imported here: Ray pickles this module's classes with its globals, and would make a copy of the table.
    from noria.cluster.replica_list import REPLICAS

    metadata = [each.replica_metadata for each in router.curr_replicas.values()]
    REPLICAS.publish(router._deployment_id.name, metadata)


def _load_of(name: str, replica: RunningReplica) -> ReplicaLoad:
    held = ModelKey(replica.replica_metadata.get("model", ""), replica.replica_metadata.get("version", ""))
    return ReplicaLoad(name, frozenset({held}), float(replica.routing_stats.get("backlog_s", 0.0)))
