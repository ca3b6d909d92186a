"""Responses with the numbers of texts, for every protocol."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response

from noria.frontend.services.encoding import EncodingResult

_MAX_INLINE_NUMBERS = 16_384  # of a response that the event loop encodes itself, in at most a millisecond


async def encoding_response(result: EncodingResult, encode: Callable[[], bytes], weight: int = 1) -> Response:
    """Return the JSON that `encode` makes, in a thread if there are many numbers.

    `weight` is how many times as long it takes for a number as for one of an embedding.
    """
    is_large = len(result.numbers) * weight > _MAX_INLINE_NUMBERS
    content = await asyncio.to_thread(encode) if is_large else encode()
    return Response(content, headers=result.headers, media_type="application/json")
