"""The routes about the server itself, its metrics, and the answers to what is no route."""

import threading
import uuid

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool


def values(client):
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def test_healthz_and_readyz(client):
    assert client.get("/healthz").json() == {"status": "alive"}
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["ready"] is True
    assert ready.json()["engines"][0]["device"] == "cpu"


def test_nothing_is_ready_before_an_engine_is(folder):
    with TestClient(build_app(Config(), EnginePool([f"ipc://{folder}/nobody"]))) as client:
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        refusal = client.post("/t2i", json={"prompt": "p"})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "engine_unavailable")
        assert client.get("/v1/models").status_code == 503
        for path in ("/", "/docs", "/openapi.json", "/metrics"):
            assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/t2j", "/t2i/", "/v1/images", "/v1", "/%0d%0aX: 1", "/\u00e9"])
def test_unknown_path(client, path):
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_unknown_path_is_told_its_neighbour(client):
    assert "Did you mean '/t2i'?" in client.get("/t2j").json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", "/t2i", "POST"), ("DELETE", "/t2i", "POST"), ("POST", "/healthz", "GET, HEAD"), ("PUT", "/", "GET, HEAD")],
)
def test_wrong_method(client, method, path, allow):
    response = client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allow)
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_a_request_moves_its_metrics(client):
    before = values(client)
    assert client.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200
    assert client.post("/t2i", json={"prompt": "p", "n": 0}).status_code == 400
    client.get("/some/path/nobody/serves")
    after = values(client)

    def moved(*key):
        return after.get(key, 0) - before.get(key, 0)

    assert moved("noria_requests_total", ("model", "tiny"), ("outcome", "ok")) == 1
    assert moved("noria_requests_total", ("model", "tiny"), ("outcome", "invalid_field")) == 1
    assert moved("noria_images_total", ("model", "tiny")) == 2
    assert moved("noria_request_seconds_count", ("model", "tiny")) == 1
    assert moved("noria_stage_seconds_count", ("stage", "denoise")) == 1
    assert moved("noria_stage_seconds_sum", ("stage", "denoise")) == pytest.approx(0.003)
    assert moved("noria_http_requests_total", ("method", "POST"), ("path", "/t2i"), ("status", "200")) == 1
    assert moved("noria_http_requests_total", ("method", "GET"), ("path", "other"), ("status", "404")) == 1
    assert moved("noria_inflight") == 0


@pytest.mark.parametrize("code", ["queue_full", "deadline_unmeetable"])
def test_a_refusal_is_counted_by_its_reason(client, engine, code):
    engine.fails = {"code": code, "message": "no", "retry_after_s": 1.0}
    key = ("noria_rejected_total", ("model", "tiny"), ("reason", code))
    before = values(client).get(key, 0)
    assert client.post("/t2i", json={"prompt": "p", "deadline_ms": 5000}).status_code == 429
    assert values(client)[key] == before + 1


def test_a_deadline_that_passed_is_counted_as_missed_and_an_expired_request_without_one_is_not(client, engine):
    engine.fails = {"code": "deadline_exceeded", "message": "late"}
    key = ("noria_deadline_missed_total", ("model", "tiny"))
    assert client.post("/t2i", json={"prompt": "p", "deadline_ms": 5000}).status_code == 504
    before = values(client)[key]
    assert client.post("/t2i", json={"prompt": "p"}).status_code == 504
    assert values(client)[key] == before


def test_prometheus_is_answered_with_the_requests_that_made_the_numbers(client):
    assert client.post("/t2i", json={"prompt": "p"}, headers={"x-request-id": "exemplary"}).status_code == 200
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert '# {request_id="exemplary"}' in answer.text


@pytest.mark.parametrize(("flags", "is_led_to"), [("01", True), ("00", False)])
def test_an_exemplar_leads_to_the_trace_of_a_request_that_is_recorded(client, flags, is_led_to):
    trace, name = uuid.uuid4().hex, uuid.uuid4().hex
    headers = {"x-request-id": name, "traceparent": f"00-{trace}-00f067aa0ba902b7-{flags}"}
    assert client.post("/t2i", json={"prompt": "p"}, headers=headers).status_code == 200
    text = client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"}).text
    assert f'request_id="{name}"' in text
    assert (f'# {{request_id="{name}",trace_id="{trace}"}}' in text) == is_led_to


def test_an_answer_says_with_how_many_it_shared_its_steps(client):
    answer = client.post("/t2i", json={"prompt": "p"}, headers={"accept": "application/json"})
    assert answer.headers["x-noria-mean-batch"] == "2.50"
    assert answer.json()["mean_batch"] == 2.5


def test_inflight_counts_what_is_being_drawn(client, engine, until):
    engine.holds = True
    thread = threading.Thread(target=client.post, args=("/t2i",), kwargs={"json": {"prompt": "p"}})
    thread.start()
    until(lambda: values(client)[("noria_inflight",)] == 1)
    engine.holds = False
    engine.become("dead")
    engine.become("ready")
    thread.join()
    assert values(client)[("noria_inflight",)] == 0


def test_access_log_has_one_line_with_status_and_id(client, said_in, until):
    with said_in("noria.access") as lines:
        client.get("/healthz")
        assert client.get("/pages/style.css").status_code == 200
        client.get("/v1/models?a=%0Ab", headers={"x-request-id": "abc"})
        # A line is written after its answer is: the client may be quicker.
        until(lambda: [line for line in lines() if line["request_id"] == "abc"])
    (line,) = [line for line in lines() if line["request_id"] == "abc"]  # others are of clients of an earlier test
    assert 0 < line.pop("seconds") < 20
    assert line == {
        "event": "access", "request_id": "abc", "method": "GET", "path": "/v1/models", "status": 200
    }  # fmt: skip
    assert not any(line["path"] in ("/healthz", "/pages/style.css") for line in lines())


def test_the_files_of_the_pages_are_one_route_of_the_metrics(client):
    for name in ("style.css", "events.js", "nobody.js", "../app.py"):
        answer = client.get(f"/pages/{name}")
        assert (answer.status_code == 200) is (name in ("style.css", "events.js"))
    paths = {dict(labels).get("path") for name, *labels in values(client) if name == "noria_http_requests_total"}
    assert "/pages/{name}" in paths and not any("style.css" in str(path) for path in paths)


def test_a_bug_of_ours_is_a_500_that_tells_nothing(monkeypatch, client, caplog):
    def broken(*_):
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr("noria.frontend.services.generation.encode_images", broken)
    response = client.post("/t2i", json={"prompt": "p"}, headers={"x-request-id": "abc"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["code"], error["type"], error["request_id"]) == ("internal", "server_error", "abc")
    assert "swordfish" not in response.text
    assert "swordfish" in caplog.text
    assert client.get("/healthz").status_code == 200


def test_many_clients_at_once(url, engine):
    statuses = []

    def several():
        with httpx.Client(base_url=url, verify=False, timeout=60) as client:
            statuses.extend(client.post("/t2i", json={"prompt": "p", "seed": seed}).status_code for seed in range(5))

    threads = [threading.Thread(target=several) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 40
