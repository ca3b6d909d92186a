"""The tracer that records nothing, and the one that exports spans to a collector that works or does not."""

import logging
import socket
import time
import timeit
import uuid

import pytest
from starlette.datastructures import Headers

from noria.errors import ConfigError
from noria.frontend.http import request_spans
from noria.observe.request_scope import CURRENT_REQUEST, RequestContext
from noria.observe.traces import otlp
from noria.observe.traces.otlp import OtlpTracer, RateLimitFilter
from noria.observe.traces.setup import check_traces, open_tracer
from noria.observe.traces.trace_context import TraceContext
from noria.observe.traces.tracer import CURRENT_SPAN, NO_SPAN, NO_TRACER, NoSpan, record_span, request_scope
from waiting import TIMEOUT_S


def context(is_sampled=True):
    return TraceContext(uuid.uuid4().hex, uuid.uuid4().hex[:16], is_sampled, "vendor=x")


@pytest.fixture
def long_close_timeout(monkeypatch):
    """`close` exports all spans, even on a busy machine."""
    monkeypatch.setattr(otlp, "_CLOSE_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture
def tracer(collector, long_close_timeout):
    opened = OtlpTracer(collector.endpoint, 1.0, "frontend-0")
    yield opened
    opened.close()


def test_without_an_endpoint_only_the_clients_context_is_propagated():
    assert open_tracer("", 1.0, "frontend-0") is NO_TRACER
    client = context()
    span = NO_TRACER.span("POST", "server", client)
    assert (span.context, span.is_recording) == (client, False)
    assert NO_TRACER.span("POST", "server", None).context is None


def test_request_scope_sets_the_current_request_and_span_and_restores_them():
    client = context()
    span = NoSpan(client)
    with request_scope("an-id", span):
        assert RequestContext("an-id", client.trace_id, client.span_id) == CURRENT_REQUEST.get()
        assert CURRENT_SPAN.get() is span
        with pytest.raises(LookupError), request_scope("another", NO_SPAN):
            raise LookupError
        assert CURRENT_SPAN.get() is span
    assert (CURRENT_REQUEST.get(), CURRENT_SPAN.get()) == (None, NO_SPAN)


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "grpc://host:4317", "http://", "http:///v1/traces", "http://[::1/x", "http://host:99999/"],
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="traces_endpoint is"):
        check_traces(endpoint)


def test_an_endpoint_with_a_password_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        check_traces("https://noria:hunter2@collector.example/v1/traces")
    assert "hunter2" not in str(refused.value)


def test_a_recorded_span_is_exported_with_its_times_and_its_error(tracer, collector):
    client = context()
    span = tracer.span("whole", "client", client, {"a": 1})
    record_span(tracer, "part", span, 1000.25, 1001.5, {"b": "c"}, "queue_full")
    span.end()
    record_span(tracer, "late", span, 1.0, 2.0)  # its parent has ended, so it is not recorded
    tracer.close()
    whole, part = sorted(collector.of_trace(client.trace_id), key=lambda each: each.name, reverse=True)
    assert (whole.name, whole.kind, whole.parent_id, whole.attributes) == ("whole", "client", client.span_id, {"a": 1})
    assert (part.name, part.parent_id, part.began, part.ended) == ("part", whole.span_id, 1000.25, 1001.5)
    assert (part.failed, part.attributes) == (True, {"b": "c", "error.type": "queue_full"})
    assert (whole.tracestate, part.tracestate) == ("vendor=x", "vendor=x")


def test_the_parent_decides_on_sampling_else_the_ratio(collector):
    tracer = OtlpTracer(collector.endpoint, 0.0, "frontend-0")
    sampled, not_sampled = context(), context(is_sampled=False)
    of_sampled = tracer.span("a", "server", sampled)
    of_other, of_nobody = tracer.span("b", "server", not_sampled), tracer.span("c", "server", None)
    assert [span.is_recording for span in (of_sampled, of_other, of_nobody)] == [True, False, False]
    assert (of_other.context.trace_id, of_other.context.is_sampled) == (not_sampled.trace_id, False)
    assert of_nobody.context.traceparent.endswith("-00")  # the decision is propagated
    tracer.close()


def test_resource_attributes_of_the_environment_take_precedence(collector, monkeypatch, long_close_timeout):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pictures")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=shop,service.instance.id=mine")
    tracer, client = OtlpTracer(collector.endpoint, 1.0, "frontend-0"), context()
    tracer.span("a", "server", client).end()
    tracer.close()
    (span,) = collector.of_trace(client.trace_id)
    expected = {"service.name": "pictures", "service.namespace": "shop", "service.instance.id": "mine"}
    assert span.resource.items() >= expected.items()


def test_a_collector_that_never_responds_delays_close_by_two_seconds_at_most(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "280")  # the time that the SDK would wait
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        tracer = OtlpTracer(f"http://127.0.0.1:{unresponsive.getsockname()[1]}/", 1.0, "frontend-0")
        tracer.span("a", "server", None).end()
        began = time.monotonic()
        tracer.close()
        assert time.monotonic() - began < 60  # 1.5 on a machine with nothing else to do
        connection, _ = unresponsive.accept()  # now it answers, so that the exporter's thread ends
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def test_warnings_are_rate_limited():
    now = [100.0]
    rate_limit, log_record = (
        RateLimitFilter(60.0, lambda: now[0]),
        logging.LogRecord("x", logging.ERROR, "", 0, "down", (), None),
    )
    assert [rate_limit.filter(log_record), rate_limit.filter(log_record)] == [True, False]
    now[0] += 59.0
    assert not rate_limit.filter(log_record)
    now[0] += 1.0
    assert [rate_limit.filter(log_record), rate_limit.filter(log_record)] == [True, False]


def test_without_tracing_a_request_costs_microseconds():
    """All that the middleware does for tracing: look for the header, keep the ids for the log.

    Run with -s to see the time.
    """
    scope = {"path": "/t2i", "method": "POST", "scheme": "http", "headers": [(b"x-header", b"a value")] * 8}
    headers = Headers(scope=scope)

    def hooks():
        span = request_spans.begin(NO_TRACER, scope, headers, "an-id")
        with request_scope("an-id", span):
            request_spans.add_server_timing(span, {})
            request_spans.finish(span, scope, 200)

    seconds = min(timeit.repeat(hooks, number=1000, repeat=20)) / 1000
    print(f"\nwith tracing off: {seconds * 1e6:.1f} µs a request")
    assert seconds < 50e-6  # measured: 5.5
