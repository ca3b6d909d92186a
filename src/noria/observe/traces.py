"""Traces: what was done for a request, when, where, and as part of what; by default none are made.

A `Tracer` makes spans. Without `traces_endpoint` that is `NoTracer`, whose spans only hand the caller's own context on; with it,
`otlp.py`, the one module that imports OpenTelemetry, and only then. `ACTIVE` is the span on whose behalf something is done; like
`context.CURRENT`, it follows `await` and `asyncio.create_task`, not threads.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Literal, Protocol
from urllib.parse import urlsplit

from noria.errors import ConfigError, shown
from noria.observe.context import CURRENT, RequestContext
from noria.observe.trace_context import TraceContext

Value = str | int | float | bool
Attributes = Mapping[str, Value]
Kind = Literal["server", "client", "consumer", "internal"]

EXTRA = "noria-serve[traces]"


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

    def note(self, attributes: Attributes) -> None:
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
        kind: Kind,
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

    def note(self, attributes: Attributes) -> None:
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
        kind: Kind,  # noqa: ARG002
        parent: TraceContext | None,
        attributes: Attributes | None = None,  # noqa: ARG002
        at: float | None = None,  # noqa: ARG002
    ) -> NoSpan:
        """What hands `parent` on."""
        return NoSpan(parent) if parent is not None else NO_SPAN

    def close(self) -> None:
        """There is nothing to bring away."""


NO_SPAN, NO_TRACER = NoSpan(), NoTracer()

ACTIVE: ContextVar[Span] = ContextVar("noria_span", default=NO_SPAN)


@contextlib.contextmanager
def working_for(request_id: str, span: Span) -> Iterator[None]:
    """What is done inside is done for this request, as part of `span`; the log and the traces say so."""
    context = span.context
    who = RequestContext(request_id, context.trace_id, context.span_id) if context else RequestContext(request_id)
    current, active = CURRENT.set(who), ACTIVE.set(span)
    try:
        yield
    finally:
        ACTIVE.reset(active)
        CURRENT.reset(current)


def record(
    tracer: Tracer,
    name: str,
    parent: Span,
    began: float,
    ended: float,
    attributes: Attributes | None = None,
    error_code: str | None = None,
) -> None:
    """Make a span of what is over, if it was part of one that is recorded. Times are Unix time, in seconds."""
    if parent.is_recording:
        span = tracer.span(name, "internal", parent.context, attributes, began)
        if error_code is not None:
            span.fail(error_code)
        span.end(ended)


def check_traces(endpoint: str) -> None:
    """Whether spans can be brought there, as far as this machine can tell; nothing to do where `endpoint` is empty.

    Raises:
        ConfigError: it is no URL of a collector, or what it takes is not installed.

    """
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"setting traces_endpoint is {shown(endpoint)}; allowed is an http or https URL, such as http://127.0.0.1:4318/v1/traces."
        )
    try:
        importlib.import_module("noria.observe.otlp")
    except ImportError as error:
        raise ConfigError(
            f"setting traces_endpoint needs OpenTelemetry, which is not installed ({error}). "
            f"Run: pip install '{EXTRA}' (or leave traces_endpoint empty: no traces)."
        ) from error


def open_tracer(endpoint: str, ratio: float, instance: str) -> Tracer:
    """A tracer of the process called `instance`, which samples `ratio` of the traces that begin here. Raises ConfigError as `check_traces`."""
    check_traces(endpoint)
    if not endpoint:
        return NO_TRACER
    from noria.observe.otlp import OtlpTracer

    return OtlpTracer(endpoint, ratio, instance)
