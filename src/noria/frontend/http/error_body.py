"""What a caller is told when a request is refused or fails: one shape on every route, in answers and in streams of events.

{"error": {"code": …, "message": …, "type": …, "param": …, "retryable": …, "request_id": …}}

A1111's routes have the message once more, as `detail`, which is where its clients look.
"""

from msgspec import UNSET, Struct, UnsetType

from noria.errors import NoriaError

# The word that OpenAI's API has for a status, which its clients show.
_TYPE_BY_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled_error"}


class ErrorDetail(Struct, frozen=True):
    """What went wrong, whose turn it is, and where to look."""

    code: str
    message: str
    type: str
    param: str | None  # the field at fault
    retryable: bool
    request_id: str


class ErrorBody(Struct, frozen=True):
    """Every refusal and failure, on every route."""

    error: ErrorDetail
    detail: str | UnsetType = UNSET


def error_body(error: NoriaError, request_id: str, *, for_a1111: bool = False) -> ErrorBody:
    """`error` as its caller reads it."""
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


def _type_of(status: int) -> str:
    return _TYPE_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
