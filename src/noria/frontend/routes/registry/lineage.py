"""`/api/v1/lineage`: OpenLineage's events over HTTP, as its clients send them."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.errors import UnsupportedMediaType, short_repr
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.paths import LINEAGE_PATH
from noria.frontend.services.registry.lineage import LineageService


class LineageRoutes:
    """The routes of OpenLineage. An event that was received before is accepted again and changes nothing."""

    def __init__(self, service: LineageService, body_reader: JsonBodyReader) -> None:
        self._service, self._body_reader = service, body_reader

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [
            Route(LINEAGE_PATH, self.event, methods=["POST"]),
            Route(f"{LINEAGE_PATH}/batch", self.batch, methods=["POST"]),
        ]

    async def event(self, http: Request) -> Response:
        """Record one event."""
        await self._service.record(await self._read(http), sender_of(http))
        return Response()

    async def batch(self, http: Request) -> Response:
        """Record a list of events, if all of them are valid."""
        await self._service.record_batch(await self._read(http), sender_of(http))
        return Response(status_code=204)

    async def _read(self, http: Request) -> bytes:
        encoding = http.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise UnsupportedMediaType(f"Content-Encoding is {short_repr(encoding)}; send the body uncompressed.")
        return await self._body_reader.read(http)


def sender_of(http: Request) -> str:
    """Return the name of the request's API key, or its address."""
    name: str | None = http.state.api_client.name
    return name or (http.client.host if http.client else "")
