"""Spans by OpenTelemetry's API, and how their trace context enters and leaves: https://www.w3.org/TR/trace-context/.

`setup.py` opens the tracer of a process, and `observe/request_scope.py` has the current span.
"""

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import ProxyTracer, Span, StatusCode, Tracer, get_tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from noria import __version__

GLOBAL_TRACER = get_tracer("noria", __version__)
"""The tracer of the process's global TracerProvider. Without one, its spans only propagate the client's context."""

_PROPAGATOR = TraceContextTextMapPropagator()


def may_record(tracer: Tracer) -> bool:
    """Return whether spans of `tracer` may be recorded: not without a TracerProvider, which may be set at any time.

    `get_tracer_provider` would ask the environment each time, which takes a thirtieth of a short request.
    """
    return not isinstance(tracer, ProxyTracer) or getattr(trace, "_TRACER_PROVIDER", True) is not None


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
