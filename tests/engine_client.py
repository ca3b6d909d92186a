"""A client of an engine for tests, with one blocking socket."""

import zmq

from noria.protocol.messages import EngineLoad, Progress, deserialize_from_engine, serialize
from waiting import TIMEOUT_S


class Client:
    """A connection to the engine at an address."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))

    def send(self, *messages):
        for message in messages:
            self.socket.send(serialize(message))

    def receive(self, count=1, ignored=(Progress, EngineLoad)):
        """The next `count` messages, without those that come at any time."""
        received = []
        while len(received) < count:
            message = deserialize_from_engine(self.socket.recv_multipart()[0])
            if not isinstance(message, ignored):
                received.append(message)
        return received

    def close(self):
        self.socket.close(0)
        self.context.term()
