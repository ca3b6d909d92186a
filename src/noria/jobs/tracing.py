"""The traces of jobs: a job is part of the trace of the request that made it, however much later it is drawn.

Its drawings and its webhooks are children of that request's span, and not traces of their own linked to it: one request makes one
job, so the trace stays a tree, and whoever has the id from the answer to the POST finds all of it. The context is kept in the job's
request, beside what else it takes to draw it.
"""

import msgspec
from msgspec import Struct

from noria.jobs.records import JobRecord
from noria.observe.trace_context import TraceContext, parse
from noria.observe.traces import Span, Tracer


class _Request(Struct, frozen=True):
    traceparent: str = ""
    tracestate: str = ""


class _Kept(Struct, frozen=True):
    request: _Request = _Request()


def trace_of(request: str | bytes) -> TraceContext | None:
    """The trace of whoever asked for a job, from the JSON that is kept of its request."""
    kept = msgspec.json.decode(request, type=_Kept).request
    return parse([kept.traceparent], [kept.tracestate])


def drawing_span(tracer: Tracer, record: JobRecord) -> Span:
    """The span of one drawing of a job, begun now; a job whose drawing was lost has several."""
    attributes: dict[str, str | int] = {
        "noria.request_id": record.id,
        "noria.job.attempt": record.attempt,
        "gen_ai.request.model": record.model,
    }
    if record.made_by:
        attributes["noria.key"] = record.made_by
    return tracer.span("draw job", "consumer", trace_of(record.request), attributes)
