"""uvicorn's HTTP protocol with limits for request heads, for clients that do not read, and for vanished clients.

Such a connection holds no slot of an engine, but it holds memory and a file descriptor; uvicorn would wait forever, and
keep whatever arrives. The limits of request bodies are in `body.py`.
"""

import asyncio
import contextlib
import fcntl
import functools
import math
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import ClassVar

from uvicorn._types import ASGI3Application
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from noria.frontend.access.trusted_proxies import UNIX_CLIENT
from noria.frontend.server.connection_admission import ConnectionAdmission
from noria.frontend.server.response_writer import Exchange

MAX_HEAD_BYTES = 65_536
"""Of one request: its URL and its fields, also those after a chunked body. h11's is as large, Node.js's a quarter."""
MAX_FIELDS = 100
"""Of one request, as in Apache. Browsers send about 15, and proxies add some."""
MAX_PIPELINED_REQUESTS = 64
"""Requests of one connection that wait for the response to an earlier one; each takes 3 kB, and arrives in 20 bytes."""
HEAD_TIMEOUT_S = 30.0  # as for a body
STALL_TIMEOUT_S = 30.0
_TLS_CLOSE_S = 1.0  # within which a client should answer the end of an idle connection; without TLS the kernel does
# What a client must read per STALL_TIMEOUT_S. At 1 kB/s an image takes minutes; receivers acknowledge in steps of some
# kB.
MIN_READ_BYTES = 32_768
TCP_USER_TIMEOUT_S = 60.0
"""How long sent data may stay unacknowledged. Linux's own limit is 15 minutes (tcp(7), tcp_retries2)."""
_DISCONNECT_POLL_S = 0.1
"""How often a connection whose reading is paused is asked whether the client has left: its end waits behind what is not
read."""
_FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})
_TCP_INFO_BYTES, _BYTES_ACKED_AT = 128, 120  # struct tcp_info of linux/tcp.h; tcpi_bytes_acked is an __u64


def _error_response(status: str, text: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {len(text)}\r\n"
    return f"{head}connection: close\r\n\r\n{text}".encode()


_REQUEST_TIMEOUT_RESPONSE = _error_response("408 Request Timeout", "The head of the request took too long.\r\n")
_HEAD_TOO_LARGE_RESPONSE = _error_response(
    "431 Request Header Fields Too Large",
    f"The head of the request has more than {MAX_HEAD_BYTES} bytes or more than {MAX_FIELDS} fields.\r\n",
)


class _RejectedError(Exception):
    """Raised in the parser's callbacks to stop it; the connection is being closed already."""


if not hasattr(HttpToolsProtocol, "_start_asgi_task"):  # the override below would never be called (ADR 20)
    raise ImportError("the installed uvicorn has no HttpToolsProtocol._start_asgi_task; install uvicorn>=0.45,<1.")


class TimeoutHttpProtocol(HttpToolsProtocol):
    """An HTTP connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _close_timer: asyncio.TimerHandle | None = None
    _disconnect_timer: asyncio.TimerHandle | None = None
    _on_disconnect: Callable[[], object] | None = None
    # Received since a head ended, or a part of a body: all that the parser may keep, and some that it has passed on.
    _unfinished_bytes = 0
    _has_tls = False
    _running_cycle: RequestResponseCycle | None = None  # `cycle` is that of the last pipelined request
    _closes_after_response = False
    admission: ClassVar[ConnectionAdmission] = ConnectionAdmission()
    held: contextlib.ExitStack | None = None
    """Its place among the connections, until it ends: from `admission`, set by who accepts a connection before its TLS
    handshake."""

    @classmethod
    def limited(cls, admission: ConnectionAdmission) -> "type[TimeoutHttpProtocol]":
        """Return a protocol whose connections `admission` counts."""
        return type("Limited" + cls.__name__, (cls,), {"admission": admission})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timer, for a client that never sends anything."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if self.held is None:
            self.held = self.admission.admit(sock, self.client[0] if self.client else UNIX_CLIENT, self.loop.time())
            if self.held is None:
                self.transport.abort()
        self._has_tls = self.scheme == "https"
        if sock.family == socket.AF_UNIX:
            self.client = (UNIX_CLIENT, 0)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(TCP_USER_TIMEOUT_S * 1000))
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Start the head timer: data outside of a request belongs to the next head, if only its leading empty lines."""
        self._unfinished_bytes += len(data)
        super().data_received(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject_head()
        if self._on_disconnect is not None and self.flow.read_paused:
            self._start_disconnect_timer()
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field, if there are not too many. Trailers (fields after a chunked body) are counted and dropped."""
        if len(self.headers) >= MAX_FIELDS:
            self._reject_head()
            raise _RejectedError
        name = name.lower()  # uvicorn's own lines, without another call for each field
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser rejects."""
        if not self.transport.is_closing():  # else it was rejected by this class
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        """Begin a request. Puts `abort` on its state, which closes the connection at once and drops unread data, and
        `watch_disconnect`.

        A client that sends another request has read the last response, unless writing is still paused.
        """
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            self.transport.abort()
            raise _RejectedError
        if self._unfinished_bytes > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:  # else some is body
            self._reject_head()
            raise _RejectedError
        self._unfinished_bytes = 0
        self.scope["state"] |= {"abort": self.transport.abort, "watch_disconnect": self.watch_disconnect}
        self._stop_head_timer()
        if not self.flow.write_paused:
            self._stop_stall_timer()
        super().on_headers_complete()
        self.headers = []  # fields of the trailers; the request keeps its own

    def shutdown(self) -> None:
        """Close the connection, if it is idle, or have it closed after the response."""
        super().shutdown()
        self._start_close_timer()

    def close_after_response(self) -> None:
        """Have the connection closed after its next response, which says so: `Connection: close`.

        An idle connection stays open for the request that its client may be sending, as long as any idle one.
        """
        self._closes_after_response = True
        if self._running_cycle is not None and not self._running_cycle.response_started and not self.pipeline:
            self._running_cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, on which nothing has arrived for too long."""
        super().timeout_keep_alive_handler()
        self._start_close_timer()

    def watch_disconnect(self, on_disconnect: Callable[[], object]) -> Callable[[], None]:
        """Have `on_disconnect` called once when the client disconnects. Returns what ends that.

        For the request that is being answered, of which a connection has one at a time; the next one may call this
        before the last one ends its own. A client that closes only its own side has disconnected, too.
        """
        self._on_disconnect = on_disconnect
        if self.transport.is_closing():
            self.loop.call_soon(self._report_disconnect)
        elif self.flow.read_paused:
            self._start_disconnect_timer()
        return functools.partial(self._unwatch_disconnect, on_disconnect)

    def _unwatch_disconnect(self, on_disconnect: Callable[[], object]) -> None:
        if self._on_disconnect is on_disconnect:
            self._on_disconnect = None

    def _report_disconnect(self) -> None:
        on_disconnect, self._on_disconnect = self._on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()

    def on_message_complete(self) -> None:
        """End a request's body. Puts `body_has_arrived` on its state.

        Its length no longer pauses reading, without which nobody would notice that the client leaves. A pipelined
        request goes on pausing it.
        """
        self._unfinished_bytes = 0
        self.scope["state"]["body_has_arrived"] = True
        super().on_message_complete()
        if self.cycle is self._running_cycle:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Start the stall timer: the client reads more slowly than the application writes."""
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """Stop the stall timer: the client has read nearly all."""
        self._stop_stall_timer()
        super().resume_writing()
        if self.cycle.response_complete:
            self._start_stall_timer_if_unread()

    def on_response_complete(self) -> None:
        """Restart the stall timer for what is written but not yet read."""
        super().on_response_complete()
        self._start_stall_timer_if_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and tell the request that is being answered."""
        if self.held is not None:
            self.held.close()
        self._stop_head_timer()
        self._stop_stall_timer()
        for timer in (self._close_timer, self._disconnect_timer):
            if timer is not None:
                timer.cancel()
        if self._running_cycle is not None:
            self._running_cycle.disconnected = True
            self._running_cycle.message_event.set()
        super().connection_lost(exc)
        self._report_disconnect()
        self._unset_keepalive_if_required()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running_cycle = cycle
        if self._closes_after_response and not self.pipeline:
            cycle.keep_alive = False
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # which 1.0 does not have
        if isinstance(app, ProxyHeadersMiddleware) and _FORWARDED.isdisjoint(dict(cycle.scope["headers"])):
            app = app.app  # it looks for these alone
        super()._start_asgi_task(cycle, Exchange(cycle, app, self.loop))

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)  # ": " and CR LF

    def _reject_head(self) -> None:
        """Close the connection, with 431 unless another response is being sent."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_HEAD_TOO_LARGE_RESPONSE)
        self.transport.close()

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        self.transport.write(_REQUEST_TIMEOUT_RESPONSE)
        self.transport.close()

    def _start_stall_timer_if_unread(self) -> None:
        # With TLS most of what is written waits in a buffer below, whose size cannot be asked for.
        if self._has_tls or self.transport.get_write_buffer_size() > 0:
            self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        """Check the client's reading later. Until then nothing is written: the application waits or is done."""
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self._on_stall_timeout, self._progress_bytes())

    def _on_stall_timeout(self, previous_progress_bytes: int) -> None:
        self._stall_timer = None
        if self._unread_bytes() == 0:
            return
        if self._progress_bytes() - previous_progress_bytes < MIN_READ_BYTES:
            self.transport.abort()  # close() would wait until all is read
        else:
            self._start_stall_timer()

    def _start_disconnect_timer(self) -> None:
        if self._disconnect_timer is None:
            self._disconnect_timer = self.loop.call_later(_DISCONNECT_POLL_S, self._poll_disconnect)

    def _poll_disconnect(self) -> None:
        """Close the connection if its client has closed its side; else ask again later, unless reading tells it."""
        self._disconnect_timer = None
        if self._on_disconnect is None or not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if poll.poll(0):
            self.transport.close()
        else:
            self._start_disconnect_timer()

    def _start_close_timer(self) -> None:
        """Abort a closed TLS connection if the client does not answer its end; its transport would wait much longer."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._has_tls and not answering and self._close_timer is None:
            self._close_timer = self.loop.call_later(_TLS_CLOSE_S, self._on_close_timeout)

    def _on_close_timeout(self) -> None:
        self._close_timer = None
        if self._unread_bytes() == 0:
            self.transport.abort()
        else:  # the client still reads its last response; the stall timer is for one that does not
            self._start_close_timer()

    def _progress_bytes(self) -> int:
        """Return a number that grows by what the client acknowledges, as long as nothing is written."""
        if not self._has_tls:
            return -self._unread_bytes()
        sock = self.transport.get_extra_info("socket")
        tcp_info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (acknowledged,) = struct.unpack_from("=Q", tcp_info, _BYTES_ACKED_AT)
        return int(acknowledged)

    def _unread_bytes(self) -> int:
        """Return how many written bytes the client has not acknowledged.

        They are in our buffer and in the kernel's (about 1 MB). With TLS it is less, but only 0 if there are none.
        """
        sock = self.transport.get_extra_info("socket")
        # TIOCOUTQ is the same number as SIOCOUTQ of tcp(7) and unix(7).
        in_kernel = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
