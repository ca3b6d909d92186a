"""Spans of jobs: a job is part of the trace of the request that created it, however much later it runs.

The spans of a job, its attempts and its webhooks are children of that request's span, not linked traces of their own:
one request creates one job, so the trace stays a tree, and the trace id in the response to the POST finds all of it.
The trace context is stored with the job's request.
"""

import msgspec
from msgspec import Struct
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer, get_current_span

from noria.jobs.records import JobRecord
from noria.observe.traces.tracer import fail, nanoseconds, parse


class _StoredTraceHeaders(Struct, frozen=True):
    """The part of a stored request that traces need."""

    traceparent: str = ""
    tracestate: str = ""


class _StoredRequest(Struct, frozen=True):
    request: _StoredTraceHeaders = _StoredTraceHeaders()


def stored_trace_context(request: str | bytes) -> Context:
    """The trace context in the stored JSON of a job's request; empty if there is none, or if the JSON cannot be read.

    An unreadable request, stored by another version of Noria, must not fail the jobs that are claimed together with it.
    """
    try:
        stored = msgspec.json.decode(request, type=_StoredRequest).request
    except msgspec.DecodeError:
        return Context()
    return parse([stored.traceparent], [stored.tracestate])


def execution_span(tracer: Tracer, record: JobRecord) -> Span:
    """The span of one attempt to execute a job, started now.

    OpenTelemetry's messaging conventions call this operation `process`.
    """
    parent = stored_trace_context(record.request)
    return tracer.start_span("process job", parent, SpanKind.CONSUMER, _attributes(record))


def job_span(tracer: Tracer, record: JobRecord, outcome: str) -> Span:
    """The span of an ended job, started at its acceptance; the caller ends it at the job's end.

    A job without a stored trace context has none: it would be a trace of its own, beside that of each attempt.
    """
    parent = stored_trace_context(record.request)
    if not get_current_span(parent).get_span_context().is_valid:
        return INVALID_SPAN
    attributes = _attributes(record) | {"noria.outcome": outcome}
    span = tracer.start_span("job", parent, attributes=attributes, start_time=nanoseconds(record.created_at))
    if outcome != "ok":
        fail(span, outcome)
    return span


def _attributes(record: JobRecord) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "noria.request_id": record.id,
        "noria.job.attempt": record.attempt,
        "gen_ai.request.model": record.model,
    }
    if record.made_by:
        attributes["noria.api_key.name"] = record.made_by
    return attributes
