"""The routes about the server itself, and its metrics."""

import threading
import uuid

import pytest
from starlette.testclient import TestClient

from metrics_page import samples_of
from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from waiting import wait_until


def values(client, *families):
    samples = samples_of(client.get("/metrics").text, *families)
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}


REQUESTS = ("noria_requests", "noria_images", "noria_request_seconds", "noria_stage_seconds", "noria_http_requests")
IN_FLIGHT = "noria_requests_in_flight"


def test_healthz_and_readyz(client):
    assert client.get("/healthz").json() == {"status": "alive"}
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["ready"] is True
    assert ready.json()["engines"][0]["device"] == "cpu"


def test_a_server_that_has_stopped_leaves_no_thread(folder, tmp_path):
    before = set(threading.enumerate())
    app = build_app(Config(data_dir=str(tmp_path)), EnginePool([f"ipc://{folder}/missing"]))
    with TestClient(app, "http://localhost", client=("127.0.0.1", 9)) as client:
        for path in ("/v1/registry/versions", "/v1/jobs"):
            assert client.get(path).status_code == 200
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 503
        assert set(threading.enumerate()) - before
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_the_server_is_not_ready_before_an_engine_is(folder):
    with TestClient(build_app(Config(), EnginePool([f"ipc://{folder}/missing"])), "http://localhost") as client:
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        rejection = client.post("/t2i", json={"prompt": "p"})
        assert (rejection.status_code, rejection.json()["error"]["code"]) == (503, "engine_unavailable")
        images = [("image[]", ("a.png", b"x"))] * 2
        rejection = client.post("/v1/images/edits", data={"prompt": "p"}, files=images)
        assert (rejection.status_code, rejection.json()["error"]["code"]) == (503, "engine_unavailable")
        assert client.get("/v1/models").status_code == 503
        assert client.post("/v1/images/metadata", content=b"x").status_code == 503
        for path in ("/", "/docs", "/openapi.json", "/metrics"):
            assert client.get(path).status_code == 200


def test_a_request_is_counted_in_its_metrics(client):
    before = values(client, *REQUESTS, IN_FLIGHT)
    assert client.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200
    assert client.post("/t2i", json={"prompt": "p", "n": 0}).status_code == 400
    client.get("/some/unknown/path")
    after = values(client, *REQUESTS, IN_FLIGHT)

    def moved(*key):
        return after.get(key, 0) - before.get(key, 0)

    assert moved("noria_requests_total", ("model", "tiny"), ("outcome", "ok")) == 1
    assert moved("noria_requests_total", ("model", "tiny"), ("outcome", "invalid_field")) == 1
    assert moved("noria_images_total", ("model", "tiny")) == 2
    assert moved("noria_request_seconds_count", ("model", "tiny")) == 1
    assert moved("noria_stage_seconds_count", ("model", "tiny"), ("stage", "denoise")) == 1
    assert moved("noria_stage_seconds_sum", ("model", "tiny"), ("stage", "denoise")) == pytest.approx(0.003)
    assert moved("noria_http_requests_total", ("method", "POST"), ("path", "/t2i"), ("status", "200")) == 1
    assert moved("noria_http_requests_total", ("method", "GET"), ("path", "other"), ("status", "404")) == 1
    assert moved(IN_FLIGHT) == 0


def test_a_missed_deadline_is_counted_and_a_timeout_without_a_deadline_is_not(client, engine):
    engine.failure = {"code": "deadline_exceeded", "message": "late"}
    family, key = "noria_deadline_missed", ("noria_deadline_missed_total", ("model", "tiny"))
    assert client.post("/t2i", json={"prompt": "p", "deadline_ms": 5000}).status_code == 504
    before = values(client, family)[key]
    assert client.post("/t2i", json={"prompt": "p"}).status_code == 504
    assert values(client, family)[key] == before


@pytest.mark.parametrize(("flags", "has_trace_id"), [("01", True), ("00", False)])
def test_an_exemplar_has_the_trace_id_of_a_sampled_request(client, flags, has_trace_id):
    trace_id, request_id = uuid.uuid4().hex, uuid.uuid4().hex
    headers = {"x-request-id": request_id, "traceparent": f"00-{trace_id}-00f067aa0ba902b7-{flags}"}
    assert client.post("/t2i", json={"prompt": "p"}, headers=headers).status_code == 200
    text = client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"}).text
    assert f'request_id="{request_id}"' in text
    assert (f'# {{request_id="{request_id}",trace_id="{trace_id}"}}' in text) == has_trace_id


def test_a_response_has_the_mean_batch(client):
    answer = client.post("/t2i", json={"prompt": "p"}, headers={"accept": "application/json"})
    assert answer.headers["x-noria-mean-batch"] == "2.50"
    assert answer.json()["mean_batch"] == 2.5


def test_requests_in_flight_are_counted(client, engine):
    engine.never_answers = True
    thread = threading.Thread(target=client.post, args=("/t2i",), kwargs={"json": {"prompt": "p"}})
    thread.start()
    wait_until(lambda: values(client, IN_FLIGHT)[(IN_FLIGHT,)] == 1)
    engine.never_answers = False
    engine.set_state("dead")
    engine.set_state("ready")
    thread.join()
    assert values(client, IN_FLIGHT)[(IN_FLIGHT,)] == 0


def test_access_log_has_one_line_with_status_and_id(client, captured_log_fields):
    with captured_log_fields("noria.access") as lines:
        client.get("/healthz")
        assert client.get("/pages/shared/style.css").status_code == 200
        client.get("/v1/models?a=%0Ab", headers={"x-request-id": "abc"})
        # A line is written after its response: the client may be faster.
        wait_until(lambda: [line for line in lines() if line["request_id"] == "abc"])
    (line,) = [line for line in lines() if line["request_id"] == "abc"]  # others may be of an earlier test's clients
    assert 0 < line.pop("seconds") < 20
    assert line == {
        "event": "access", "request_id": "abc", "method": "GET", "path": "/v1/models", "status": 200,
        "client": "127.0.0.1",
    }  # fmt: skip
    assert not any(line["path"] in ("/healthz", "/pages/shared/style.css") for line in lines())


def test_the_files_of_the_pages_are_one_path_in_the_metrics(client):
    for name in ("shared/style.css", "shared/api.js", "missing.js", "../app.py"):
        answer = client.get(f"/pages/{name}")
        assert (answer.status_code == 200) is name.startswith("shared/")
    paths = {dict(labels).get("path") for _, *labels in values(client, "noria_http_requests")}
    assert "/pages/{name:path}" in paths and not any("style.css" in str(path) for path in paths)


def test_an_unexpected_exception_is_a_500_without_details(monkeypatch, client, caplog):
    def fail(*_):
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr("noria.frontend.services.images.generation.write_images", fail)
    response = client.post("/t2i", json={"prompt": "p"}, headers={"x-request-id": "abc"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["code"], error["type"], error["request_id"]) == ("internal", "server_error", "abc")
    assert "swordfish" not in response.text
    assert "swordfish" in caplog.text
    assert client.get("/healthz").status_code == 200
