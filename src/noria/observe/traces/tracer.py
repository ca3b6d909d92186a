"""Traces: what was done for a request, when, where, and as part of what; by default none are made.

A `Tracer` makes spans; `collector.py` opens it. Without `traces_endpoint` that is `NoTracer`, whose spans only hand the caller's own context
on; with it, that of `otlp.py`. `ACTIVE` is the span on whose behalf something is done; like
`context.CURRENT`, it follows `await` and `asyncio.create_task`, not threads.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Literal, Protocol

from noria.observe.request_scope import CURRENT_REQUEST, RequestContext
from noria.observe.traces.trace_context import TraceContext

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]
SpanKind = Literal["server", "client", "consumer", "internal"]


class Span(Protocol):
    """Something that is done, from its making to its `end`."""

    @property
    def context(self) -> TraceContext | None:
        """Whose children's parent it is; None: they are in no trace."""

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see it; what is told to others is lost, so need not be made."""

    def rename(self, name: str) -> None:
        """Call it something else, once more is known."""

    def set_attributes(self, attributes: Attributes) -> None:
        """Add to what is known of it."""

    def fail(self, code: str) -> None:
        """It did not do what it was for; `code` is one of `noria.errors`, or an HTTP status."""

    def end(self, at: float | None = None) -> None:
        """It is over, since `at`, Unix time in seconds; None is now."""


class Tracer(Protocol):
    """Who makes spans and brings them away."""

    def span(
        self,
        name: str,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
        at: float | None = None,
    ) -> Span:
        """A span that has begun `at`, Unix time in seconds; None is now. Without a `parent` it begins a trace."""

    def close(self) -> None:
        """Bring away what there is, for a second or two at most; spans that end later are lost."""


class NoSpan:
    """Nothing, on behalf of the caller's own span if it has one."""

    is_recording = False

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context

    def rename(self, name: str) -> None:
        """Nobody sees it."""

    def set_attributes(self, attributes: Attributes) -> None:
        """Nobody sees it."""

    def fail(self, code: str) -> None:
        """Nobody sees it."""

    def end(self, at: float | None = None) -> None:
        """Nobody sees it."""


class NoTracer:
    """Makes nothing."""

    def span(
        self,
        name: str,  # noqa: ARG002 - as all these
        kind: SpanKind,  # noqa: ARG002
        parent: TraceContext | None,
        attributes: Attributes | None = None,  # noqa: ARG002
        at: float | None = None,  # noqa: ARG002
    ) -> NoSpan:
        """What hands `parent` on."""
        return NoSpan(parent) if parent is not None else NO_SPAN

    def close(self) -> None:
        """There is nothing to bring away."""


NO_SPAN, NO_TRACER = NoSpan(), NoTracer()

CURRENT_SPAN: ContextVar[Span] = ContextVar("noria_span", default=NO_SPAN)


@contextlib.contextmanager
def request_scope(request_id: str, span: Span) -> Iterator[None]:
    """What is done inside is done for this request, as part of `span`; the log and the traces say so."""
    context = span.context
    request_context = (
        RequestContext(request_id, context.trace_id, context.span_id) if context else RequestContext(request_id)
    )
    request_token, span_token = CURRENT_REQUEST.set(request_context), CURRENT_SPAN.set(span)
    try:
        yield
    finally:
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
    """Make a span of what is over, if it was part of one that is recorded. Times are Unix time, in seconds."""
    if parent.is_recording:
        span = tracer.span(name, "internal", parent.context, attributes, start_s)
        if error_code is not None:
            span.fail(error_code)
        span.end(end_s)
