"""Spans by OpenTelemetry's API, and how their trace context enters and leaves: https://www.w3.org/TR/trace-context/.

`setup.py` opens the tracer of a process. The current span is OpenTelemetry's; like `CURRENT_REQUEST`, it follows
`await` and `asyncio.create_task`, not threads.
"""

from collections.abc import Sequence

from opentelemetry import context
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, get_tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from noria import __version__
from noria.observe.request_scope import CURRENT_REQUEST

GLOBAL_TRACER = get_tracer("noria", __version__)
"""The tracer of the process's global TracerProvider. Without one, its spans only propagate the client's context."""

_PROPAGATOR = TraceContextTextMapPropagator()


def parse(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> Context:
    """Return the context in the header lines of a request; an empty one without exactly one valid traceparent."""
    if len(traceparents) != 1:
        return Context()
    return _PROPAGATOR.extract({"traceparent": traceparents, "tracestate": tracestates})


def trace_headers(span: Span) -> dict[str, str]:
    """Return `traceparent` and `tracestate` of outgoing requests that belong to `span`; none if it is in no trace."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, set_span_in_context(span, Context()))
    return headers


def fail(span: Span, code: str) -> None:
    """Set the error status and the attribute `error.type`; `code` is one of `noria.errors`, or an HTTP status."""
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR, code)


def nanoseconds(at: float) -> int:
    """Return `at`, Unix time in seconds, as spans want it."""
    return int(at * 1e9)


class RequestScope:
    """Makes this request and `span` the current ones for logs and traces. A class: a generator takes 1 µs more."""

    def __init__(self, request_id: str, span: Span) -> None:
        self._request_id, self._context = request_id, set_span_in_context(span)

    def __enter__(self) -> None:
        self._tokens = CURRENT_REQUEST.set(self._request_id), context.attach(self._context)

    def __exit__(self, *_: object) -> None:
        request_token, span_token = self._tokens
        context.detach(span_token)
        CURRENT_REQUEST.reset(request_token)
