"""The application's `receive` and `send`, where uvicorn's way takes too long, or is not enough.

Head and body are sent together: uvicorn makes a system call, and the kernel a packet, for each. All fields of a head
are checked at once. HTTP/1.0 gets no chunks.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

_STATUSES_WITHOUT_BODY = frozenset({204, 304})
# What uvicorn allows in no name and in no value of a header; as its expressions, in a third of their time.
_NOT_IN_NAMES, _NOT_IN_VALUES = (
    bytes(code for code in range(256) if pattern.search(bytes([code]))) for pattern in (HEADER_RE, HEADER_VALUE_RE)
)


class Exchange:
    """A request and its response. uvicorn's `cycle` has their state."""

    def __init__(self, cycle: RequestResponseCycle, app: ASGI3Application, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._app, self._loop, self._is_read = cycle, app, loop, False
        self._head: bytes | None = None  # while it waits for the first of the body, at most until the loop's next turn
        self._num_missing: int | None = None  # bytes of the body; None: it has no length
        self._is_chunked = False

    def __call__(self, scope: Scope, _receive: object, _send: object) -> Awaitable[None]:
        """Have the application serve the request."""
        return self._app(scope, self.receive, self.send)

    async def receive(self) -> ASGIReceiveEvent:
        """Return the body, if all of it has arrived; else what uvicorn returns."""
        cycle = self._cycle
        if self._is_read or cycle.more_body or cycle.disconnected or cycle.response_complete:
            message = await cycle.receive()
            self._is_read = not message.get("more_body", False)
            return message
        self._is_read = True
        cycle.message_event.clear()
        body, cycle.body = bytes(cycle.body), bytearray()  # which may be long, and is not kept
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the response.

        Raises RuntimeError if it is not as ASGI has it.
        """
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if message["type"] == "http.response.start" and not cycle.response_started:
            self._begin(message["status"], list(message.get("headers", ())))
        elif message["type"] == "http.response.body" and cycle.response_started and not cycle.response_complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"the application sent {message['type']!r}, which is not its turn.")

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        headers = [*cycle.default_headers, *headers]
        named: Any = dict(headers)
        names, values = b"".join(named), b"".join([value for _, value in headers])
        if names.translate(None, _NOT_IN_NAMES) != names or values.translate(None, _NOT_IN_VALUES) != values:
            raise RuntimeError("the name or the value of a header is invalid.")
        length = named.get(b"content-length")
        if length is not None:
            self._num_missing = int(length)
        elif status in _STATUSES_WITHOUT_BODY:
            self._num_missing = 0
        elif cycle.scope["http_version"] != "1.0" and cycle.scope["method"] != "HEAD":
            self._is_chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        if b"close" in named.get(b"connection", b"").lower():
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        fields = b"".join([b"%b: %b\r\n" % field for field in headers])
        self._head = b"%b%b\r\n" % (STATUS_LINE[status], fields)
        self._loop.call_soon(self._send_head)

    def _send_head(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._cycle.transport.is_closing():
            self._cycle.transport.write(head)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        cycle = self._cycle
        if cycle.scope["method"] == "HEAD":
            body, self._num_missing = b"", None
        elif self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        elif self._num_missing is not None:
            self._num_missing -= len(body)
            if self._num_missing < 0 or (self._num_missing and not more):
                raise RuntimeError("the response's body is not as long as its Content-Length.")
        if self._head is not None:
            head, self._head = self._head, None
            cycle.transport.writelines([head, body])
        elif body:
            cycle.transport.write(body)
        if not more:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
