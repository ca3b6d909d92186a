"""Errors as responses: the only place where an error becomes JSON, of one shape on every route and in event streams.

OpenAI's clients read it too:

{"error": {"code": …, "message": …, "type": …, "param": …, "retryable": …, "request_id": …}}

Routes of another protocol have its form, an `ErrorDialect`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import (
    CrossOriginRequest,
    HostNotAllowed,
    InternalError,
    MethodNotAllowed,
    NoriaError,
    RouteNotFound,
    Unauthorized,
    did_you_mean,
    short_repr,
)
from noria.frontend.http.foreign_routes import hint_of
from noria.frontend.http.json_response import json_response

_KSERVE_V1 = (
    " KServe's V1 protocol is not served; its V2 is: POST /v2/models/NAME/infer, and texts at /v1/embeddings, /predict "
    "and /rerank."
)

# The `type` that OpenAI's API gives to a status.
_TYPE_BY_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled_error"}


class ErrorDetail(Struct, frozen=True):
    """The cause of an error, whether a retry can succeed, and the id to look for in the server's log."""

    code: str
    message: str
    type: str
    param: str | None  # the field at fault
    retryable: bool
    request_id: str


class ErrorBody(Struct, frozen=True):
    """The body of every error response."""

    error: ErrorDetail
    detail: str | UnsetType = UNSET


@dataclass(frozen=True)
class ErrorDialect:
    """The form in which a protocol has errors: `body` makes one, of `body_type`, of an error and the request's id."""

    body_type: type[Struct]
    body: Callable[[NoriaError, str], Struct]
    roots: tuple[str, ...] = ()  # the beginnings of its paths, also of those that are not served
    status: Callable[[type[NoriaError]], int] = lambda error_type: error_type.http_status
    name: Callable[[type[NoriaError]], str] = lambda error_type: error_type.code
    more_errors: Sequence[type[NoriaError]] = ()  # those that it tells apart and others do not


def error_body(error: NoriaError, request_id: str) -> ErrorBody:
    """Return `error` as JSON for its client."""
    return ErrorBody(
        ErrorDetail(
            code=error.code,
            message=error.message,
            type=_TYPE_BY_STATUS.get(
                error.http_status, "invalid_request_error" if error.http_status < 500 else "server_error"
            ),
            param=error.field,
            retryable=error.retryable,
            request_id=request_id,
        )
    )


DEFAULT_ERRORS = ErrorDialect(ErrorBody, error_body)
"""Noria's own form, which OpenAI's clients read too."""


def error_response(
    error: NoriaError, http: Request, dialect: ErrorDialect, headers: dict[str, str] | None = None
) -> Response:
    """Return the HTTP response to `error` in a dialect, with Retry-After in whole seconds if the error has a time."""
    http.scope["state"]["error_code"] = error.code
    if isinstance(error, HostNotAllowed | CrossOriginRequest):  # messages of other errors may have prompts in them
        http.scope["state"]["logged_error"] = error.message
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    response = _response(error, http, dialect, headers)
    if isinstance(error, Unauthorized):
        response.headers.append("WWW-Authenticate", 'Bearer realm="noria"')
        # A separate header, because Chromium ignores a second challenge in one. Not for our pages' scripts: the
        # browser's dialog for name and password would open before the page's own field for the key.
        if "x-requested-with" not in http.headers:
            response.headers.append("WWW-Authenticate", 'Basic realm="noria", charset="UTF-8"')
    return response


def routing_error_response(
    http: Request, error: HTTPException, dialect: ErrorDialect, known_paths: list[str]
) -> Response:
    """Return Starlette's 404 and 405 in the shape of all errors; to OPTIONS the methods of the path."""
    path = http.url.path
    if error.status_code == MethodNotAllowed.http_status:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        if http.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": f"{allow}, OPTIONS"})
        hint = _KSERVE_V1 if path.startswith("/v1/models/") and path.endswith((":predict", ":explain")) else ""
        noria_error: NoriaError = MethodNotAllowed(
            f"{http.method} is not allowed for {short_repr(path)}; allowed is {allow}.{hint}"
        )
        return error_response(noria_error, http, dialect, {"Allow": allow})
    hint = hint_of(path)
    hint = f" {hint}" if hint else did_you_mean(path, known_paths)
    noria_error = RouteNotFound(f"there is no {short_repr(path)}.{hint} GET /docs lists the routes.")
    return error_response(noria_error, http, dialect)


def internal_error(request_id: str) -> InternalError:
    """Return the error for an unexpected exception. Reveals only the id under which the log has the details."""
    return InternalError(f"the server failed on this request; its log has the details under {request_id}.")


def internal_error_response(http: Request, dialect: ErrorDialect) -> Response:
    """Return the response to an unexpected exception."""
    return _response(internal_error(http.scope["state"]["request_id"]), http, dialect, {})


def _response(error: NoriaError, http: Request, dialect: ErrorDialect, headers: dict[str, str]) -> Response:
    body = dialect.body(error, http.scope["state"]["request_id"])
    return json_response(body, dialect.status(type(error)), headers)
