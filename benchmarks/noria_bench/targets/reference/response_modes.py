"""The ways in which a FastAPI application gives the bytes of an image: the plain one, what tutorials write, and streams done properly.

`noria bench streaming` measures what each costs. `io.BytesIO` iterates by line, as every file does, and Starlette fetches each item of an
iterator that is not asynchronous through its thread pool: an image of 800 kB, whose bytes are as good as random, has a newline in every
256, so it is sent in some 3,100 pieces with a hop between threads for each.
"""

import io
from collections.abc import AsyncIterator, Callable

from fastapi import Response
from fastapi.responses import StreamingResponse

from noria_bench.targets.pipeline_generator import ImageResponse

CHUNK_BYTES = 64 * 1024


def plain(reply: ImageResponse) -> Response:
    """All at once, with its length."""
    return Response(reply.content, media_type=reply.media_type, headers=reply.headers)


def bytesio(reply: ImageResponse) -> Response:
    """As tutorials stream it: a line a piece."""
    return StreamingResponse(io.BytesIO(reply.content), media_type=reply.media_type, headers=reply.headers)


def chunks(reply: ImageResponse) -> Response:
    """A stream of pieces of 64 kB."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(reply.content), CHUNK_BYTES):
            yield reply.content[start : start + CHUNK_BYTES]

    return StreamingResponse(pieces(), media_type=reply.media_type, headers=reply.headers)


def generator(reply: ImageResponse) -> Response:
    """A stream of one piece: what streaming alone costs."""

    async def piece() -> AsyncIterator[bytes]:
        yield reply.content

    return StreamingResponse(piece(), media_type=reply.media_type, headers=reply.headers)


RESPONSE_MODES: dict[str, Callable[[ImageResponse], Response]] = {
    way.__name__: way for way in (plain, bytesio, chunks, generator)
}
