"""What the services of all kinds of model share: finding the model, the trace context, and recording the outcome."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from opentelemetry.trace import get_current_span

from noria.errors import (
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    NoriaError,
    RequestCancelled,
    RequestError,
    short_repr,
)
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.version_choice import current_versions
from noria.observe.logs.request_log import current_log_record
from noria.observe.metrics import declarations, outcomes
from noria.observe.traces.tracer import fail, trace_headers
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import AnyRequest

DEFAULT_MODEL_ALIAS = "noria"  # names the default model, for clients that cannot leave `model` out

SpecT = TypeVar("SpecT", bound=ModelSpec)
RequestT = TypeVar("RequestT", bound=AnyRequest)


def resolve_model(engine_pool: EnginePool, spec_type: type[SpecT], name: str | None) -> SpecT:
    """Return the model of one kind named `name`; its default model for None or `DEFAULT_MODEL_ALIAS`.

    Of several versions of it that are deployed, it is the one that answers the current request.

    Raises:
        EngineUnavailable: no engine has been ready yet, so the models are unknown, or none with the default model.
        ModelNotFound: no such model, or none of this kind; names those that are served.
        InvalidField: the request asks for a version that is not served.

    """
    return engine_pool.versions.choose(_find_model(engine_pool, spec_type, name))


def _find_model(engine_pool: EnginePool, spec_type: type[SpecT], name: str | None) -> SpecT:
    """As `resolve_model`, but return the control."""
    if not engine_pool.serves(spec_type):
        served = ", ".join(f"{known!r} ({spec.kind})" for known, spec in engine_pool.models.items())
        raise ModelNotFound(f"this needs a model of kind {spec_type.kind}; this server has {served}.", field="model")
    models = engine_pool.models_of(spec_type)
    if not models or name is None or (name == DEFAULT_MODEL_ALIAS and name not in models):
        return engine_pool.default_model(spec_type)
    if name not in models:
        served = ", ".join(repr(known) for known in models)
        raise ModelNotFound(
            f"model {short_repr(name)} is not served here; allowed are {served} (or leave it out, or send "
            f"{DEFAULT_MODEL_ALIAS!r}).",
            field="model",
        )
    return models[name]


def with_trace_context(request: RequestT) -> RequestT:
    """Return `request` with the context of the current span, if there is one."""
    span = get_current_span()
    return msgspec.structs.replace(request, **trace_headers(span)) if span.get_span_context().is_valid else request


@dataclass
class RequestOutcome:
    """What is known of a request while it runs."""

    shape: str = ""  # requests of the same shape take equally long


@contextlib.contextmanager
def record_outcome(
    engine_pool: EnginePool, model: str, *, has_deadline: bool, is_job: bool = False, shape: str = ""
) -> Iterator[RequestOutcome]:
    """Record the outcome of the request that runs in this context, in metrics, log and span, and for its canary.

    An attempt of a job is not counted as a request, since it may be retried; `jobs/completion.py` counts the job when
    it ends. `shape` may be set later, too.
    """
    outcome, is_client_error, is_of_version = InternalError.code, False, True
    started, log_record = time.perf_counter(), current_log_record()
    request = RequestOutcome(shape)
    log_record.add(**deployment_fields(model))
    try:
        with declarations.REQUESTS_IN_FLIGHT.track_inprogress():
            yield request
        outcome = outcomes.OK
    except NoriaError as error:
        outcome, is_client_error = error.code, isinstance(error, RequestError)
        # Rejections, and deadlines that clients choose, say nothing of the version.
        is_of_version = error.http_status >= 500 and not (has_deadline and outcome == DeadlineExceeded.code)
        log_record.add(error=error.message)
        if outcome == DeadlineExceeded.code and has_deadline:
            declarations.DEADLINES_MISSED.labels(model).inc()
        raise
    except asyncio.CancelledError:
        outcome, is_of_version = RequestCancelled.code, False
        raise
    finally:
        span = get_current_span()
        span.set_attribute("noria.outcome", outcome)
        if outcome != outcomes.OK and not is_client_error:  # needed for streams, whose status is 200
            fail(span, outcome)
        if not is_job:
            outcomes.count_request(model, outcome)
        if is_of_version:
            seconds = time.perf_counter() - started
            engine_pool.versions.record(model, ok=outcome == outcomes.OK, seconds=seconds, shape=request.shape)
        _count_deployment(model, outcome, time.perf_counter() - started)
        log_record.add(outcome=outcome)
        if outcome != outcomes.OK:  # else it is the response's
            log_record.add(total_s=time.perf_counter() - started)


def _count_deployment(model: str, outcome: str, seconds: float) -> None:
    """Count a request that a deployed version has answered."""
    versions = current_versions()
    choice = None if versions is None else versions.of(model)
    if choice is not None and choice.target is not None:
        declarations.DEPLOYMENT_REQUESTS.labels(model, choice.target.version, outcome).inc()
        if outcome == outcomes.OK:
            declarations.DEPLOYMENT_REQUEST_SECONDS.labels(model, choice.target.version).observe(seconds)


def deployment_fields(model: str) -> dict[str, object]:
    """Return the fields of the log that say which deployment of `model` answers the current request, if one does."""
    versions = current_versions()
    choice = None if versions is None else versions.of(model)
    if choice is None or choice.target is None:
        return {}
    return {"deployment": choice.target.deployment, "version": choice.target.version}
