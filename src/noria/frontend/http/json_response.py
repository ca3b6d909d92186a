"""JSON responses."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.responses import Response


class JsonResponse(Response):
    """A response of JSON that is encoded already; made in half of the time of Starlette's."""

    def __init__(self, content: bytes, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.status_code, self.body, self.background = status, content, None
        self.raw_headers = [(name.lower().encode("latin-1"), headers[name].encode("latin-1")) for name in headers]
        self.raw_headers += (b"content-length", b"%d" % len(content)), (b"content-type", b"application/json")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    """Return `body`, anything that msgspec can encode, as a JSON response."""
    return JsonResponse(msgspec.json.encode(body), status, headers)
