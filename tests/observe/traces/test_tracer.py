"""Trace context of requests, and spans exported to a collector that works or fails, or to the operator's provider."""

import logging
import socket
import subprocess
import sys
import time

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, SpanKind, get_current_span, set_span_in_context

from noria.errors import ConfigError
from noria.observe.request_scope import CURRENT_REQUEST, RequestScope
from noria.observe.traces.otlp import RateLimitFilter, open_otlp_provider
from noria.observe.traces.setup import check_traces, open_tracer
from noria.observe.traces.tracer import fail, nanoseconds, parse, trace_headers

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def provider(collector):
    opened = open_otlp_provider(collector.endpoint, 1.0, "frontend-0")
    yield opened
    opened.shutdown()


@pytest.mark.parametrize("header", [HEADER, HEADER.removesuffix("1") + "0"])
def test_without_a_provider_only_the_clients_context_is_propagated(header):
    tracer, close = open_tracer("", 1.0, "frontend-0")
    span = tracer.start_span("POST", parse([header], ["a=1", "b=2"]))
    assert (trace_headers(span), span.is_recording()) == ({"traceparent": header, "tracestate": "a=1,b=2"}, False)
    assert trace_headers(tracer.start_span("POST", Context())) == {}
    close()


@pytest.mark.parametrize("lines", [[], [""], [HEADER, HEADER], [HEADER.upper()], [f"00-{TRACE}-{'0' * 16}-01"]])
def test_without_exactly_one_valid_traceparent_there_is_no_trace(lines):
    assert parse(lines, ["a=1"]) == {}


def test_an_invalid_tracestate_is_dropped_and_not_logged(caplog):
    open_tracer("", 1.0, "frontend-0")
    assert trace_headers(get_current_span(parse([HEADER], ["a=1,b=é"]))) == {"traceparent": HEADER}
    assert not caplog.records


def test_a_scope_sets_the_current_request_and_span_and_restores_them():
    span = get_current_span(parse([HEADER]))
    with RequestScope("an-id", span):
        with RequestScope("another", INVALID_SPAN):
            assert (CURRENT_REQUEST.get(), get_current_span()) == ("another", INVALID_SPAN)
        assert (CURRENT_REQUEST.get(), get_current_span()) == ("an-id", span)
    assert (CURRENT_REQUEST.get(), get_current_span()) == (None, INVALID_SPAN)


OPERATORS_OWN_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from noria.observe.traces.setup import open_tracer
from noria.observe.traces.tracer import GLOBAL_TRACER  # made before the provider, as for a program that embeds the app
trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
trace.get_tracer_provider().add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
tracer, close = open_tracer("", 1.0, "frontend-0")
tracer.start_span("of a server").end()
GLOBAL_TRACER.start_span("of an embedded app").end()
close()
"""


def test_without_an_endpoint_spans_go_to_the_operators_own_provider():
    ended = subprocess.run([sys.executable, "-c", OPERATORS_OWN_PROVIDER], capture_output=True, text=True, check=True)
    assert all(name in ended.stdout for name in ("of a server", "of an embedded app"))


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "grpc://host:4317", "http://", "http:///v1/traces", "http://[::1/x", "http://host:99999/"],
)
def test_an_endpoint_that_is_no_url_is_rejected(endpoint):
    with pytest.raises(ConfigError, match="traces_endpoint is"):
        check_traces(endpoint)


def test_an_endpoint_with_a_password_is_rejected_and_not_shown():
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as rejected:
        check_traces("https://noria:hunter2@collector.example/v1/traces")
    assert "hunter2" not in str(rejected.value)


def test_a_recorded_span_is_exported_with_its_times_and_its_error(provider, collector, caller):
    tracer = provider.get_tracer("noria")
    whole = tracer.start_span("whole", parse([caller.traceparent], ["vendor=x"]), SpanKind.CLIENT, {"a": 1})
    part = tracer.start_span("part", set_span_in_context(whole), start_time=nanoseconds(1000.25))
    fail(part, "queue_full")
    part.end(nanoseconds(1001.5))
    whole.end()
    provider.force_flush()
    part, whole = sorted(collector.of_trace(caller.trace_id), key=lambda each: each.name)
    assert (whole.name, whole.kind, whole.parent_id, whole.attributes) == ("whole", "client", caller.span_id, {"a": 1})
    assert (part.name, part.parent_id, part.began, part.ended) == ("part", whole.span_id, 1000.25, 1001.5)
    assert (part.failed, part.attributes) == (True, {"error.type": "queue_full"})
    assert (whole.tracestate, part.tracestate) == ("vendor=x", "vendor=x")


def test_the_parent_decides_on_sampling_else_the_ratio(collector):
    provider = open_otlp_provider(collector.endpoint, 0.0, "frontend-0")
    parents = parse([HEADER]), parse([HEADER.removesuffix("1") + "0"]), Context()
    spans = [provider.get_tracer("noria").start_span("a", parent) for parent in parents]
    assert [span.is_recording() for span in spans] == [True, False, False]
    sampled, of_other, of_nobody = (trace_headers(span)["traceparent"] for span in spans)
    assert (TRACE in sampled, TRACE in of_other, TRACE in of_nobody) == (True, True, False)
    # The decision is propagated; bit 2 says that the trace id is random.
    assert [int(header[-2:], 16) & 1 for header in (sampled, of_other, of_nobody)] == [1, 0, 0]
    provider.shutdown()


def test_resource_attributes_of_the_environment_take_precedence(collector, monkeypatch, caller):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pictures")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=shop,service.instance.id=mine")
    provider = open_otlp_provider(collector.endpoint, 1.0, "frontend-0")
    provider.get_tracer("noria").start_span("a", parse([caller.traceparent])).end()
    provider.shutdown()
    (span,) = collector.of_trace(caller.trace_id)
    expected = {"service.name": "pictures", "service.namespace": "shop", "service.instance.id": "mine"}
    assert span.resource.items() >= expected.items()


def test_a_collector_that_never_responds_delays_close_by_two_seconds_at_most(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "280")  # the time that the SDK would wait
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        tracer, close = open_tracer(f"http://127.0.0.1:{unresponsive.getsockname()[1]}/", 1.0, "frontend-0")
        tracer.start_span("a").end()
        began = time.monotonic()
        close()
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
