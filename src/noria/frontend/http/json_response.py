"""JSON responses, encoded by msgspec."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `body`, anything that msgspec can encode, as a JSON response."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
