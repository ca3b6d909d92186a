"""Counts the outcomes of image requests: each request once, by any route, when it has been answered finally.

The labels are bounded: a model is one that a ready engine has announced, or `OTHER`; the outcomes are in two tables.
All series of a model start at 0 when the model becomes known: Prometheus sees no increase in a series that starts at
300, so no alert would notice a first burst of failures.
"""

import functools
from collections.abc import Iterable

from prometheus_client import Counter

from noria.errors import (
    ControlNetNotFound,
    DeadlineExceeded,
    DeadlineUnmeetable,
    EngineCrashed,
    EngineLost,
    EngineUnavailable,
    GenerationFailed,
    IdempotencyConflict,
    ImageRefused,
    InternalError,
    InvalidField,
    IpAdapterNotFound,
    JobExpired,
    JobsUnavailable,
    LoraNotFound,
    ModelNotFound,
    ModelNotLoaded,
    QueueFull,
    RateLimited,
    RefinerNotFound,
    RequestCancelled,
)
from noria.observe.metrics import declarations
from noria.observe.metrics.section import add_all

OK = "ok"
OTHER = "other"
"""The model label of a request that names no served model, or that came before any model was known."""

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
        LoraNotFound,
        ControlNetNotFound,
        IpAdapterNotFound,
        RefinerNotFound,
        ModelNotFound,
    )
)
"""The codes of requests that are rejected before any generation."""

_FAILURES = tuple(
    kind.code
    for kind in (
        DeadlineExceeded,
        EngineLost,
        EngineCrashed,
        GenerationFailed,
        ImageRefused,
        InternalError,
        ModelNotLoaded,
        RequestCancelled,
        JobExpired,
    )
)
_WITHOUT_MODEL = (EngineUnavailable.code, ModelNotFound.code)

_known_models: set[str] = set()


def init_model_series(names: Iterable[str]) -> None:
    """Start the series of these models at 0; requests are counted under their names from now on."""
    for name in names:
        if name in _known_models:
            continue
        for outcome in (OK, *REJECTION_REASONS, *_FAILURES):
            if outcome != ModelNotFound.code:
                _init_series(name, outcome)
        declarations.IMAGES.labels(name)
        declarations.IMAGES_REFUSED.labels(name)
        declarations.TEXTS.labels(name)
        declarations.DEADLINES_MISSED.labels(name)
        _known_models.add(name)


def init_unknown_model_series() -> None:
    """Start the series of requests without a known model at 0."""
    for code in _WITHOUT_MODEL:
        _init_series(OTHER, code)


def count_request(model: str | None, outcome: str) -> None:
    """Count a request for `model` that was answered with `outcome`: `ok` or a code of `noria.errors`."""
    add_all(*[(counter, 1) for counter in _init_series(model if model in _known_models else OTHER, outcome)])


@functools.cache
def _init_series(model: str, outcome: str) -> list[Counter]:
    """Return the counters of an outcome, at 0 at first."""
    counters = [declarations.REQUESTS.labels(model, outcome)]
    if outcome in REJECTION_REASONS:
        counters.append(declarations.REJECTED.labels(model, outcome))
    return counters
