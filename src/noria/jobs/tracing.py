"""The traces of jobs: a job is part of the trace of the request that made it, however much later it is drawn.

Its life, its drawings and its webhooks are children of that request's span, and not traces of their own linked to it: one request makes
one job, so the trace stays a tree, and whoever has the id from the answer to the POST finds all of it. The context is kept in the job's
request, beside what else it takes to draw it.
"""

import msgspec
from msgspec import Struct

from noria.jobs.records import JobRecord
from noria.observe.traces.trace_context import TraceContext, parse
from noria.observe.traces.tracer import NO_SPAN, Span, Tracer


class _StoredTraceHeaders(Struct, frozen=True):
    traceparent: str = ""
    tracestate: str = ""


class _StoredRequest(Struct, frozen=True):
    request: _StoredTraceHeaders = _StoredTraceHeaders()


def stored_trace_context(request: str | bytes) -> TraceContext | None:
    """The trace of whoever asked for a job, from the JSON that is kept of its request; None if it is in none, or cannot be read.

    What another version of Noria has kept costs the job its trace, not every job that is claimed or told of with it.
    """
    try:
        stored = msgspec.json.decode(request, type=_StoredRequest).request
    except msgspec.DecodeError:
        return None
    return parse([stored.traceparent], [stored.tracestate])


def execution_span(tracer: Tracer, record: JobRecord) -> Span:
    """The span of one drawing of a job, begun now; a job whose drawing was lost has several."""
    return tracer.span("draw job", "consumer", stored_trace_context(record.request), _attributes(record))


def job_span(tracer: Tracer, record: JobRecord, outcome: str) -> Span:
    """The span of a job that has ended, from its acceptance, drawn or not; to be ended when it did.

    One that is in nobody's trace has none: it would be a trace of its own, beside that of each drawing.
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
        attributes["noria.key"] = record.made_by
    return attributes
