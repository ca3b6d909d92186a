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
from noria.frontend.engine_link import PreviewImage, Progress, Update
from noria.frontend.leaving import unless_disconnected, until
from noria.frontend.refusals import error_answer
from noria.frontend.studio import Drawing, Studio, Wish

_KEEP_ALIVE_S = 15.0  # proxies close a connection that is silent for longer than 30 to 60 s
_LAST_FRAME_S = 1.0  # to read what was sent before a drain; who needs longer misses nothing that lasts


class Mailbox:
    """What a watcher has not read yet: the newest progress, and every preview."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._previews: list[PreviewImage] = []
        self._filled = asyncio.Event()

    @property
    def filled(self) -> bool:
        """Whether there is something to take."""
        return self._filled.is_set()

    def put(self, update: Update) -> None:
        """Leave `update`; never waits."""
        if isinstance(update, Progress):
            self._progress = update
        else:
            self._previews.append(update)
        self._filled.set()

    async def wait(self) -> None:
        """Until there is something."""
        await self._filled.wait()

    def take(self) -> list[Update]:
        """All there is: previews in their order, then the newest progress."""
        updates: list[Update] = [*self._previews, *([self._progress] if self._progress else [])]
        self._previews, self._progress = [], None
        self._filled.clear()
        return updates


class WatchedDrawing:
    """A wish that is being drawn, and its mailbox."""

    def __init__(self, studio: Studio, wish: Wish) -> None:
        self.wish = wish
        self._mailbox = Mailbox()
        self._task = asyncio.create_task(studio.draw(wish, self._mailbox.put))

    async def accepted(self) -> None:
        """Until an engine has taken the wish; raises what refused it, while the answer can still have a status.

        What fails after that, however soon, is told in the stream.
        """
        await self._until_news(None)
        if self._task.done() and not self._mailbox.filled:
            self._task.result()

    async def happenings(self) -> AsyncIterator[Update | Drawing | None]:
        """Its updates, then its drawing; None where nothing has happened for a while. Raises what ended it."""
        while True:
            await self._until_news(_KEEP_ALIVE_S)
            has_ended = self._task.done()  # asked first: while its reader takes these updates there may be more of them
            updates = self._mailbox.take()
            for update in updates:
                yield update
            if has_ended:
                yield self._task.result()
                return
            if not updates:
                yield None

    async def _until_news(self, patience_s: float | None) -> None:
        news = asyncio.create_task(self._mailbox.wait())
        try:
            await asyncio.wait({news, self._task}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    async def end(self) -> None:
        """Take it out of the engine, if it is still there."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NoriaError):
            await self._task


def event(name: str, data: Any, event_id: str | None = None) -> bytes:
    """One event as it goes over the wire; `data` is anything that msgspec makes JSON of, which is one line."""
    number = f"id: {event_id}\n" if event_id is not None else ""
    return f"{number}event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


COMMENT = b": still here\n\n"
"""What no client shows, and every proxy counts as life."""

HEADERS: Mapping[str, str] = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx would collect the events


class EventStream(Response):
    """An answer that is written while `frames` come, and ends `frames` when its client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        end: Callable[[], Awaitable[None]],
        draining: asyncio.Event | None = None,
    ) -> None:
        """`end` is called once, also when the client has left before the first frame.

        `draining`, once set, ends frames that have no end of their own, and soon their connection, whether its client has read them or not:
        it comes again, elsewhere. None: a server that is to stop waits for the frames as for any answer.
        """
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames, self._end, self._draining = frames, end, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the end of the frames or of the client."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] == "HEAD":  # asks what the head of the answer would be, not for frames without end
                await send({"type": "http.response.body", "body": b""})
                return
            with contextlib.suppress(RequestCancelled):
                await unless_disconnected(Request(scope, receive), self._write(scope, send))
        finally:
            await self._frames.aclose()
            await self._end()

    async def _write(self, scope: Scope, send: Send) -> None:
        if self._draining is None:
            await self._write_all(send)
            return
        writing = await until(self._draining.wait(), self._write_all(send))
        if not writing.cancelled():
            writing.result()
            return
        # Not taken back when all is sent: that is not read yet, and a connection closes when it is.
        asyncio.get_running_loop().call_later(_LAST_FRAME_S, scope["state"]["abort"])
        await send({"type": "http.response.body", "body": b""})

    async def _write_all(self, send: Send) -> None:
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


Frames = Callable[[Update | Drawing], Awaitable[list[bytes]]]
"""What a route writes of something that has happened."""


async def watch(http: Request, studio: Studio, wish: Wish, frames_of: Frames) -> EventStream:
    """The answer that shows `wish` while it is drawn, once an engine has accepted it; an error on the way is its last event.

    Raises:
        NoriaError: what refused it, or RequestCancelled; nothing has been answered then.

    """
    drawing = WatchedDrawing(studio, wish)
    try:
        await unless_disconnected(http, drawing.accepted())
    except BaseException:
        await drawing.end()
        raise

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            async for happening in drawing.happenings():
                if happening is None:
                    yield COMMENT
                    continue
                for frame in await frames_of(happening):
                    yield frame
        except NoriaError as error:
            yield event("error", error_answer(error, http.state.request_id))

    return EventStream(frames(), drawing.end)
