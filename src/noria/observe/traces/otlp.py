"""Spans as OpenTelemetry's SDK makes them and brings them to a collector, by OTLP over HTTP. Imported where traces are wanted, only.

A collector that is down costs nothing that anybody waits for: spans are kept for it in a queue of bounded length, brought by a
thread of their own, and lost when the queue is full; the log says so once a minute. The SDK's own variables (OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…) hold where no setting of ours says otherwise.
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

_CLOSE_TIMEOUT_S = 1.5  # the supervisor waits for a child's end, and for 5 s at most
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
    """A span of the SDK's."""

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
        """Call it something else."""
        self._span.update_name(name)

    def set_attributes(self, attributes: Attributes) -> None:
        """Add to what is known of it."""
        self._span.set_attributes(attributes)

    def fail(self, code: str) -> None:
        """Give it the status of an error."""
        self._span.set_attribute("error.type", code)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, code))

    def end(self, at: float | None = None) -> None:
        """Hand it to those who bring it away."""
        self._span.end(_nanoseconds(at))


class OtlpTracer:
    """A provider of our own: what else in the process uses OpenTelemetry has its own, and its settings."""

    def __init__(self, endpoint: str, ratio: float, instance: str) -> None:
        rate_limit = RateLimitFilter(_WARNING_INTERVAL_S, time.monotonic)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(rate_limit)
        # Nothing of the SDK's runs at the interpreter's exit: it would wait for half a minute for a collector that is down.
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
        """A span that has begun `at`; sampled as its parent is."""
        # An empty context, and not None, which would be the SDK's own idea of who is at work.
        parent_context = Context() if parent is None else set_span_in_context(_remote_parent(parent))
        return OtlpSpan(
            self._tracer.start_span(name, parent_context, _SPAN_KINDS[kind], attributes, start_time=_nanoseconds(at))
        )

    def close(self) -> None:
        """Bring away what there is, in bounded time: the SDK's own bound does not hold while a collector does not answer."""
        closing = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class RateLimitFilter(logging.Filter):
    """Lets one record through, then none for `seconds`; shared by loggers, for all of them together."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self._interval_s, self._clock = interval_s, clock
        self._last_passed_s: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - whatever it says
        """Whether it is time again."""
        now = self._clock()
        if self._last_passed_s is not None and now - self._last_passed_s < self._interval_s:
            return False
        self._last_passed_s = now
        return True


def _resource(instance: str) -> Resource:
    """Who we are; what the environment says of it goes first."""
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
