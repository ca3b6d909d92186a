"""Every refusal and failure that a caller can see, each one fact with its HTTP status and whether to try again.

    NoriaError
    ├── RequestError                     the caller's mistake: nothing reached the engine
    │   ├── InvalidField                 400  a field's value; names the field
    │   ├── InvalidBody                  400  not JSON, or not the JSON asked for
    │   ├── Unauthorized                 401  no API key, or one that is not known here
    │   ├── UnsupportedMediaType         415
    │   ├── UnreadableImage              422  a file that was to tell its parameters, and does not
    │   ├── BodyTooLarge                 413
    │   ├── RouteNotFound                404
    │   ├── MethodNotAllowed             405
    │   ├── ModelNotFound                404
    │   ├── JobNotFound                  404
    │   └── IdempotencyConflict          422  the key was used for another body
    ├── ServingError                     ours, or the load's: the request itself was fine
    │   ├── QueueFull                    429  retry after a while
    │   ├── RateLimited                  429  the API key, or one client's share, allows no more now; retry after a while
    │   ├── DeadlineUnmeetable           429  refused at once, since it would be late; retry after a while, or allow more time
    │   ├── EngineUnavailable            503  no engine is ready; retry
    │   ├── EngineLost                   503  the engine ended with the request in flight, and none came back; retry
    │   ├── EngineCrashed                500  the request has crashed the engine twice; do not
    │   ├── JobsUnavailable              503  the database or the results folder does not answer; retry
    │   ├── JobExpired                   504  no engine could draw it within its time to live
    │   ├── DeadlineExceeded             504
    │   ├── GenerationFailed             500  the model failed on this request
    │   ├── InternalError                500  a bug of ours
    │   └── RequestCancelled             499  the client left; nobody reads this answer
    └── SetupError                       the operator's: the process prints it and exits non-zero
        ├── ConfigError                  a setting, a file of settings, an environment variable, a port
        ├── ModelError                   a model folder: missing, damaged, or of a kind that is not served
        ├── ImageFileError               an image file that cannot be read, or does not say how it was made
        ├── RunsError                    a folder of a bench's runs: missing, empty, or with a file that is no run
        └── LiveError                    a server that was to show its wheel: nobody answers, it is none of ours, or it does not want to

A message gives the value got, the values allowed and what to do. `frontend/app.py` alone turns these into responses.
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar

_MAX_REPR_CHARS = 80
_MAX_MISSPELT_CHARS = 200  # characters: what is longer is no slip of the pen, and comparing it takes time and memory


def short_repr(value: object) -> str:
    """`value` as a message quotes it: its repr, cut to a length that a log line bears."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR_CHARS else text[: _MAX_REPR_CHARS - 1] + "…"


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A sentence naming the nearest of `known`, or an empty string when none is near."""
    if len(got) > _MAX_MISSPELT_CHARS:
        return ""
    matches = difflib.get_close_matches(got, list(known), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


class NoriaError(Exception):
    """Root of the tree. `code` is stable and documented in docs/errors.md; the message may change."""

    code: ClassVar[str]
    http_status: ClassVar[int] = 500
    retryable: bool = False  # whether the same may succeed later

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class RequestError(NoriaError):
    """The caller's mistake."""

    http_status = 400


class InvalidField(RequestError):
    """A field has a value that is not allowed; `field` names it."""

    code = "invalid_field"


class InvalidBody(RequestError):
    """The body is not JSON, or not an object of the documented shape."""

    code = "invalid_body"


class Unauthorized(RequestError):
    """The route needs an API key, and none came, or one that is not known here."""

    code = "unauthorized"
    http_status = 401


class UnsupportedMediaType(RequestError):
    """The Content-Type is not application/json."""

    code = "unsupported_media_type"
    http_status = 415


class UnreadableImage(RequestError):
    """The body is no PNG, WebP or JPEG, is damaged, or does not say how it was made."""

    code = "unreadable_image"
    http_status = 422


class BodyTooLarge(RequestError):
    """The body is longer than the server reads."""

    code = "body_too_large"
    http_status = 413


class RouteNotFound(RequestError):
    """No such path."""

    code = "not_found"
    http_status = 404


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    http_status = 405


class ModelNotFound(RequestError):
    """The named model is not served here."""

    code = "model_not_found"
    http_status = 404


class JobNotFound(RequestError):
    """There is no such job, or no such image of it: never was, or its time to live is over."""

    code = "job_not_found"
    http_status = 404


class IdempotencyConflict(RequestError):
    """The Idempotency-Key was sent before with another body."""

    code = "idempotency_conflict"
    http_status = 422  # as draft-ietf-httpapi-idempotency-key-header has it


class ServingError(NoriaError):
    """The request was fine; serving it was not possible."""


class QueueFull(ServingError):
    """As many images wait as may wait."""

    code = "queue_full"
    http_status = 429
    retryable = True


class RateLimited(ServingError):
    """A limit is reached: the API key's, of images in flight or a minute; or of what clients may hold at once."""

    code = "rate_limited"
    http_status = 429
    retryable = True


class DeadlineUnmeetable(ServingError):
    """The images could not be done by the deadline asked for, or only by making late what was accepted before."""

    code = "deadline_unmeetable"
    http_status = 429
    retryable = True

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.retryable = retry_after_s is not None  # else it takes longer than that even alone


class EngineUnavailable(ServingError):
    """No engine is ready: still loading, or being restarted."""

    code = "engine_unavailable"
    http_status = 503
    retryable = True


class EngineLost(ServingError):
    """The engine ended with the request in flight, and none came back in time; or it was killed again and again."""

    code = "engine_lost"
    http_status = 503
    retryable = True


class EngineCrashed(ServingError):
    """The engine crashed twice while it drew the request, the second time with nothing else aboard."""

    code = "engine_crashed"


class DeadlineExceeded(ServingError):
    """The request's time was over before its images were done."""

    code = "deadline_exceeded"
    http_status = 504
    retryable = True


class JobsUnavailable(ServingError):
    """The jobs' database or results folder does not answer; other routes do not need it."""

    code = "jobs_unavailable"
    http_status = 503
    retryable = True


class JobExpired(ServingError):
    """No engine could draw the job within its time to live; a job's error, never a response."""

    code = "job_expired"
    http_status = 504
    retryable = True


class GenerationFailed(ServingError):
    """The model failed on this request; others in its batch were not touched."""

    code = "generation_failed"


class InternalError(ServingError):
    """A bug of ours; the message says nothing of our insides, the log says all."""

    code = "internal"


class RequestCancelled(ServingError):
    """The client went away (nginx's status 499 in logs and metrics)."""

    code = "cancelled"
    http_status = 499


class SetupError(NoriaError):
    """The operator's mistake: printed, and the process exits with `exit_status`."""

    exit_status: ClassVar[int] = 1


class ConfigError(SetupError):
    """A setting that does not exist or has a value that is not allowed."""

    code = "config"
    exit_status = 2


class ModelError(SetupError):
    """A model that cannot be served: the message names the file and what is wrong with it."""

    code = "model"
    exit_status = 3


class ImageFileError(SetupError):
    """An image file that was to tell its parameters: missing, damaged, no image, or silent."""

    code = "image_file"
    exit_status = 2


class RunsError(SetupError):
    """A folder that was to hold the runs of benches: missing, without any, or with a file that is none."""

    code = "runs"
    exit_status = 2


class LiveError(SetupError):
    """A server whose wheel was to be shown: nobody answers there, it is no Noria, or it does not show it."""

    code = "live"


def all_codes() -> dict[str, type[NoriaError]]:
    """Every leaf of the tree by its code."""
    leaves: dict[str, type[NoriaError]] = {}
    pending: list[type[NoriaError]] = [NoriaError]
    while pending:
        error_type = pending.pop()
        pending += error_type.__subclasses__()
        if "code" in vars(error_type):
            leaves[error_type.code] = error_type
    return leaves
