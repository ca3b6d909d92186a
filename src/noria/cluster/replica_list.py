"""The replicas that Ray knows, in the process of a front end.

Ray Serve gives a deployment's replicas only to its request router, which Ray makes itself in each process that has a
handle. So what passes them on is a table of the process.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.protocol.transport import EngineEndpoint

OnReplicas = Callable[[str, list[EngineEndpoint]], None]
"""Called with a deployment's name and its replicas' endpoints, in any thread; must not block, or call the table."""


@dataclass
class ReplicaTable:
    """The running replicas of each deployment, and who follows them."""

    _endpoints: dict[str, list[EngineEndpoint]] = field(default_factory=dict)
    _metadata: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    _followers: list[OnReplicas] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, deployment: str, metadata: list[Mapping[str, Any]]) -> None:
        """Set the replicas of a deployment from the metadata that each replica published."""
        endpoints = [found for each in metadata if (found := read_metadata(deployment, each)) is not None]
        with self._lock:
            self._endpoints[deployment], self._metadata[deployment] = endpoints, metadata
            for follow in self._followers:  # with the lock: else an older list could come after a newer one
                follow(deployment, endpoints)

    def metadata(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the metadata that the replicas of each deployment publish about themselves."""
        with self._lock:
            return dict(self._metadata)

    def follow(self, on_replicas: OnReplicas) -> None:
        """Call `on_replicas` with what is known, and with each change."""
        with self._lock:
            self._followers.append(on_replicas)
            for deployment, endpoints in self._endpoints.items():
                on_replicas(deployment, endpoints)

    def unfollow(self, on_replicas: OnReplicas) -> None:
        """Call it no longer."""
        with self._lock:
            self._followers.remove(on_replicas)


REPLICAS = ReplicaTable()


def metadata_of(endpoint: EngineEndpoint, version: str, metrics: str) -> dict[str, Any]:
    """Return the metadata of an engine replica, which Ray passes to front ends. `metrics` is where its metrics are."""
    return {
        "zmq": endpoint.address,
        "key": endpoint.secret_key,
        "name": endpoint.name,
        "model": endpoint.group,
        "version": version,
        "metrics": metrics,
    }


def read_metadata(deployment: str, metadata: Mapping[str, Any]) -> EngineEndpoint | None:
    """The endpoint of an engine replica; None: it is none, or has said nothing yet."""
    if "zmq" not in metadata:
        return None
    return EngineEndpoint(str(metadata["name"]), str(metadata["zmq"]), str(metadata["key"]), deployment)
