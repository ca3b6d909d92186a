"""The message transport between processes: a ZeroMQ ROUTER socket at the engine, a DEALER socket at each client.

In both directions a message is a MessagePack frame (`messages.py`) and an optional second frame of raw bytes. Several
that are sent together share three frames (`pack`). At the engine's end a thread receives, so that a long iteration
never delays a reply, and any thread sends; a client's end runs in an asyncio loop. This module does not depend on what
the messages mean.

On one machine (`ipc://`) a folder's mode protects the socket, and a lost engine is detected by its closed connection.
Between machines (`tcp://`) both ends have one secret key, by which CurveZMQ encrypts and authenticates; and since a
lost machine closes no connection, each end sends heartbeats and drops a connection that is silent for three seconds.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import select
import socket
import struct
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import zmq
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator

from noria.protocol.messages import FromEngine, ToEngine, deserialize_from_engine, deserialize_to_engine, serialize

_log = logging.getLogger(__name__)
# zmq's enumerations are slow
_DONTWAIT, _SNDMORE, _EVENTS = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

_MAX_GROUP = 16  # messages that wait for each other before they are sent
_MAX_RECEIVED = 64  # groups of messages in a turn

_HEARTBEAT_INTERVAL_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 3000

ClientId = bytes
"""The ROUTER socket's identity of one connection."""


OnMessage = Callable[[ClientId, ToEngine, memoryview | None], None]
"""Called with each message and its second frame."""


class EngineEndpoint(msgspec.Struct, frozen=True):
    """Where a front end finds an engine."""

    name: str  # in logs, metrics, traces and `GET /v1/live`; unique among the engines of a server
    address: str  # "ipc:///path" or "tcp://host:port"
    secret_key: str = ""  # key of the channel, from `make_secret_key`; empty: it has none
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
    """The engine's end. Messages are received from `start` on; any thread may send."""

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
        self._lock = threading.Lock()  # one thread at a time uses the socket
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, on_message: OnMessage, turn: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Receive in a thread, which calls `on_message` in order of arrival; it must not block.

        What has arrived together is passed on within one `turn`.
        """
        self._thread = threading.Thread(target=self._run, args=(on_message, turn), name="transport", daemon=True)
        self._thread.start()

    def send(self, client: ClientId, message: FromEngine, data: bytes | memoryview | None = None) -> None:
        """Send `message` (and raw bytes beside it) to `client`; dropped without an error if it has disconnected."""
        self.send_group(client, [(message, data)])

    def send_group(self, client: ClientId, messages: Sequence[tuple[FromEngine, bytes | memoryview | None]]) -> None:
        """Send messages to `client` that it gets at once, which costs both sides less than one after the other."""
        frames = [client, *pack([(serialize(message), data or b"") for message, data in messages])]
        with self._lock:
            if self._socket.closed:
                return
            _send(self._socket, frames)
            # Sending handles what has arrived, and then the descriptor does not become readable for it.
            if self._socket.get(_EVENTS) & _POLLIN:  # type: ignore[operator]
                os.eventfd_write(self._wake, 1)  # with the lock: `close` closes it after the socket

    def close(self) -> None:
        """Close the socket; what was sent still arrives."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake)

    def _run(self, on_message: OnMessage, turn: Callable[[], AbstractContextManager[object]]) -> None:
        poller = select.poll()  # zmq's own would use the socket while another thread sends
        for descriptor in (self._socket.fileno(), self._wake):
            poller.register(descriptor, select.POLLIN)
        while not self._closing:
            if groups := self._receive():
                with turn():
                    for group in groups:
                        pass_on(group, on_message)
            if len(groups) < _MAX_RECEIVED and any(descriptor == self._wake for descriptor, _ in poller.poll()):
                os.eventfd_read(self._wake)

    def _receive(self) -> list[list[memoryview]]:
        """Return groups of messages that have arrived; none if there are none."""
        groups: list[list[memoryview]] = []
        with self._lock:
            while len(groups) < _MAX_RECEIVED and self._socket.get(_EVENTS) & _POLLIN:  # type: ignore[operator]
                groups.append(_receive(self._socket))
        return groups


def pass_on(group: Sequence[bytes | memoryview], on_message: OnMessage) -> None:
    """Pass a client's messages on, each with its data."""
    client = bytes(group[0])
    for frame, data in unpack(group[1:]):
        try:
            message = deserialize_to_engine(frame)
        except msgspec.DecodeError:  # a message of another version: it cannot be answered
            continue
        on_message(client, message, data)


class Connected(msgspec.Struct, frozen=True):
    """The connection to the engine was established, for the first time or again; send `Hello` now."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection was lost, because the process or the network failed. It is retried until `close`."""

    unsent: tuple[ToEngine, ...] = ()  # messages that `send` took and the engine never got


ConnectionEvent = Connected | Disconnected | tuple[FromEngine, memoryview | None]
"""The events of a connection: changes, and messages with their second frame or None."""


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
        self._on_event: Callable[[ConnectionEvent], None] = _ignore
        self._is_read = self._is_connected = False  # the latter as of the last event
        self._outgoing: list[tuple[bytes, bytes | memoryview]] = []  # frames of messages that are not sent yet
        self._unsent: list[ToEngine] = []  # these messages, and those that came after the engine had ended
        self._num_seen = 0  # messages a turn of the loop ago

    def send(self, message: ToEngine, data: bytes | memoryview | None = None) -> None:
        """Send `message` (and raw bytes beside it) when a turn of the loop has no further one, all of them together.

        A busy loop finds the next request in its next turn, and an engine takes a few in one batch sooner than each in
        one. Raises zmq.Again at once if no engine is connected; if it has just ended, `Disconnected` follows and names
        what was not sent.
        """
        if not self._is_connected:
            raise zmq.Again
        if not self._outgoing:
            self._loop.call_soon(self._send_outgoing)
        self._outgoing.append((serialize(message), data or b""))
        self._unsent.append(message)

    def _send_outgoing(self) -> None:
        """Send what waits, unless some of it came in this turn: then the next one may have more."""
        num_waiting = len(self._outgoing)
        if self._num_seen < num_waiting < _MAX_GROUP:
            self._num_seen = num_waiting
            self._loop.call_soon(self._send_outgoing)
            return
        self._num_seen = 0
        self._send_now()

    def _send_now(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if not outgoing or self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):  # the engine has ended; `Disconnected` follows
            _send(self._socket, pack(outgoing), _DONTWAIT, copy=True)
            self._unsent.clear()
        # Sending handles what has arrived, and then the descriptor does not become readable for it (zmq_getsockopt(3)).
        if self._is_read and self._socket.get(_EVENTS) & _POLLIN:  # type: ignore[operator]
            self._loop.call_soon(self._read_messages)

    def listen(self, on_event: Callable[[ConnectionEvent], None]) -> None:
        """Call `on_event` in the loop with connection changes and messages, in order, until `close`."""
        self._on_event, self._is_read = on_event, True
        for each, read in ((self._socket, self._read_messages), (self._monitor, self._read_monitor)):
            self._loop.add_reader(each.fileno(), read)
            self._loop.call_soon(read)

    async def events(self) -> AsyncGenerator[ConnectionEvent, None]:
        """Yield what `listen` tells, until `close`."""
        events: asyncio.Queue[ConnectionEvent] = asyncio.Queue()
        self.listen(events.put_nowait)
        while True:
            yield await events.get()

    def close(self) -> None:
        """Close the connection."""
        self._send_now()
        self._is_read = self._is_connected = False
        for each in (self._socket, self._monitor):
            self._loop.remove_reader(each.fileno())
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _read_messages(self) -> None:
        # To ask takes less than the error of an empty socket.
        while self._is_read and self._socket.get(_EVENTS) & _POLLIN:  # type: ignore[operator]
            for content, data in unpack(_receive(self._socket)):
                try:
                    message = deserialize_from_engine(content)
                except msgspec.DecodeError as error:
                    _log.warning("dropped an invalid message of an engine: %s", error)
                    continue
                self._on_event((message, data))

    def _read_monitor(self) -> None:
        while self._is_read:
            try:
                frames = self._monitor.recv_multipart(_DONTWAIT)
            except zmq.Again:
                return
            event = zmq.utils.monitor.parse_monitor_message(frames)
            # The messages that came before a disconnect are handled before it.
            self._read_messages()
            self._is_connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._on_event(Connected())
            else:
                unsent, self._unsent = tuple(self._unsent), []
                self._outgoing.clear()  # the engine's successor knows nothing of it
                self._on_event(Disconnected(unsent))


def _ignore(_: ConnectionEvent) -> None:
    """Do nothing: nobody listens yet."""


def _send(
    opened: zmq.Socket[bytes], frames: Sequence[bytes | memoryview], flags: int = 0, *, copy: bool = False
) -> None:
    """Send frames in a third of the time of pyzmq's `send_multipart`, whose flags are enumerations.

    Without `copy`, a thread of pyzmq's frees what is long.
    """
    for frame in frames[:-1]:
        opened.send(frame, flags | _SNDMORE, copy=copy)
    opened.send(frames[-1], flags, copy=copy)


def _receive(opened: zmq.Socket[bytes]) -> list[memoryview]:
    """Receive the frames of a group; raises zmq.Again if there are none."""
    frames = [opened.recv(_DONTWAIT, copy=False)]
    while frames[-1].more:
        frames.append(opened.recv(_DONTWAIT, copy=False))
    return [frame.buffer for frame in frames]


def pack(messages: Sequence[tuple[bytes, bytes | memoryview]]) -> list[bytes | memoryview]:
    """Return the frames of messages, each with its data, which may be empty.

    One message is as it is. Of several there are three frames: the lengths of each message and of its data as pairs of
    little-endian 32-bit integers, all messages, and all data. A frame costs each end as much as a short message.
    """
    if len(messages) == 1:
        return list(messages[0])
    lengths = [memoryview(part).nbytes for message in messages for part in message]
    contents, data = zip(*messages, strict=True)
    return [struct.pack(f"<{len(lengths)}I", *lengths), b"".join(contents), b"".join(data)]


def unpack(frames: Sequence[bytes | memoryview]) -> list[tuple[memoryview, memoryview | None]]:
    """Return the messages of frames that `pack` has made, each with its data, or None; none of others."""
    views = [memoryview(frame) for frame in frames]
    if len(views) < 3:
        return [(views[0], views[1] if views[1:] and views[1].nbytes else None)] if views else []
    lengths, contents, data = views[:3]
    messages: list[tuple[memoryview, memoryview | None]] = []
    start = data_start = 0
    for length, data_length in struct.iter_unpack("<II", lengths[: lengths.nbytes // 8 * 8]):
        end, data_end = start + length, data_start + data_length
        messages.append((contents[start:end], data[data_start:data_end] if data_length else None))
        start, data_start = end, data_end
    return messages


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
