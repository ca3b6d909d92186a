"""Responses with the numbers of texts, for every protocol."""

from collections.abc import Callable

from starlette.responses import Response

from noria.frontend.http.json_response import JsonResponse
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.encoding_result import EncodingResult


async def encoding_response(
    service: EncodingService, result: EncodingResult, encode: Callable[[], bytes], weight: int = 1
) -> Response:
    """Return the JSON that `encode` makes; `weight` is as of `EncodingService.respond`."""
    content, headers = await service.respond(result, encode, weight)
    return JsonResponse(content, headers=headers)
