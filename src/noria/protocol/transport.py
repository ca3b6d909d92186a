"""The message transport between processes: a ZeroMQ ROUTER socket at the engine, a DEALER socket at each client.

In both directions a message is a MessagePack frame (`messages.py`) and an optional second frame of raw bytes; an engine
can send several together. The engine's end is a thread that owns its socket and receives, so that a long iteration
never delays a reply; a client's end runs in an asyncio loop. This module does not depend on what the messages mean.

On one machine (`ipc://`) a folder's mode protects the socket, and a lost engine is detected by its closed connection.
Between machines (`tcp://`) both ends have one secret key, by which CurveZMQ encrypts and authenticates; and since a
lost machine closes no connection, each end sends heartbeats and drops a connection that is silent for three seconds.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import queue
import socket
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
import zmq
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator

from noria.protocol.messages import FromEngine, ToEngine, deserialize_from_engine, deserialize_to_engine, serialize

_log = logging.getLogger(__name__)
_DONTWAIT, _EVENTS, _POLLIN = int(zmq.DONTWAIT), int(zmq.EVENTS), int(zmq.POLLIN)  # zmq's enumerations are slow

_HEARTBEAT_INTERVAL_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 3000

ClientId = bytes
"""The ROUTER socket's identity of one connection."""


OnMessage = Callable[[ClientId, ToEngine, memoryview | None], None]
"""Called with each message and its second frame."""


class EngineEndpoint(msgspec.Struct, frozen=True):
    """Where a front end finds an engine."""

    name: str  # in logs, metrics, traces and `GET /v1/live`; unique among the engines of a server
    address: str  # "ipc:///path" or "tcp://host:port"
    secret_key: str = ""  # of the channel, from `make_secret_key`; empty: it has none
    group: str = ""  # engines of one group hold the same models

    @property
    def is_remote(self) -> bool:
        """Whether the engine may be on another machine."""
        return is_tcp(self.address)


def make_secret_key() -> str:
    """A new secret key for the two ends of a channel."""
    return zmq.curve_keypair()[1].decode()


def is_tcp(address: str) -> bool:
    """Whether the channel's messages pass a network."""
    return address.startswith("tcp://")


class EngineChannel:
    """The engine's end. Messages are received from `start` on; any thread may call `send`."""

    def __init__(self, address: str, secret_key: str = "", listener: socket.socket | None = None) -> None:
        """Bind `address` ("ipc:///path" or "tcp://host:port").

        With a `secret_key` only connections that have it are accepted. `listener` is a TCP socket that listens already;
        it is used in place of the address, and closed with this channel.

        Raises:
            ValueError: other machines could connect, and there is no key.
            zmq.ZMQError: the address cannot be bound.

        """
        if is_tcp(address) and not secret_key and not _is_loopback(address):
            raise ValueError(f"{address} can be reached from other machines: a channel there needs a secret key")
        self._outbox: queue.SimpleQueue[list[bytes | memoryview]] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms; on close, queued messages are still sent
        # no limit: accepted requests bound the replies, the receiver bounds the rest
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._authenticator: ThreadAuthenticator | None = None
        if is_tcp(address):
            _send_heartbeats(self._socket)
        if secret_key:
            self._authenticator = _accept_key(self._context, self._socket, secret_key)
        if listener is not None:
            self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(address)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, on_message: OnMessage) -> None:
        """Send and receive in a thread, which calls `on_message` in order of arrival; it must not block."""
        self._thread = threading.Thread(target=self._run, args=(on_message,), name="transport", daemon=True)
        self._thread.start()

    def send(self, client: ClientId, message: FromEngine, data: bytes | memoryview | None = None) -> None:
        """Queue `message` (and raw bytes beside it) for `client`; dropped without an error if it has disconnected."""
        self._outbox.put([client, serialize(message)] if data is None else [client, serialize(message), data])
        os.eventfd_write(self._wake, 1)

    def send_group(self, client: ClientId, messages: Sequence[tuple[FromEngine, bytes | memoryview | None]]) -> None:
        """Queue messages for `client` that it gets at once, which costs both sides less than one after the other."""
        frames: list[bytes | memoryview] = [client]
        for message, data in messages:
            frames += [serialize(message), b"" if data is None else data]
        self._outbox.put(frames)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send the queued messages, then close the socket."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is None:
            self._socket.close()
        else:
            self._thread.join()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake)

    def _run(self, on_message: OnMessage) -> None:
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
                self._receive(on_message)

    def _send_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._socket.send_multipart(self._outbox.get_nowait(), copy=False)

    def _receive(self, on_message: OnMessage) -> None:
        client, *frames = self._socket.recv_multipart()
        try:
            message = deserialize_to_engine(frames[0])
        except (msgspec.DecodeError, IndexError):  # of another version: it cannot be answered
            return
        on_message(client, message, memoryview(frames[1]) if len(frames) > 1 else None)


class Connected(msgspec.Struct, frozen=True):
    """The connection to the engine was established, for the first time or again; send `Hello` now."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection was lost, because the process or the network failed. It is retried until `close`."""


ConnectionEvent = Connected | Disconnected | tuple[FromEngine, memoryview | None]
"""What happens on a connection: changes, and messages with their second frame or None."""


class EngineConnection:
    """A client's end: a DEALER socket in the running asyncio loop.

    The socket is used directly, not through zmq.asyncio, which makes a future for each message: 90 µs of CPU a request.
    """

    def __init__(self, address: str, secret_key: str = "") -> None:
        """Start connecting to `address`; the engine need not exist yet. `secret_key` is that of its channel."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue while no engine is connected
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # with a limit, a full queue could not be told from a lost engine
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if is_tcp(address):
            _send_heartbeats(self._socket)
        if secret_key:
            key = secret_key.encode()
            self._socket.curve_secretkey = key
            self._socket.curve_publickey = self._socket.curve_serverkey = zmq.curve_public(key)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[ConnectionEvent] = asyncio.Queue()
        self._is_read = False

    async def send(self, message: ToEngine, data: bytes | memoryview | None = None) -> None:
        """Send `message` (and raw bytes beside it); raises zmq.Again at once if no engine is connected."""
        frames = [serialize(message)] if data is None else [serialize(message), data]
        self._socket.send_multipart(frames, flags=_DONTWAIT)
        # Sending handles what has arrived, and then the descriptor does not become readable for it (zmq_getsockopt(3)).
        if self._is_read and self._socket.get(_EVENTS) & _POLLIN:  # type: ignore[operator]
            self._loop.call_soon(self._read_messages)

    async def events(self) -> AsyncGenerator[ConnectionEvent, None]:
        """Connection changes and messages, in order, until `close`."""
        self._is_read = True
        readers = (self._socket, self._read_messages), (self._monitor, self._read_monitor)
        for each, read in readers:
            self._loop.add_reader(each.fileno(), read)
            self._loop.call_soon(read)
        try:
            while True:
                yield await self._events.get()
        finally:
            self._is_read = False
            for each, _ in readers:
                if not each.closed:
                    self._loop.remove_reader(each.fileno())

    def close(self) -> None:
        """Close the connection."""
        self._is_read = False
        for each in (self._socket, self._monitor):
            self._loop.remove_reader(each.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _read_messages(self) -> None:
        while self._is_read:
            try:
                frames = self._socket.recv_multipart(_DONTWAIT, copy=False)
            except zmq.Again:
                return
            # A group of messages: each with its data, which is empty if there is none.
            for index in range(0, len(frames), 2):
                data = frames[index + 1].buffer if index + 1 < len(frames) else None
                try:
                    message = deserialize_from_engine(frames[index].buffer)
                except msgspec.DecodeError as error:
                    _log.warning("dropped an invalid message of an engine: %s", error)
                    continue
                self._events.put_nowait((message, data or None))

    def _read_monitor(self) -> None:
        while self._is_read:
            try:
                frames = self._monitor.recv_multipart(_DONTWAIT)
            except zmq.Again:
                return
            event = zmq.utils.monitor.parse_monitor_message(frames)
            # The messages that came before a disconnect are handled before it.
            self._read_messages()
            self._events.put_nowait(Connected() if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else Disconnected())


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name or an interface
        return host == "localhost"


def _send_heartbeats(opened: zmq.Socket[bytes]) -> None:
    opened.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
    opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _accept_key(context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], key: str) -> ThreadAuthenticator:
    """Accept on `router` the clients that have `key`, and no others. Both ends use it as their own key."""
    router.curve_secretkey = key.encode()
    router.curve_server = True
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=_OneKey(zmq.curve_public(key.encode())))
    return authenticator


class _OneKey:
    """Accepts one public key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client with this public key is accepted; it has proven that it has the secret one."""
        return key == self._public_key
