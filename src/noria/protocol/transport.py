"""The one message channel between processes: ZeroMQ ROUTER on the engine's side, DEALER on everybody else's.

A message is a MessagePack frame (`messages.py`), and an optional second frame of raw bytes. The engine's end is a plain thread
that owns its socket, so that a long step never delays a reply or a refusal; the other end lives in an asyncio loop. A lost engine
is noticed by its closed connection, not by silence. This module knows nothing of what the messages mean.
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
"""A ROUTER's name for one connection."""


class EngineChannel:
    """An engine's end. `inbox` yields (peer, message) in order of arrival; `send` may be called from any thread."""

    def __init__(self, address: str) -> None:
        """Bind `address` ("ipc:///path" or "tcp://host:port"); raises zmq.ZMQError if that is not possible."""
        self.inbox: queue.SimpleQueue[tuple[ClientId, ToEngine]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[list[bytes | memoryview]] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms: last words are still sent
        self._socket.setsockopt(zmq.SNDHWM, 0)  # answers are bounded by the requests accepted, the rest by the desk
        self._socket.bind(address)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    def send(self, client: ClientId, message: FromEngine, payload: bytes | memoryview | None = None) -> None:
        """Queue `message` (and raw bytes beside it) for `peer`; silently dropped if that peer is gone."""
        self._outbox.put([client, serialize(message)] if payload is None else [client, serialize(message), payload])
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is queued, then close the socket."""
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
                closing = self._closing  # read before the queue: nothing sent before close() is lost
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
        with contextlib.suppress(
            msgspec.DecodeError, IndexError
        ):  # another version's message: nobody to answer it in our words
            self.inbox.put((client, deserialize_to_engine(frames[0])))


class Connected(msgspec.Struct, frozen=True):
    """The connection to the engine stands (again); say Hello."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection is gone: its process ended, or the network did. It is tried again until `close`."""


class EngineConnection:
    """Another process's end: one DEALER socket in the running asyncio loop."""

    def __init__(self, address: str) -> None:
        """Start connecting to `address`; the engine need not exist yet."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue for an engine that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    async def send(self, message: ToEngine) -> None:
        """Send `message`; raises zmq.Again at once when no engine is connected."""
        await self._socket.send(serialize(message), flags=zmq.DONTWAIT)

    async def events(self) -> AsyncGenerator[Connected | Disconnected | tuple[FromEngine, memoryview | None], None]:
        """Everything that happens on the connection, in order, until `close`."""
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
        """Drop the connection."""
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
                _log.warning("an engine's message that is none of ours was dropped: %s", error)
                continue
            event_queue.put_nowait((message, frames[1].buffer if len(frames) > 1 else None))

    async def _read_monitor(
        self, event_queue: asyncio.Queue[Connected | Disconnected | tuple[FromEngine, memoryview | None]]
    ) -> None:
        while True:
            event = zmq.utils.monitor.parse_monitor_message(await self._monitor.recv_multipart())
            event_queue.put_nowait(Connected() if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else Disconnected())
