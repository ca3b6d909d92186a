"""Sends an engine's load to its clients, to each at most one that it has not acknowledged."""

import threading
from collections.abc import Iterable

from noria.protocol.messages import EngineLoad
from noria.protocol.transport import ClientId, EngineChannel


class LoadPublisher:
    """A client that has not acknowledged the last load gets the newest one as soon as it does. Thread-safe."""

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._load: EngineLoad | None = None
        self._clients: set[ClientId] = set()
        self._unacked: dict[ClientId, EngineLoad] = {}  # the last load sent to each, until it is acknowledged
        self._acking: set[ClientId] = set()  # that acknowledge loads
        self._acked = threading.Condition()  # protects all, and is notified when none is expected of a client any more

    def add(self, client: ClientId) -> None:
        """Send a new client the last load, and from now on all."""
        with self._acked:
            self._clients.add(client)
            self._send(client)

    def forget(self, client: ClientId) -> None:
        """Send a client nothing more."""
        with self._acked:
            self._clients.discard(client)
            self._unacked.pop(client, None)
            self._acking.discard(client)
            self._acked.notify_all()

    def publish(self, load: EngineLoad) -> None:
        """Send `load` to every client."""
        with self._acked:
            self._load = load
            for client in self._clients:
                self._send(client)

    def ack(self, client: ClientId) -> None:
        """Note that a client has read the last load that was sent to it."""
        with self._acked:
            if client not in self._clients:
                return
            self._acking.add(client)
            if self._unacked.pop(client, self._load) is not self._load:
                self._send(client)
            self._acked.notify_all()

    def wait_until_read(self, clients: Iterable[ClientId], load: EngineLoad, timeout_s: float) -> None:
        """Send a last load, and wait until these clients have acknowledged it, so have read all that was sent before.

        ZeroMQ drops what a client has not read when the connection ends. Clients that acknowledge no loads do not
        count.
        """
        self.publish(load)
        with self._acked:
            waiting = self._acking.intersection(clients)
            self._acked.wait_for(lambda: waiting.isdisjoint(self._unacked), timeout_s)

    def _send(self, client: ClientId) -> None:
        if self._load is not None and client not in self._unacked:
            self._unacked[client] = self._load
            self._channel.send(client, self._load)
