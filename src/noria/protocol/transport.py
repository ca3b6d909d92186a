"""The message transport between processes: a ZeroMQ ROUTER socket at the engine, a DEALER socket at each client.

In both directions a message is a MessagePack frame (`messages.py`) and an optional second frame of raw bytes. The
engine's end is a thread that owns its socket, so that a long iteration never delays a reply; a client's end runs in an
asyncio loop. A lost engine is detected by its closed connection, not by a timeout. This module does not depend on what
the messages mean.
"""

import asyncio
import contextlib
import logging
import os
import queue
import threading
import uuid
from collections.abc import AsyncGenerator

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor

from noria.protocol.messages import FromEngine, ToEngine, deserialize_from_engine, deserialize_to_engine, serialize

_log = logging.getLogger(__name__)

ClientId = bytes
"""The ROUTER socket's identity of one connection."""


class EngineChannel:
    """The engine's end. `inbox` has (client, message, data) in order of arrival; any thread may call `send`."""

    def __init__(self, address: str) -> None:
        """Bind `address` ("ipc:///path" or "tcp://host:port"); raises zmq.ZMQError if that fails."""
        self.inbox: queue.SimpleQueue[tuple[ClientId, ToEngine, memoryview | None]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[list[bytes | memoryview]] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms; on close, queued messages are still sent
        # no limit: accepted requests bound the replies, the receiver bounds the rest
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    def send(self, client: ClientId, message: FromEngine, data: bytes | memoryview | None = None) -> None:
        """Queue `message` (and raw bytes beside it) for `client`; dropped without an error if it has disconnected."""
        self._outbox.put([client, serialize(message)] if data is None else [client, serialize(message), data])
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send the queued messages, then close the socket."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._context.term()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                closing = self._closing  # read before the queue, so that no message sent before close() is lost
                self._send_queued()
                if closing:
                    self._socket.close()
                    return
            if self._socket in ready:
                self._receive()

    def _send_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._socket.send_multipart(self._outbox.get_nowait(), copy=False)

    def _receive(self) -> None:
        client, *frames = self._socket.recv_multipart()
        # A message of another version cannot be answered, so it is dropped.
        with contextlib.suppress(msgspec.DecodeError, IndexError):
            message = deserialize_to_engine(frames[0])
            self.inbox.put((client, message, memoryview(frames[1]) if len(frames) > 1 else None))


class Connected(msgspec.Struct, frozen=True):
    """The connection to the engine was established, for the first time or again; send `Hello` now."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection was lost, because the process or the network failed. It is retried until `close`."""


class EngineConnection:
    """A client's end: a DEALER socket in the running asyncio loop."""

    def __init__(self, address: str) -> None:
        """Start connecting to `address`; the engine need not exist yet."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue while no engine is connected
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    async def send(self, message: ToEngine, data: bytes | memoryview | None = None) -> None:
        """Send `message` (and raw bytes beside it); raises zmq.Again at once if no engine is connected."""
        frames = [serialize(message)] if data is None else [serialize(message), data]
        await self._socket.send_multipart(frames, flags=zmq.DONTWAIT)

    async def events(self) -> AsyncGenerator[Connected | Disconnected | tuple[FromEngine, memoryview | None], None]:
        """Connection changes and messages, in order, until `close`; a message comes with its second frame or None."""
        event_queue: asyncio.Queue[Connected | Disconnected | tuple[FromEngine, memoryview | None]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read_messages(event_queue)),
            asyncio.create_task(self._read_monitor(event_queue)),
        ]
        try:
            while True:
                yield await event_queue.get()
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    async def _read_messages(
        self, event_queue: asyncio.Queue[Connected | Disconnected | tuple[FromEngine, memoryview | None]]
    ) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                message = deserialize_from_engine(frames[0].buffer)
            except msgspec.DecodeError as error:
                _log.warning("dropped an invalid message of an engine: %s", error)
                continue
            event_queue.put_nowait((message, frames[1].buffer if len(frames) > 1 else None))

    async def _read_monitor(
        self, event_queue: asyncio.Queue[Connected | Disconnected | tuple[FromEngine, memoryview | None]]
    ) -> None:
        while True:
            event = zmq.utils.monitor.parse_monitor_message(await self._monitor.recv_multipart())
            event_queue.put_nowait(Connected() if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else Disconnected())
