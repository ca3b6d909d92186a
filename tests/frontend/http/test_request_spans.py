"""The spans of a front end: their parents, their attributes, and what counts as an error."""

import httpx
import pytest

from frontends import serving
from noria.config import Config, FrontendConfig
from noria.observe.traces.otlp import open_otlp_provider
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from waiting import wait_until

BODY = {"prompt": "p"}


@pytest.fixture(scope="module")
def server(folder, collector):
    """A traced front end's client, its engine, and a function: a trace's spans by name, once the server's has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        provider = open_otlp_provider(collector.endpoint, 1.0, "frontend-0")

    def spans(trace_id):
        collector.wait(lambda _: any(span.kind == "server" for span in collector.of_trace(trace_id)))
        return {span.name: span for span in collector.of_trace(trace_id)}

    config = Config(frontend=FrontendConfig(max_images=4, max_steps=100))
    with (
        FakeEngine(f"ipc://{folder}/traced", models=(FAKE_MODEL, FAKE_ENCODER)) as engine,
        serving(config, engine, provider.get_tracer("noria")) as (url, _),
        httpx.Client(base_url=url, timeout=60, verify=False) as client,
    ):
        wait_until(lambda: client.get("/readyz").status_code == 200)
        yield client, engine, spans
    provider.shutdown()


@pytest.fixture
def traced(server):
    server[1].reset()
    return server


def test_without_tracing_the_clients_context_is_passed_to_the_engine(client, engine, caller):
    _, _, header = caller
    answer = client.post(
        "/t2i", json=BODY, headers=[("traceparent", header), ("tracestate", "a=1"), ("tracestate", "b=2")]
    )
    (submitted,) = engine.submitted
    assert (submitted.traceparent, submitted.tracestate) == (header, "a=1,b=2")
    assert "traceparent" not in answer.headers["server-timing"]


@pytest.mark.parametrize("headers", [[], [("traceparent", "00-nonsense-01")], [("tracestate", "a=1")]])
def test_an_invalid_context_is_not_passed_to_the_engine(client, engine, headers):
    assert client.post("/t2i", json=BODY, headers=headers).status_code == 200
    (submitted,) = engine.submitted
    assert (submitted.traceparent, submitted.tracestate) == ("", "")


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/images/generations", BODY), ("/sdapi/v1/txt2img", BODY), ("/t2i", BODY | {"n": 2})]
)
def test_every_route_that_generates_has_the_same_spans(traced, caller, path, body):
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


def test_a_text_has_the_spans_of_its_front_ends_stages(traced, caller):
    client, _, spans = traced
    trace_id, _, header = caller
    assert client.post("/v1/embeddings", json={"input": "a cat"}, headers={"traceparent": header}).status_code == 200
    found = spans(trace_id)
    request, stages = found["POST /v1/embeddings"], [found["tokenize"], found["postprocess"]]
    assert len(found) == 3  # the fake engine has none
    assert {span.parent_id for span in stages} == {request.span_id}
    assert request.began <= stages[0].began < stages[0].ended <= stages[1].began < stages[1].ended <= request.ended


@pytest.mark.parametrize(
    ("code", "status"), [("queue_full", 429), ("generation_failed", 500), ("deadline_exceeded", 504)]
)
def test_a_rejection_or_failure_of_the_engine_fails_the_span_with_its_code(traced, caller, code, status):
    client, engine, spans = traced
    trace_id, _, header = caller
    engine.failure = {"code": code, "message": "no"}
    assert client.post("/t2i", json=BODY, headers={"traceparent": header}).status_code == status
    span = spans(trace_id)["POST /t2i"]
    assert (span.failed, span.attributes["error.type"], span.attributes["noria.outcome"]) == (True, code, code)
    assert span.attributes["http.response.status_code"] == status


def test_a_client_error_found_by_the_engine_does_not_fail_the_span(traced, caller):
    client, engine, spans = traced
    trace_id, _, header = caller
    engine.failure = {"code": "invalid_field", "message": "no", "field": "scheduler"}
    assert client.post("/t2i", json=BODY, headers={"traceparent": header}).status_code == 400
    span = spans(trace_id)["POST /t2i"]
    assert (span.failed, span.attributes["noria.outcome"]) == (False, "invalid_field")


def test_an_unexpected_exception_fails_the_span_as_internal(traced, caller, monkeypatch):
    client, _, spans = traced
    trace_id, _, header = caller

    async def breaks(*_):
        raise LookupError

    monkeypatch.setattr("noria.frontend.services.images.generation.GenerationService.generate", breaks)
    answer = client.post("/t2i", json=BODY, headers={"traceparent": header})
    assert answer.status_code == 500
    span = spans(trace_id)["POST /t2i"]
    assert (span.failed, span.attributes["error.type"], span.attributes["noria.outcome"]) == (
        True,
        "internal",
        "internal",
    )
    assert span.span_id in answer.headers["server-timing"]


def test_an_error_event_fails_the_span_of_a_stream_with_status_200(traced, caller):
    client, engine, spans = traced
    trace_id, _, header = caller
    engine.sends_invalid_replies = True
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
def test_a_client_error_does_not_fail_the_span_and_adds_no_span_name(traced, caller, method, path, name, code):
    client, _, spans = traced
    trace_id, _, header = caller
    client.request(method, path, headers={"traceparent": header})
    (span,) = spans(trace_id).values()
    assert (span.name, span.failed, span.attributes["noria.outcome"]) == (name, False, code)
    assert span.attributes["http.request.method"] == ("_OTHER" if method == "PROPFIND" else method)
