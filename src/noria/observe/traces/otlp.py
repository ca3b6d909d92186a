"""Exports spans with OpenTelemetry's SDK, by OTLP over HTTP. Imported only if `traces_endpoint` is set.

A collector that is down blocks nothing: spans wait in a bounded queue, are sent by a thread, and are lost when the
queue is full; the log says so at most once a minute. The SDK's own variables (OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…) apply where no setting of Noria's says otherwise.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.util.types import AttributeValue

from noria import __version__
from noria.observe.traces.trace_context import TraceContext
from noria.observe.traces.tracer import Attributes, SpanKind

_CLOSE_TIMEOUT_S = 1.5  # the supervisor waits at most 5 s for a child to end
_WARNING_INTERVAL_S = 60.0
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)
_SPAN_KINDS = {
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "consumer": trace.SpanKind.CONSUMER,
    "internal": trace.SpanKind.INTERNAL,
}


class OtlpSpan:
    """A span of the SDK, as a `tracer.Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        span_context = span.get_span_context()
        self.context = TraceContext(
            trace.format_trace_id(span_context.trace_id),
            trace.format_span_id(span_context.span_id),
            span_context.trace_flags.sampled,
            span_context.trace_state.to_header(),
        )

    @property
    def is_recording(self) -> bool:
        """Whether it is sampled and has not ended."""
        return self._span.is_recording()

    def rename(self, name: str) -> None:
        """Rename the span."""
        self._span.update_name(name)

    def set_attributes(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._span.set_attributes(attributes)

    def fail(self, code: str) -> None:
        """Set the error status and the attribute `error.type`."""
        self._span.set_attribute("error.type", code)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, code))

    def end(self, at: float | None = None) -> None:
        """End the span and queue it for export."""
        self._span.end(_nanoseconds(at))


class OtlpTracer:
    """A tracer with its own provider, independent of other uses of OpenTelemetry in the process."""

    def __init__(self, endpoint: str, ratio: float, instance: str) -> None:
        rate_limit = RateLimitFilter(_WARNING_INTERVAL_S, time.monotonic)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(rate_limit)
        # No atexit hook of the SDK: it would wait for half a minute for a collector that is down.
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(ratio)), _resource(instance), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("noria", __version__)

    def span(
        self,
        name: str,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
        at: float | None = None,
    ) -> OtlpSpan:
        """Start a span at `at`, Unix time; sampled if its parent is."""
        # An empty context: with None the SDK would use its own current span as the parent.
        parent_context = Context() if parent is None else set_span_in_context(_remote_parent(parent))
        return OtlpSpan(
            self._tracer.start_span(name, parent_context, _SPAN_KINDS[kind], attributes, start_time=_nanoseconds(at))
        )

    def close(self) -> None:
        """Export the queued spans in bounded time.

        The SDK's own timeout does not hold if a collector does not respond.
        """
        closing = threading.Thread(target=self._provider.shutdown, name="trace exporter shutdown", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class RateLimitFilter(logging.Filter):
    """Passes one record, then none for `interval_s`; one filter may be shared by several loggers."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self._interval_s, self._clock = interval_s, clock
        self._last_passed_s: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        """Return whether the interval has passed since the last record."""
        now = self._clock()
        if self._last_passed_s is not None and now - self._last_passed_s < self._interval_s:
            return False
        self._last_passed_s = now
        return True


def _resource(instance: str) -> Resource:
    """Return the resource of this process; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence."""
    defaults: dict[str, AttributeValue] = {
        "service.name": "noria",
        "service.version": __version__,
        "service.instance.id": instance,
        "process.pid": os.getpid(),
    }
    return Resource.create(defaults).merge(OTELResourceDetector().detect())


def _remote_parent(parent: TraceContext) -> trace.Span:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.is_sampled else trace.TraceFlags.DEFAULT)
    state = trace.TraceState.from_header([parent.tracestate]) if parent.tracestate else None
    span_context = trace.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags, state)
    return trace.NonRecordingSpan(span_context)


def _nanoseconds(at: float | None) -> int | None:
    return None if at is None else int(at * 1e9)
