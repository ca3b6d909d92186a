"""Server-sent events: a request watched while it forms, on every route that streams.

What happens to a request is put into a `Mailbox` as it comes and written as fast as its client reads. A client that reads slowly
misses progress, which is replaced by newer progress, and holds nothing up: the engine never waits for it, and what waits for it
here is bounded by the previews that it asked for and its images.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from noria.errors import NoriaError, RequestCancelled
from noria.frontend.engines.pool import PreviewImage, ProgressUpdate, Update
from noria.frontend.http.disconnects import cancel_on_disconnect, run_until
from noria.frontend.http.error_body import error_body
from noria.frontend.services.generation import AdmittedRequest, GenerationResult, GenerationService

_KEEP_ALIVE_S = 15.0  # proxies close a connection that is silent for longer than 30 to 60 s
_FLUSH_GRACE_S = 1.0  # to read what was sent before a drain; who needs longer misses nothing that lasts


class LatestUpdates:
    """What a watcher has not read yet: the newest progress, and every preview."""

    def __init__(self) -> None:
        self._progress: ProgressUpdate | None = None
        self._previews: list[PreviewImage] = []
        self._updated = asyncio.Event()

    @property
    def has_updates(self) -> bool:
        """Whether there is something to take."""
        return self._updated.is_set()

    def put(self, update: Update) -> None:
        """Leave `update`; never waits."""
        if isinstance(update, ProgressUpdate):
            self._progress = update
        else:
            self._previews.append(update)
        self._updated.set()

    async def wait(self) -> None:
        """Until there is something."""
        await self._updated.wait()

    def take(self) -> list[Update]:
        """All there is: previews in their order, then the newest progress."""
        updates: list[Update] = [*self._previews, *([self._progress] if self._progress else [])]
        self._previews, self._progress = [], None
        self._updated.clear()
        return updates


class StreamedGeneration:
    """A wish that is being drawn, and its mailbox."""

    def __init__(self, generation_service: GenerationService, admitted: AdmittedRequest) -> None:
        self.admitted = admitted
        self._updates = LatestUpdates()
        self._task = asyncio.create_task(generation_service.generate(admitted, self._updates.put))

    async def wait_until_accepted(self) -> None:
        """Until an engine has taken the wish; raises what refused it, while the answer can still have a status.

        What fails after that, however soon, is told in the stream.
        """
        await self._wait_for_update(None)
        if self._task.done() and not self._updates.has_updates:
            self._task.result()

    async def updates(self) -> AsyncIterator[Update | GenerationResult | None]:
        """Its updates, then its drawing; None where nothing has happened for a while. Raises what ended it."""
        while True:
            await self._wait_for_update(_KEEP_ALIVE_S)
            has_ended = self._task.done()  # asked first: while its reader takes these updates there may be more of them
            pending = self._updates.take()
            for update in pending:
                yield update
            if has_ended:
                yield self._task.result()
                return
            if not pending:
                yield None

    async def _wait_for_update(self, timeout_s: float | None) -> None:
        update_task = asyncio.create_task(self._updates.wait())
        try:
            await asyncio.wait({update_task, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            update_task.cancel()

    async def cancel(self) -> None:
        """Take it out of the engine, if it is still there."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NoriaError):
            await self._task


def serialize_event(name: str, data: Any, event_id: str | None = None) -> bytes:
    """One event as it goes over the wire; `data` is anything that msgspec makes JSON of, which is one line."""
    id_line = f"id: {event_id}\n" if event_id is not None else ""
    return f"{id_line}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


KEEP_ALIVE_COMMENT = b": still here\n\n"
"""What no client shows, and every proxy counts as life."""

SSE_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}  # nginx would collect the events


class EventStream(Response):
    """An answer that is written while `frames` come, and ends `frames` when its client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        on_close: Callable[[], Awaitable[None]],
        draining: asyncio.Event | None = None,
    ) -> None:
        """`end` is called once, also when the client has left before the first frame.

        `draining`, once set, ends frames that have no end of their own, and soon their connection, whether its client has read them or not:
        it comes again, elsewhere. None: a server that is to stop waits for the frames as for any answer.
        """
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._frames, self._on_close, self._draining = frames, on_close, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the end of the frames or of the client."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] == "HEAD":  # asks what the head of the answer would be, not for frames without end
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
        # Not taken back when all is sent: that is not read yet, and a connection closes when it is.
        asyncio.get_running_loop().call_later(_FLUSH_GRACE_S, scope["state"]["abort"])
        await send({"type": "http.response.body", "body": b""})

    async def _write_all(self, send: Send) -> None:
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


UpdateFormatter = Callable[[Update | GenerationResult], Awaitable[list[bytes]]]
"""What a route writes of something that has happened."""


async def stream_generation(
    http: Request, generation_service: GenerationService, admitted: AdmittedRequest, format_update: UpdateFormatter
) -> EventStream:
    """The answer that shows `wish` while it is drawn, once an engine has accepted it; an error on the way is its last event.

    Raises:
        NoriaError: what refused it, or RequestCancelled; nothing has been answered then.

    """
    generation = StreamedGeneration(generation_service, admitted)
    try:
        await cancel_on_disconnect(http, generation.wait_until_accepted())
    except BaseException:
        await generation.cancel()
        raise

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            async for update in generation.updates():
                if update is None:
                    yield KEEP_ALIVE_COMMENT
                    continue
                for frame in await format_update(update):
                    yield frame
        except NoriaError as error:
            yield serialize_event("error", error_body(error, http.state.request_id))

    return EventStream(frames(), generation.cancel)
