"""Errors as responses: the only place where an error becomes JSON, of one shape on every route and in event streams.

OpenAI's clients read it too:

{"error": {"code": …, "message": …, "type": …, "param": …, "retryable": …, "request_id": …}}

A1111's routes repeat the message as `detail`, the field that A1111's clients read. Those of text-embeddings-inference
have its form, {"error": …, "error_type": …}, and its statuses. Those of the Open Inference Protocol have the message
alone: {"error": …}.
"""

import math
from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import (
    DeadlineUnmeetable,
    EmptyInput,
    EngineCrashed,
    EngineLost,
    EngineUnavailable,
    GenerationFailed,
    InternalError,
    InvalidBody,
    InvalidField,
    MethodNotAllowed,
    NoriaError,
    QueueFull,
    RateLimited,
    RequestError,
    RouteNotFound,
    Unauthorized,
    UntokenizableText,
    WrongTask,
    did_you_mean,
    short_repr,
)
from noria.frontend.http.json_response import json_response
from noria.frontend.http.paths import A1111_CONTROLNET_ROOT, A1111_ROOT, OPEN_INFERENCE_ROOT, TEI_PATHS

# The `type` that OpenAI's API gives to a status.
_TYPE_BY_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled_error"}


class ErrorDetail(Struct, frozen=True):
    """What went wrong, whether a retry can succeed, and the id to look for in the server's log."""

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


class OpenInferenceErrorBody(Struct, frozen=True):
    """The body of an error of the Open Inference Protocol."""

    error: str


TeiErrorType = Literal["Validation", "Empty", "Tokenizer", "Overloaded", "Backend", "Unhealthy"]

_TEI_ERRORS: Mapping[type[NoriaError], tuple[TeiErrorType, int]] = {
    InvalidField: ("Validation", 422),
    InvalidBody: ("Validation", 422),
    EmptyInput: ("Empty", 400),
    UntokenizableText: ("Tokenizer", 422),
    WrongTask: ("Backend", 424),
    QueueFull: ("Overloaded", 429),
    RateLimited: ("Overloaded", 429),
    DeadlineUnmeetable: ("Overloaded", 429),
    GenerationFailed: ("Backend", 424),
    EngineCrashed: ("Backend", 424),
    EngineUnavailable: ("Unhealthy", 503),
    EngineLost: ("Unhealthy", 503),
}
"""text-embeddings-inference's type and status of an error. All others keep their status: it has none for them."""


class TeiErrorBody(Struct, frozen=True):
    """The body of every error response of text-embeddings-inference's routes."""

    error: str
    error_type: TeiErrorType


def tei_error(error_type: type[NoriaError]) -> tuple[TeiErrorType, int]:
    """Return text-embeddings-inference's type and status of an error."""
    default: TeiErrorType = "Validation" if issubclass(error_type, RequestError) else "Backend"
    return _TEI_ERRORS.get(error_type, (default, error_type.http_status))


def error_body(error: NoriaError, request_id: str, *, for_a1111: bool = False) -> ErrorBody:
    """Return `error` as JSON for its client."""
    return ErrorBody(
        ErrorDetail(
            code=error.code,
            message=error.message,
            type=_type_of(error.http_status),
            param=error.field,
            retryable=error.retryable,
            request_id=request_id,
        ),
        detail=error.message if for_a1111 else UNSET,
    )


def error_response(error: NoriaError, http: Request, headers: dict[str, str] | None = None) -> Response:
    """Return the HTTP response to `error`, with Retry-After in whole seconds if the error has a time."""
    http.scope["state"]["error_code"] = error.code
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    response = _response(error, http, headers)
    if isinstance(error, Unauthorized):
        response.headers.append("WWW-Authenticate", 'Bearer realm="noria"')
        # A separate header, because Chromium ignores a second challenge in one. Not for our pages' scripts: the
        # browser's dialog for name and password would open before the page's own field for the key.
        if "x-requested-with" not in http.headers:
            response.headers.append("WWW-Authenticate", 'Basic realm="noria", charset="UTF-8"')
    return response


def routing_error_response(http: Request, error: HTTPException, known_paths: list[str]) -> Response:
    """Return Starlette's 404 and 405 in the shape of all errors."""
    path = http.url.path
    if error.status_code == MethodNotAllowed.http_status:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        noria_error: NoriaError = MethodNotAllowed(
            f"{http.method} is not allowed for {short_repr(path)}; allowed is {allow}."
        )
        return error_response(noria_error, http, {"Allow": allow})
    noria_error = RouteNotFound(
        f"there is no {short_repr(path)}.{did_you_mean(path, known_paths)} GET /docs lists the routes."
    )
    return error_response(noria_error, http)


def internal_error(request_id: str) -> InternalError:
    """Return the error for an unexpected exception. Reveals only the id under which the log has the details."""
    return InternalError(f"the server failed on this request; its log has the details under {request_id}.")


def internal_error_response(http: Request) -> Response:
    """Return the response to an unexpected exception."""
    return _response(internal_error(http.scope["state"]["request_id"]), http, {})


def _response(error: NoriaError, http: Request, headers: dict[str, str]) -> Response:
    path: str = http.scope["path"]
    if path in TEI_PATHS and (path != "/" or http.method == "POST"):
        tei_type, status = tei_error(type(error))
        return json_response(TeiErrorBody(error.message, tei_type), status, headers)
    if path == OPEN_INFERENCE_ROOT or path.startswith(f"{OPEN_INFERENCE_ROOT}/"):
        return json_response(OpenInferenceErrorBody(error.message), error.http_status, headers)
    for_a1111 = path.startswith((f"{A1111_ROOT}/", f"{A1111_CONTROLNET_ROOT}/"))
    body = error_body(error, http.scope["state"]["request_id"], for_a1111=for_a1111)
    return json_response(body, error.http_status, headers)


def _type_of(status: int) -> str:
    return _TYPE_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
