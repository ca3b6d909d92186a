"""The interfaces of tracing, and the tracer that records nothing, which is the default.

`setup.py` opens the tracer of a process: `NoTracer` without `traces_endpoint`, whose spans only propagate the client's
trace context; else that of `otlp.py`. `CURRENT_SPAN` is the span of the current work; like `CURRENT_REQUEST`, it
follows `await` and `asyncio.create_task`, not threads.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal, Protocol

from noria.observe.request_scope import CURRENT_REQUEST, RequestContext
from noria.observe.traces.trace_context import TraceContext

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]
SpanKind = Literal["server", "client", "consumer", "internal"]


class Span(Protocol):
    """A span, which begins when it is made and ends with `end`."""

    @property
    def context(self) -> TraceContext | None:
        """The context for child spans; None if there is no trace."""

    @property
    def is_recording(self) -> bool:
        """Whether the span is recorded; if not, callers may skip building attributes."""

    def rename(self, name: str) -> None:
        """Rename the span, once more is known."""

    def set_attributes(self, attributes: Attributes) -> None:
        """Set attributes."""

    def fail(self, code: str) -> None:
        """Mark the span as failed; `code` is one of `noria.errors`, or an HTTP status."""

    def end(self, at: float | None = None) -> None:
        """End the span at `at`, Unix time in seconds; None is now."""


class Tracer(Protocol):
    """Makes spans and exports them."""

    def span(
        self,
        name: str,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
        at: float | None = None,
    ) -> Span:
        """Start a span at `at`, Unix time in seconds; None is now. Without a `parent` it begins a trace."""

    def close(self) -> None:
        """Export the spans that have ended, for at most two seconds; spans that end later are lost."""


class NoSpan:
    """A span that is not recorded; it propagates the client's context, if there is one."""

    is_recording = False

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context

    def rename(self, name: str) -> None:
        """Do nothing."""

    def set_attributes(self, attributes: Attributes) -> None:
        """Do nothing."""

    def fail(self, code: str) -> None:
        """Do nothing."""

    def end(self, at: float | None = None) -> None:
        """Do nothing."""


class NoTracer:
    """A tracer that records nothing."""

    def span(
        self,
        name: str,  # noqa: ARG002
        kind: SpanKind,  # noqa: ARG002
        parent: TraceContext | None,
        attributes: Attributes | None = None,  # noqa: ARG002
        at: float | None = None,  # noqa: ARG002
    ) -> NoSpan:
        """Return a span that propagates `parent`."""
        return NoSpan(parent) if parent is not None else NO_SPAN

    def close(self) -> None:
        """Do nothing."""


NO_SPAN, NO_TRACER = NoSpan(), NoTracer()

CURRENT_SPAN: ContextVar[Span] = ContextVar("noria_span", default=NO_SPAN)


class RequestScope:
    """A context in which this request and `span` are the current ones for logging and tracing."""

    def __init__(self, request_id: str, span: Span) -> None:
        context = span.context
        self._request = (
            RequestContext(request_id, context.trace_id, context.span_id) if context else RequestContext(request_id)
        )
        self._span = span

    def __enter__(self) -> None:
        self._tokens = CURRENT_REQUEST.set(self._request), CURRENT_SPAN.set(self._span)

    def __exit__(self, *_: object) -> None:
        request_token, span_token = self._tokens
        CURRENT_SPAN.reset(span_token)
        CURRENT_REQUEST.reset(request_token)


def record_span(
    tracer: Tracer,
    name: str,
    parent: Span,
    start_s: float,
    end_s: float,
    attributes: Attributes | None = None,
    error_code: str | None = None,
) -> None:
    """Record a span that is already over, if `parent` is recorded. Times are Unix time, in seconds."""
    if parent.is_recording:
        span = tracer.span(name, "internal", parent.context, attributes, start_s)
        if error_code is not None:
            span.fail(error_code)
        span.end(end_s)
