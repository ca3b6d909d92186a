"""`POST /v1/endpoints/{name}`: endpoints with code of the operator's (docs/user-code.md)."""

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.config import FrontendConfig
from noria.frontend.http.body import JSON, JsonBodyReader, apply_headers, decode, decode_object
from noria.frontend.http.json_response import JsonResponse
from noria.frontend.http.operations import Operation, parameter
from noria.frontend.user_code.endpoints import CallContext, UserEndpoints, check_deadline
from noria.protocol.request import Priority


class _Urgency(Struct, frozen=True):
    """The settings that only the headers carry, because the whole body is the endpoint's."""

    priority: Priority | None = None
    deadline_ms: int | None = None


class _Object(Struct, frozen=True):
    """Any JSON object."""


_INPUTS = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "without a `preprocess`: a text, or a list of texts or pairs",
}
_BODY = {"type": "object", "properties": {"inputs": _INPUTS}, "example": {"inputs": ["a red circle"]}}


class UserEndpointRoutes:
    """The route of all endpoints."""

    def __init__(self, endpoints: UserEndpoints, body_reader: JsonBodyReader, config: FrontendConfig) -> None:
        self._endpoints, self._body_reader, self._config = endpoints, body_reader, config

    @property
    def operations(self) -> list[Operation]:
        """The operation to serve."""
        return [
            Operation(
                method="POST",
                path="/v1/endpoints/{name}",
                handler=self._endpoint,
                group="Encode texts",
                scopes=("generate",),
                summary="Call an endpoint with code of the operator's",
                description="Body and response are what its code makes of them.",
                parameters=[parameter("name", "path")],
                body={JSON: _BODY},
                response=Any,
            )
        ]

    async def _endpoint(self, http: Request) -> Response:
        raw = await self._body_reader.read(http)
        decode(raw, _Object)
        body = decode_object(raw)
        urgency = apply_headers(_Urgency(), http.headers)
        call = CallContext(
            http.state.context,
            http.state.api_client.allowed_priority(urgency.priority),
            check_deadline(urgency.deadline_ms, self._config.request_timeout_s),
        )
        content = await self._endpoints.answer(http.path_params["name"], body, call)
        return JsonResponse(content)
