"""The event stream of a generation, for every route that streams images."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from starlette.requests import Request

from noria.errors import NoriaError
from noria.frontend.engines.results import PreviewImage, ProgressUpdate, Update
from noria.frontend.http.errors import error_body
from noria.frontend.http.sse import KEEP_ALIVE_COMMENT, KEEP_ALIVE_INTERVAL_S, EventStream, serialize_event
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult


class LatestUpdates:
    """The updates that a reader has not taken yet: every preview, and the newest progress.

    So a slow reader never delays the engine, and what is kept for it is bounded.
    """

    def __init__(self) -> None:
        self._progress: ProgressUpdate | None = None
        self._previews: list[PreviewImage] = []
        self._updated = asyncio.Event()

    @property
    def has_updates(self) -> bool:
        """Whether `take` would return any."""
        return self._updated.is_set()

    def put(self, update: Update) -> None:
        """Add `update`. Never waits."""
        if isinstance(update, ProgressUpdate):
            self._progress = update
        else:
            self._previews.append(update)
        self._updated.set()

    async def wait(self) -> None:
        """Wait for the next update."""
        await self._updated.wait()

    def take(self) -> list[Update]:
        """Remove and return all: the previews in their order, then the newest progress."""
        updates: list[Update] = [*self._previews, *([self._progress] if self._progress else [])]
        self._previews, self._progress = [], None
        self._updated.clear()
        return updates


class StreamedGeneration:
    """A running generation and its unread updates."""

    def __init__(self, generation_service: GenerationService, admitted: AdmittedRequest) -> None:
        self.admitted = admitted
        self._updates = LatestUpdates()
        self._task = asyncio.create_task(generation_service.generate(admitted, self._updates.put))

    async def wait_until_accepted(self) -> None:
        """Wait until an engine has accepted the request.

        Raises:
            NoriaError: the request was rejected. Later failures are raised by `updates`.

        """
        await self._wait_for_update(None)
        if self._task.done() and not self._updates.has_updates:
            self._task.result()

    async def updates(self, timeout_s: float | None = None) -> AsyncIterator[Update | GenerationResult | None]:
        """Yield each update, then the result; None whenever nothing has happened for `timeout_s`.

        Raises:
            NoriaError: the generation failed.

        """
        while True:
            await self._wait_for_update(timeout_s)
            has_ended = self._task.done()  # read before yielding: more updates may come while the reader takes these
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
        """Cancel the generation, if it still runs, and wait for its end."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NoriaError):
            await self._task


UpdateFormatter = Callable[[Update | GenerationResult], Awaitable[list[bytes]]]
"""Returns the events that a route sends for an update."""


async def stream_generation(
    http: Request, generation_service: GenerationService, admitted: AdmittedRequest, format_update: UpdateFormatter
) -> EventStream:
    """Start a generation and return its event stream once an engine has accepted it.

    A failure after that is the last event, `error`.

    Raises NoriaError: the request was rejected; the response can still have its status.
    """
    generation = StreamedGeneration(generation_service, admitted)
    try:
        await generation.wait_until_accepted()
    except BaseException:
        await generation.cancel()
        raise

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            async for update in generation.updates(KEEP_ALIVE_INTERVAL_S):
                if update is None:
                    yield KEEP_ALIVE_COMMENT
                    continue
                for frame in await format_update(update):
                    yield frame
        except NoriaError as error:
            yield serialize_event("error", error_body(error, http.state.request_id))

    return EventStream(frames(), generation.cancel)
