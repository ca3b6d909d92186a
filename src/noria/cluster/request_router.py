"""Ray's request router for engine replicas: the replica of the model with the smallest backlog first.

In a front end it also passes the replicas that Ray reports to `replica_list`, from which the front end knows the
engines: requests go to them over ZeroMQ, and are distributed by `frontend/engines/router.py` from loads that are half a
second old at most. Calls by handle, of other Ray applications, are distributed here.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class BacklogRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by their backlog in seconds, as each last reported it, among those of the wanted model."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls this when the running replicas have changed."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Ray calls this when a call has found a replica dead."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        # Imported here: Ray pickles this class with its module's globals, and would make a copy of the table.
        from noria.cluster.replica_list import REPLICAS

        metadata = [each.replica_metadata for each in self.curr_replicas.values()]
        REPLICAS.publish(self._deployment_id.name, metadata)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return a rank for each replica of the request's `model` and `version`, the smallest backlog first."""
        wanted = {} if pending_request is None else pending_request.kwargs
        fitting = [
            each
            for each in candidate_replicas
            if all(wanted.get(name) in (None, each.replica_metadata.get(name)) for name in ("model", "version"))
        ]
        fitting.sort(key=lambda each: float(each.routing_stats.get("backlog_s", 0.0)))
        return [[each] for each in fitting]
