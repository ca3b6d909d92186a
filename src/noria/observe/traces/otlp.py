"""Exports spans with OpenTelemetry's SDK, by OTLP over HTTP. Imported only if `traces_endpoint` is set.

A collector that is down blocks nothing: spans wait in a bounded queue, are sent by a thread, and are lost when the
queue is full; the log says so at most once a minute. The SDK's own variables (OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…) apply where no setting of Noria's says otherwise.
"""

import logging
import os
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.util.types import AttributeValue

from noria import __version__

_WARNING_INTERVAL_S = 60.0
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)


def open_otlp_provider(endpoint: str, ratio: float, instance: str) -> TracerProvider:
    """Return a provider of its own, apart from the process's global one; its spans are sampled if their parent is."""
    rate_limit = RateLimitFilter(_WARNING_INTERVAL_S, time.monotonic)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(rate_limit)
    # No atexit hook of the SDK: it would wait for half a minute for a collector that is down.
    provider = TracerProvider(ParentBased(TraceIdRatioBased(ratio)), _resource(instance), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


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
