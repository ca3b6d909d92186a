"""Traces of a front end: whose span it is, what is told to whom, and what counts as an error."""

import uuid

import httpx
import pytest

from noria.config import Config, FrontendConfig
from noria.observe.traces.otlp import OtlpTracer

BODY = {"prompt": "p"}


@pytest.fixture
def caller():
    """A trace, a span, and the header that names both."""
    trace_id, span_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


@pytest.fixture
def traced(serve, new_engine, collector, until, monkeypatch):
    """A front end that is traced, its engine, and a function that gives a trace's spans by name, once its server's has ended."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    tracer, engine = OtlpTracer(collector.endpoint, 1.0, "frontend-0"), new_engine()

    def spans(trace_id):
        collector.wait(lambda _: any(span.kind == "server" for span in collector.of_trace(trace_id)))
        return {span.name: span for span in collector.of_trace(trace_id)}

    config = Config(frontend=FrontendConfig(max_images=4, max_steps=100))
    with serve(config, engine, tracer) as (url, _), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        yield client, engine, spans
    tracer.close()


def test_without_tracing_a_callers_context_goes_to_the_engine_as_it_came(client, engine, caller):
    _, _, header = caller
    answer = client.post(
        "/t2i", json=BODY, headers=[("traceparent", header), ("tracestate", "a=1"), ("tracestate", "b=2")]
    )
    (submitted,) = engine.submitted
    assert (submitted.traceparent, submitted.tracestate) == (header, "a=1,b=2")
    assert "traceparent" not in answer.headers["server-timing"]


@pytest.mark.parametrize("headers", [[], [("traceparent", "00-nonsense-01")], [("tracestate", "a=1")]])
def test_without_a_valid_context_the_engine_is_told_of_none(client, engine, headers):
    assert client.post("/t2i", json=BODY, headers=headers).status_code == 200
    (submitted,) = engine.submitted
    assert (submitted.traceparent, submitted.tracestate) == ("", "")


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/images/generations", BODY), ("/sdapi/v1/txt2img", BODY), ("/t2i", BODY | {"n": 2})]
)
def test_every_route_that_draws_is_told_in_the_same_words(traced, caller, path, body):
    client, engine, spans = traced
    trace_id, span_id, header = caller
    answer = client.post(path, json=body, headers={"traceparent": header})
    assert answer.status_code == 200
    found = spans(trace_id)
    request = found[f"POST {path}"]
    assert request.parent_id == span_id
    assert engine.submitted[0].traceparent == f"00-{trace_id}-{request.span_id}-01"
    assert request.attributes["gen_ai.request.model"] == "tiny"
    assert request.attributes["noria.mean_batch"] == 2.5
    assert found["postprocess"].parent_id == request.span_id
    assert f'traceparent;desc="00-{trace_id}-{request.span_id}-01"' in answer.headers["server-timing"]


@pytest.mark.parametrize(
    ("code", "status"), [("queue_full", 429), ("generation_failed", 500), ("deadline_exceeded", 504)]
)
def test_what_the_engine_refuses_or_fails_has_its_code(traced, caller, code, status):
    client, engine, spans = traced
    trace_id, _, header = caller
    engine.fails = {"code": code, "message": "no"}
    assert client.post("/t2i", json=BODY, headers={"traceparent": header}).status_code == status
    span = spans(trace_id)["POST /t2i"]
    assert (span.failed, span.attributes["error.type"], span.attributes["noria.outcome"]) == (True, code, code)
    assert span.attributes["http.response.status_code"] == status


def test_what_the_engine_finds_wrong_with_a_request_is_its_callers_mistake(traced, caller):
    client, engine, spans = traced
    trace_id, _, header = caller
    engine.fails = {"code": "invalid_field", "message": "no", "field": "scheduler"}
    assert client.post("/t2i", json=BODY, headers={"traceparent": header}).status_code == 400
    span = spans(trace_id)["POST /t2i"]
    assert (span.failed, span.attributes["noria.outcome"]) == (False, "invalid_field")


def test_what_breaks_in_our_own_code_is_internal(traced, caller, monkeypatch):
    client, _, spans = traced
    trace_id, _, header = caller

    async def breaks(*_):
        raise LookupError

    monkeypatch.setattr("noria.frontend.services.generation.Studio.draw", breaks)
    answer = client.post("/t2i", json=BODY, headers={"traceparent": header})
    assert answer.status_code == 500
    span = spans(trace_id)["POST /t2i"]
    assert (span.failed, span.attributes["error.type"], span.attributes["noria.outcome"]) == (
        True,
        "internal",
        "internal",
    )
    assert span.span_id in answer.headers["server-timing"]


def test_a_stream_that_ends_with_an_error_failed_though_its_status_was_200(traced, caller):
    client, engine, spans = traced
    trace_id, _, header = caller
    engine.nonsense = True
    answer = client.post("/t2i", json=BODY | {"stream": True}, headers={"traceparent": header})
    assert answer.status_code == 200
    assert "event: error" in answer.text
    span = spans(trace_id)["POST /t2i"]
    assert (span.failed, span.attributes["error.type"]) == (True, "generation_failed")
    assert span.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize(
    ("method", "path", "name", "code"),
    [
        ("GET", "/nowhere/at/all", "GET", "not_found"),
        ("DELETE", "/t2i", "DELETE /t2i", "method_not_allowed"),
        ("PROPFIND", "/t2i", "HTTP /t2i", "method_not_allowed"),
    ],
)
def test_a_callers_mistake_is_no_error_and_makes_no_name_of_its_own(traced, caller, method, path, name, code):
    client, _, spans = traced
    trace_id, _, header = caller
    client.request(method, path, headers={"traceparent": header})
    (span,) = spans(trace_id).values()
    assert (span.name, span.failed, span.attributes["noria.outcome"]) == (name, False, code)
    assert span.attributes["http.request.method"] == ("_OTHER" if method == "PROPFIND" else method)
