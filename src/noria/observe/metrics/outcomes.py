"""What becomes of requests for images, counted: each once, whichever route it came by, when it has been answered for good.

The labels stay few, whatever callers send: a model is one that a ready engine has told of, or `OTHER`; what can become of a request is in
two tables. All of it counts from 0 on, from the moment that the model is heard of: Prometheus sees no increase in a series that begins
with 300, so the first burst of failures would be seen by no alert.
"""

from collections.abc import Iterable

from noria.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    EngineCrashed,
    EngineLost,
    EngineUnavailable,
    GenerationFailed,
    IdempotencyConflict,
    InternalError,
    InvalidField,
    JobExpired,
    JobsUnavailable,
    ModelNotFound,
    QueueFull,
    RateLimited,
    RequestCancelled,
)
from noria.observe.metrics import declarations

OK = "ok"
OTHER = "other"
"""The model of a request that names none that is served, or that came before any was known."""

REJECTION_REASONS = tuple(
    kind.code
    for kind in (
        QueueFull,
        RateLimited,
        DeadlineUnmeetable,
        EngineUnavailable,
        JobsUnavailable,
        InvalidField,
        IdempotencyConflict,
        ModelNotFound,
    )
)
"""Why a request is refused: nothing was drawn of it."""

_FAILURES = tuple(
    kind.code
    for kind in (
        DeadlineExceeded,
        EngineLost,
        EngineCrashed,
        GenerationFailed,
        InternalError,
        RequestCancelled,
        JobExpired,
    )
)
_WITHOUT_MODEL = (EngineUnavailable.code, ModelNotFound.code)

_known_models: set[str] = set()


def init_model_series(names: Iterable[str]) -> None:
    """Count, from now on, under the names of these models; from 0."""
    for name in names:
        if name in _known_models:
            continue
        for outcome in (OK, *REJECTION_REASONS, *_FAILURES):
            if outcome != ModelNotFound.code:
                _init_series(name, outcome)
        declarations.IMAGES.labels(name)
        declarations.DEADLINES_MISSED.labels(name)
        _known_models.add(name)


def init_unknown_model_series() -> None:
    """Count, from 0, what is refused before it is known for which model it is."""
    for code in _WITHOUT_MODEL:
        _init_series(OTHER, code)


def count_request(model: str | None, outcome: str) -> None:
    """One request for `model` has been answered: `ok`, or with a code of `noria.errors`. Where that is a refusal, it counts as one, too."""
    label = model if model in _known_models else OTHER
    declarations.REQUESTS.labels(label, outcome).inc()
    if outcome in REJECTION_REASONS:
        declarations.REJECTED.labels(label, outcome).inc()


def _init_series(model: str, outcome: str) -> None:
    declarations.REQUESTS.labels(model, outcome)
    if outcome in REJECTION_REASONS:
        declarations.REJECTED.labels(model, outcome)
