"""Server-sent events: how an event is written, and the response that streams them.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from noria.errors import RequestCancelled
from noria.frontend.http.disconnects import cancel_on_disconnect, run_until

KEEP_ALIVE_INTERVAL_S = 15.0
"""How long a stream may be silent. Proxies close a connection that is silent for 30 to 60 s."""

KEEP_ALIVE_COMMENT = b": still here\n\n"
"""A comment that clients ignore; to proxies the connection is active."""

# X-Accel-Buffering: nginx would otherwise buffer the events.
SSE_HEADERS: Mapping[str, str] = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

_FLUSH_GRACE_S = 1.0  # for clients to read what was sent before a drain


def serialize_event(name: str, data: Any, event_id: str | None = None) -> bytes:
    """Return one event in wire format. `data` is anything that msgspec can encode as JSON."""
    id_line = f"id: {event_id}\n" if event_id is not None else ""
    return f"{id_line}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """A response that sends each frame when it comes, and closes `frames` when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        on_close: Callable[[], Awaitable[None]],
        draining: asyncio.Event | None = None,
    ) -> None:
        """`on_close` is called once, even if the client disconnects before the first frame.

        `draining` is for frames without an end of their own: once set, the stream ends, and a moment later the
        connection is closed, whether the client has read everything or not; it is expected to reconnect to another
        server. If it is None, a server that drains waits for the end of the frames.
        """
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._frames, self._on_close, self._draining = frames, on_close, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until they end or the client disconnects."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})
                return
            with contextlib.suppress(RequestCancelled):
                await cancel_on_disconnect(Request(scope, receive), self._write(scope, send))
        finally:
            await self._frames.aclose()
            await self._on_close()

    async def _write(self, scope: Scope, send: Send) -> None:
        if self._draining is None:
            await self._write_all(send)
            return
        write_task = await run_until(self._draining.wait(), self._write_all(send))
        if not write_task.cancelled():
            write_task.result()
            return
        # The timer is not cancelled when all is sent: the client may not have read it yet. The connection closes when
        # it has.
        asyncio.get_running_loop().call_later(_FLUSH_GRACE_S, scope["state"]["abort"])
        await send({"type": "http.response.body", "body": b""})

    async def _write_all(self, send: Send) -> None:
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
