"""The event stream of a generation, for every route that streams images."""

from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import Request

from noria.errors import NoriaError
from noria.frontend.engines.results import Update
from noria.frontend.http.errors import error_body
from noria.frontend.http.sse import KEEP_ALIVE_COMMENT, KEEP_ALIVE_INTERVAL_S, EventStream, serialize_event
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult
from noria.frontend.services.images.streaming import StreamedGeneration

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
