"""The modes in which a FastAPI application sends the bytes of an image: plain, as tutorials stream it, and in proper
streams.

`noria bench streaming` measures the cost of each. `io.BytesIO` iterates by line, like every file, and Starlette fetches
each item of a synchronous iterator through its thread pool. The bytes of a compressed image are nearly random, so one
in 256 is a newline: an image of 800 kB is sent in some 3,100 pieces, with a thread switch for each.
"""

import io
from collections.abc import AsyncIterator, Callable

from fastapi import Response
from fastapi.responses import StreamingResponse

from noria_bench.targets.pipeline_generator import ImageResponse

CHUNK_BYTES = 64 * 1024


def plain(reply: ImageResponse) -> Response:
    """Return one body with its length."""
    return Response(reply.content, media_type=reply.media_type, headers=reply.headers)


def bytesio(reply: ImageResponse) -> Response:
    """A stream of lines, as in tutorials."""
    return StreamingResponse(io.BytesIO(reply.content), media_type=reply.media_type, headers=reply.headers)


def chunks(reply: ImageResponse) -> Response:
    """A stream of chunks of 64 kB."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(reply.content), CHUNK_BYTES):
            yield reply.content[start : start + CHUNK_BYTES]

    return StreamingResponse(pieces(), media_type=reply.media_type, headers=reply.headers)


def generator(reply: ImageResponse) -> Response:
    """A stream of one piece, which shows the cost of streaming alone."""

    async def piece() -> AsyncIterator[bytes]:
        yield reply.content

    return StreamingResponse(piece(), media_type=reply.media_type, headers=reply.headers)


RESPONSE_MODES: dict[str, Callable[[ImageResponse], Response]] = {
    mode.__name__: mode for mode in (plain, bytesio, chunks, generator)
}
