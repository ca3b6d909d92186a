"""All errors that callers see: one class for each cause, with its HTTP status and whether a retry can succeed.

    NoriaError
    ├── RequestError                     the caller's mistake: nothing reached the engine, or no result left it
    │   ├── InvalidField                 400  a field has a value that is not allowed; names the field
    │   │                                     (EmptyInput, UntokenizableText, WrongTask: some protocols tell them apart)
    │   │   ├── LoraNotFound             404
    │   │   ├── ControlNetNotFound       404
    │   │   ├── IpAdapterNotFound        404
    │   │   └── RefinerNotFound          404
    │   ├── InvalidBody                  400  not JSON, or not of the documented shape
    │   ├── Unauthorized                 401  no API key, or an unknown one
    │   ├── MissingScope                 403  the API key may not do this
    │   ├── ForeignRun                   403  a lineage event of a run that belongs to another sender
    │   ├── CrossOriginRequest           403  a web page of another origin would change something
    │   ├── UnsupportedMediaType         415
    │   ├── UnreadableImage              422  an uploaded image file without readable generation metadata
    │   ├── BodyTooLarge                 413
    │   ├── RouteNotFound                404
    │   ├── MethodNotAllowed             405
    │   ├── ModelNotFound                404
    │   ├── JobNotFound                  404
    │   ├── HostNotAllowed               421  the Host header has a name that is not this server's
    │   ├── OperationNotSupported        501  the protocol has the operation, this server does not
    │   ├── ImageRefused                 400  a safety classifier refuses all images that were made for the request
    │   ├── IdempotencyConflict          422  the key was used for another body
    │   ├── RegistryConflict             409  the registry lacks what is named, or cannot be changed as asked
    │   └── SourceRejected               422  the source of a model cannot or may not be read, or is no model
    ├── ServingError                     the server's state or load: the request itself was valid
    │   ├── QueueFull                    429  retry later
    │   ├── RateLimited                  429  a limit of the API key, or of one client's share, is reached; retry later
    │   ├── DeadlineUnmeetable           429  the deadline cannot be met; retry later, or allow more time
    │   ├── EngineUnavailable            503  no engine is ready; retry
    │   ├── ModelNotLoaded               503  a checkpoint cannot be opened or loaded; the next request tries again
    │   ├── EngineLost                   503  the engine exited with the request in flight, and none came back; retry
    │   ├── EngineCrashed                500  the request crashed the engine twice; do not retry
    │   ├── JobsUnavailable              503  the database or the results folder does not answer; retry
    │   ├── RegistryUnavailable          503  the registry's database does not answer, or a source is not read; retry
    │   ├── JobExpired                   504  no engine could run the job within its time to live
    │   ├── DeadlineExceeded             504
    │   ├── GenerationFailed             500  the model failed on this request
    │   ├── UserCodeFailed               500  the operator's code for this endpoint failed on this request
    │   ├── UserCodeBusy                 503  too many calls of such code wait, or do not end; retry
    │   ├── InternalError                500  a bug in Noria
    │   └── RequestCancelled             499  the client disconnected; no response is sent
    └── SetupError                       the operator's mistake: the process prints it and exits non-zero
        ├── ConfigError                  a setting, a configuration file, an environment variable, an address
        │   └── UnavailableNow           a database, a port or the hub, which may be there at the next start
        ├── MissingExtra                 an optional package is not installed; names the extra that has it
        ├── ModelError                   a model folder: missing, damaged, or of an unsupported kind
        ├── RegistryError                the registry has no such model, version, run …, or cannot be changed as asked
        ├── ImageFileError               an image file that cannot be read, or has no generation metadata
        └── LiveError                    `noria top`: the server is unreachable, is not Noria, or rejects

A message states the value received, the values allowed and what to do. `frontend/http/errors.py` makes them responses.
"""

import os
import re
from typing import ClassVar

from noria.errors.value_text import did_you_mean as did_you_mean
from noria.errors.value_text import short_list as short_list
from noria.errors.value_text import short_repr as short_repr

_TWO_FULL_STOPS = re.compile(r"(?<=[\w)'\"])\.\.(?=$|;| [A-Z])")  # not of "../" and the like


class NoriaError(Exception):
    """Root of the tree. `code` is stable and documented in docs/errors.md; the message may change."""

    code: ClassVar[str]
    http_status: ClassVar[int] = 500
    retryable: bool = False  # whether the same request may succeed later

    def __init_subclass__(
        cls, *, code: str | None = None, http_status: int | None = None, retryable: bool | None = None
    ) -> None:
        """Set the attributes that a subclass names beside its base; it inherits the others."""
        for name, value in (("code", code), ("http_status", http_status), ("retryable", retryable)):
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        """`message` may quote other sentences: two full stops in a row become one."""
        message = _TWO_FULL_STOPS.sub(".", message)
        super().__init__(message)
        self.message, self.field, self.retry_after_s = message, field, retry_after_s


class RequestError(NoriaError, http_status=400):
    """The caller's mistake."""


class InvalidField(RequestError, code="invalid_field"):
    """A field has a value that is not allowed; `field` names it.

    `parts` are the errors of each of several such fields, whose messages are this error's (`problems.py`).
    `is_of_form`: every model would reject it, such as a field that no request has.
    """

    parts: "tuple[InvalidField, ...]" = ()
    is_of_form = False


class EmptyInput(InvalidField):
    """There is no text, or an empty one."""


class UntokenizableText(InvalidField):
    """The tokenizer rejects a text, or makes no token of it."""


class WrongTask(InvalidField):
    """The model is of another task than the route needs."""


class LoraNotFound(InvalidField, code="lora_not_found", http_status=404):
    """The model has no LoRA adapter of this name."""


class ControlNetNotFound(InvalidField, code="controlnet_not_found", http_status=404):
    """The model has no ControlNet of this name."""


class IpAdapterNotFound(InvalidField, code="ip_adapter_not_found", http_status=404):
    """The model has no IP-Adapter of this name."""


class RefinerNotFound(InvalidField, code="refiner_not_found", http_status=404):
    """The model has no refiner, or none of this name or digest."""


class InvalidBody(RequestError, code="invalid_body"):
    """The body is not JSON, or not an object of the documented shape."""


class Unauthorized(RequestError, code="unauthorized", http_status=401):
    """The route needs an API key, and the request has none, or an unknown one."""


class MissingScope(RequestError, code="missing_scope", http_status=403):
    """The API key is known, but has not the scope that the route needs."""


class ForeignRun(RequestError, code="foreign_run", http_status=403):
    """The run of a lineage event belongs to another sender."""


class CrossOriginRequest(RequestError, code="cross_origin", http_status=403):
    """A browser sent the request for a web page of another origin, and it may change something."""


class UnsupportedMediaType(RequestError, code="unsupported_media_type", http_status=415):
    """The Content-Type or the Content-Encoding of the body is none that the route takes."""


class UnreadableImage(RequestError, code="unreadable_image", http_status=422):
    """An image is no PNG, WebP or JPEG, is damaged, animated or too large, or has no settings where they are read."""


class BodyTooLarge(RequestError, code="body_too_large", http_status=413):
    """The body is longer than `frontend.max_body_bytes`, or its images are than `frontend.max_image_bytes`."""


class RouteNotFound(RequestError, code="not_found", http_status=404):
    """No such path."""


class MethodNotAllowed(RequestError, code="method_not_allowed", http_status=405):
    """The path exists, the method does not."""


class ModelNotFound(RequestError, code="model_not_found", http_status=404):
    """The named model is not served here."""


class JobNotFound(RequestError, code="job_not_found", http_status=404):
    """The job, or the image or result of it, never existed or was deleted after its time to live."""


class HostNotAllowed(RequestError, code="host_not_allowed", http_status=421):
    """The request's Host is no name of this server."""


class OperationNotSupported(RequestError, code="not_supported", http_status=501):
    """The protocol has this operation, this server does not."""


class ImageRefused(RequestError, code="content_policy_violation", http_status=400):
    """The safety classifier of the model refuses all images that were made; the code is that of OpenAI's API."""


class IdempotencyConflict(RequestError, code="idempotency_conflict", http_status=422):
    """The Idempotency-Key was sent before with another body (draft-ietf-httpapi-idempotency-key-header)."""


class RegistryConflict(RequestError, code="registry_conflict", http_status=409):
    """The registry does not have what is named, or cannot be changed as asked."""


class SourceRejected(RequestError, code="source_rejected", http_status=422):
    """The source of a model cannot be read, may not be read over HTTP, or is no model that is supported."""


class ServingError(NoriaError):
    """The request was valid, but could not be served."""


class QueueFull(ServingError, code="queue_full", http_status=429, retryable=True):
    """The queue is at its limit, in images, in seconds of work, or in bytes of what its requests hold."""


class RateLimited(ServingError, code="rate_limited", http_status=429, retryable=True):
    """A limit is reached: of the API key (images in flight or per minute), or of what one client may hold at once."""


class DeadlineUnmeetable(ServingError, code="deadline_unmeetable", http_status=429, retryable=True):
    """The images cannot be finished by the requested deadline, or only by delaying accepted requests beyond theirs."""

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.retryable = retry_after_s is not None  # else the deadline is too short even for an idle server


class EngineUnavailable(ServingError, code="engine_unavailable", http_status=503, retryable=True):
    """No engine is ready: still loading, or being restarted."""


class ModelNotLoaded(ServingError, code="model_not_loaded", http_status=503, retryable=True):
    """A checkpoint of `engine.checkpoints` could not be opened or loaded; the next request for it tries again."""


class EngineLost(ServingError, code="engine_lost", http_status=503, retryable=True):
    """The engine exited with the request in flight and was not restarted in time, or was killed too many times."""


class EngineCrashed(ServingError, code="engine_crashed"):
    """The engine crashed twice with the request in flight, the second time with no other request in flight."""


class DeadlineExceeded(ServingError, code="deadline_exceeded", http_status=504, retryable=True):
    """The request's deadline or timeout passed before its images were finished."""


class JobsUnavailable(ServingError, code="jobs_unavailable", http_status=503, retryable=True):
    """The database or the results folder of jobs does not answer; other routes do not need them."""


class RegistryUnavailable(ServingError, code="registry_unavailable", http_status=503, retryable=True):
    """The registry's database does not answer, or a source was not read; only the registry's routes need them."""


class JobExpired(ServingError, code="job_expired", http_status=504, retryable=True):
    """No engine could run the job within its time to live; appears in job records, never as a response."""


class GenerationFailed(ServingError, code="generation_failed"):
    """The model failed on this request; other requests in its batch were not affected."""


class UserCodeFailed(ServingError, code="user_code_failed"):
    """The operator's code for the endpoint failed on this request; the log has the traceback."""


class UserCodeBusy(ServingError, code="user_code_busy", http_status=503, retryable=True):
    """All threads for the operators' code are in calls that are late, or too many calls wait."""


class InternalError(ServingError, code="internal"):
    """A bug in Noria; the message reveals no internals, the log has the details."""


class RequestCancelled(ServingError, code="cancelled", http_status=499):
    """The client disconnected (nginx's status 499 in logs and metrics)."""


class SetupError(NoriaError):
    """The operator's mistake: the process prints the message and exits with `exit_status`."""

    exit_status: ClassVar[int] = 2


class ConfigError(SetupError, code="config"):
    """A setting is unknown or has a value that is not allowed."""


class UnavailableNow(ConfigError, code="unavailable_now"):
    """The thing that a setting names is not there now; a service manager starts the server again until it is."""

    exit_status = os.EX_TEMPFAIL


class MissingExtra(SetupError, code="missing_extra"):
    """An optional package is not installed; the message names the extra of noria-serve that has it."""


class ModelError(SetupError, code="model"):
    """A model cannot be served; the message names the file and what is wrong with it."""

    exit_status = 3


class RegistryError(SetupError, code="registry"):
    """The registry does not have what is named, or cannot be changed as asked."""


class ImageFileError(SetupError, code="image_file"):
    """An image file is missing, damaged, no image, or has no generation metadata."""


class LiveError(SetupError, code="live"):
    """The live view of a server is unavailable: nothing answers there, it is not Noria, or it rejects the request."""

    exit_status = 1


def all_codes() -> dict[str, type[NoriaError]]:
    """All error classes by code."""
    leaves: dict[str, type[NoriaError]] = {}
    pending: list[type[NoriaError]] = [NoriaError]
    while pending:
        error_type = pending.pop()
        pending += error_type.__subclasses__()
        if "code" in vars(error_type):
            leaves[error_type.code] = error_type
    return leaves
