"""Spans of jobs: a job is part of the trace of the request that created it, however much later it runs.

The spans of a job, its attempts and its webhooks are children of that request's span, not linked traces of their own:
one request creates one job, so the trace stays a tree, and the trace id in the answer to the POST finds all of it. The
trace context is stored with the job's request.
"""

import msgspec
from msgspec import Struct

from noria.jobs.records import JobRecord
from noria.observe.traces.trace_context import TraceContext, parse
from noria.observe.traces.tracer import NO_SPAN, Span, Tracer


class _StoredTraceHeaders(Struct, frozen=True):
    """The part of a stored request that traces need."""

    traceparent: str = ""
    tracestate: str = ""


class _StoredRequest(Struct, frozen=True):
    request: _StoredTraceHeaders = _StoredTraceHeaders()


def stored_trace_context(request: str | bytes) -> TraceContext | None:
    """The trace context in the stored JSON of a job's request; None if there is none, or if the JSON cannot be read.

    An unreadable request, stored by another version of Noria, must not fail the jobs that are claimed together with it.
    """
    try:
        stored = msgspec.json.decode(request, type=_StoredRequest).request
    except msgspec.DecodeError:
        return None
    return parse([stored.traceparent], [stored.tracestate])


def execution_span(tracer: Tracer, record: JobRecord) -> Span:
    """The span of one attempt to execute a job, started now.

    OpenTelemetry's messaging conventions call this operation `process`.
    """
    return tracer.span("process job", "consumer", stored_trace_context(record.request), _attributes(record))


def job_span(tracer: Tracer, record: JobRecord, outcome: str) -> Span:
    """The span of an ended job, started at its acceptance; the caller ends it at the job's end.

    A job without a stored trace context has none: it would be a trace of its own, beside that of each attempt.
    """
    trace = stored_trace_context(record.request)
    if trace is None:
        return NO_SPAN
    span = tracer.span("job", "internal", trace, _attributes(record) | {"noria.outcome": outcome}, record.created_at)
    if outcome != "ok":
        span.fail(outcome)
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
