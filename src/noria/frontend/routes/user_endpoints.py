"""`POST /v1/endpoints/{name}`: endpoints with code of the operator's (docs/user-code.md)."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.config import FrontendConfig
from noria.frontend.http.body import JsonBodyReader, decode, decode_object
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.services.priority_headers import apply_headers
from noria.frontend.user_code.endpoints import CallContext, UserEndpoints, check_deadline
from noria.protocol.request import Priority


class _Urgency(Struct, frozen=True):
    """What only the headers say, because the whole body is the endpoint's."""

    priority: Priority | None = None
    deadline_ms: int | None = None


class _Object(Struct, frozen=True):
    """Any JSON object."""


class UserEndpointRoutes:
    """The route of all endpoints."""

    def __init__(self, endpoints: UserEndpoints, body_reader: JsonBodyReader, config: FrontendConfig) -> None:
        self._endpoints, self._body_reader, self._config = endpoints, body_reader, config

    async def endpoint(self, http: Request) -> Response:
        """Run an endpoint on the JSON object of the body; returns what it returns."""
        raw = await self._body_reader.read(http)
        decode(raw, _Object)
        body = decode_object(raw)
        urgency = apply_headers(_Urgency(), http.headers)
        call = CallContext(
            http.state.api_client,
            http.state.request_id,
            http.state.api_client.allowed_priority(urgency.priority),
            check_deadline(urgency.deadline_ms, self._config.request_timeout_s),
        )
        content = await cancel_on_disconnect(http, self._endpoints.answer(http.path_params["name"], body, call))
        return Response(content, media_type="application/json")
