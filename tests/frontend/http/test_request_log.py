"""An image request has one line in the request log, whatever its outcome; any other has one in the access log."""

import hashlib
import logging

import httpx
import pytest

from noria.config import Config
from noria.frontend.engines import client as engine_client
from noria.observe.logs.request_log import REQUEST_FIELDS
from noria.protocol.messages import Timings
from waiting import wait_until, wait_until_ready

PROGRESS = {"timings": Timings(0.25, 0.5, 0.75), "num_steps_run": 2, "mean_batch": 1.5}
PROGRESS_FIELDS = {"queue_s": 0.25, "text_encode_s": 0.5, "denoise_s": 0.75, "mean_batch": 1.5, "steps_run": 2}

LOGGERS = ("noria.requests", "noria.access")


@pytest.fixture
def line_of(caplog):
    """Calls `send` with a request id in headers; returns the logger and the fields of the request's only line."""

    def find(send, request_id="abc"):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            send({"x-request-id": request_id})
            of_request = lambda: [  # noqa: E731
                record
                for record in list(caplog.records)
                if record.name in LOGGERS and record.noria_fields["request_id"] == request_id
            ]
            wait_until(of_request)  # it is written after the response
        (record,) = of_request()
        assert record.levelno == logging.INFO
        return record.name, dict(record.noria_fields)

    return find


BODY = {
    "prompt": "a secret prompt",
    "n": 2,
    "seed": 7,
    "inference_steps": 3,
    "scheduler": "euler",
    "guidance_scale": 2.0,
}


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_successful_request_has_all_fields(stream, client, line_of):
    name, line = line_of(lambda headers: client.post("/t2i", json=BODY | {"stream": stream}, headers=headers).read())
    assert name == "noria.requests"
    assert (
        line.items()
        >= {
            "event": "request",
            "method": "POST",
            "path": "/t2i",
            "status": 200,
            "outcome": "ok",
            "model": "tiny",
            "model_version": "0123456789ab",
            "n": 2,
            "width": 64,
            "height": 48,
            "scheduler": "euler",
            "inference_steps": 3,
            "guidance_scale": 2.0,
            "seed": 7,
            "queue_s": 0.001,
            "text_encode_s": 0.002,
            "denoise_s": 0.003,
            "decode_s": 0.004,
            "predicted_s": 0.5,
            "mean_batch": 2.5,
            "steps_run": 3,
        }.items()
    )
    assert 0 < line["postprocess_s"] < line["total_s"] <= line["seconds"]
    assert line.keys() <= REQUEST_FIELDS.keys()
    assert "secret" not in str(line)


@pytest.mark.parametrize(
    ("path", "body", "outcome", "status"),
    [
        ("/t2i", BODY | {"inference_steps": 0}, "invalid_field", 400),
        ("/t2i", BODY | {"model": "none\nsuch"}, "model_not_found", 404),
        ("/v1/jobs", {"input": BODY | {"n": 99}}, "invalid_field", 400),
        ("/v1/images/generations", {"prompt": "a secret prompt", "size": "63x63"}, "invalid_field", 400),
        ("/sdapi/v1/txt2img", {"prompt": "a secret prompt", "steps": 9999}, "invalid_field", 400),
    ],
)
def test_a_rejected_request_has_a_line(path, body, outcome, status, client, line_of):
    name, line = line_of(lambda headers: client.post(path, json=body, headers=headers))
    assert (name, line["outcome"], line["status"], line["path"]) == ("noria.requests", outcome, status, path)
    assert line["error"]
    assert "secret" not in str(line)


def test_a_failed_request_has_a_line_with_its_timings(client, engine, line_of):
    engine.failure = {"code": "generation_failed", "message": "the model failed", **PROGRESS}
    _, line = line_of(lambda headers: client.post("/t2i", json=BODY, headers=headers))
    assert (line["outcome"], line["status"], line["error"]) == ("generation_failed", 500, "the model failed")
    assert line["total_s"] >= 0
    assert line.items() >= PROGRESS_FIELDS.items()


@pytest.fixture
def long_cancel_reply_timeout(monkeypatch):
    """A front end that waits for the reply to a `Cancel` as long as it takes."""
    monkeypatch.setattr(engine_client, "_CANCEL_REPLY_TIMEOUT_S", 60.0)


@pytest.mark.usefixtures("long_cancel_reply_timeout")
def test_a_request_whose_client_disconnects_has_a_line_with_its_timings(engine, line_of, post_and_disconnect):
    engine.cancel_progress = PROGRESS
    _, line = line_of(lambda headers: post_and_disconnect("/t2i", BODY, headers))
    assert (line["outcome"], line["n"]) == ("cancelled", 2)
    assert line.items() >= (PROGRESS_FIELDS | {"predicted_s": 0.5}).items()


def test_the_line_of_a_cancelled_request_does_not_wait_for_a_silent_engine(engine, line_of, post_and_disconnect):
    engine.answers_cancel = False
    _, line = line_of(lambda headers: post_and_disconnect("/t2i", BODY, headers))
    assert line["outcome"] == "cancelled"
    assert "queue_s" not in line


@pytest.mark.usefixtures("long_cancel_reply_timeout")
def test_a_request_past_its_deadline_has_a_line_with_its_timings(client, engine, line_of):
    engine.never_answers, engine.cancel_progress = True, PROGRESS
    _, line = line_of(lambda headers: client.post("/t2i", json=BODY | {"deadline_ms": 100}, headers=headers))
    assert (line["outcome"], line["status"], line["deadline_s"]) == ("deadline_exceeded", 504, 0.1)
    assert line.items() >= PROGRESS_FIELDS.items()


def test_an_undecodable_body_has_a_line_in_the_access_log(client, line_of):
    post = lambda headers: client.post("/t2i", content=b"{", headers=headers | {"content-type": "application/json"})  # noqa: E731
    name, line = line_of(post)
    assert (name, line["event"], line["status"], line["outcome"]) == ("noria.access", "access", 400, "invalid_body")


def test_a_job_has_a_line_when_it_ends(client, captured_log_fields):
    with captured_log_fields("noria.requests") as lines:
        job_id = client.post("/v1/jobs", json={"input": BODY}).json()["id"]
        wait_until(lambda: [line for line in lines() if line["request_id"] == job_id])
    (line,) = [line for line in lines() if line["request_id"] == job_id]
    assert line.items() >= {"job_id": job_id, "attempt": 1, "outcome": "ok", "n": 2, "steps_run": 3}.items()
    assert "status" not in line


def test_a_job_cancelled_before_it_starts_has_one_line_besides_those_of_its_http_requests(
    client, engine, captured_log_fields
):
    engine.set_state("dead")
    wait_until(lambda: client.get("/readyz").status_code == 503)
    with captured_log_fields("noria.requests") as lines, captured_log_fields("noria.access") as accesses:
        job_id = client.post("/v1/jobs", json={"input": BODY}, headers={"x-request-id": "made"}).json()["id"]
        for _ in range(2):
            client.delete(f"/v1/jobs/{job_id}", headers={"x-request-id": "unmade"})
        wait_until(lambda: [line["request_id"] for line in accesses()].count("unmade") == 2)
    (line,) = [line for line in lines() if line["request_id"] in {job_id, "made", "unmade"}]
    expected = {
        "job_id": job_id,
        "outcome": "cancelled",
        "job_status": "canceled",
        "attempt": 0,
        "n": 2,
        "inference_steps": 3,
    }
    assert line.items() >= (expected | {"model": "tiny", "model_version": "0123456789ab"}).items()
    assert 0 <= line["waited_s"] == line["seconds"]
    assert "secret" not in str(line)
    (made,) = [line for line in accesses() if line["request_id"] == "made"]
    assert made["job_id"] == job_id


@pytest.mark.parametrize(
    ("log_prompts", "expected"),
    [
        ("off", {}),
        ("hash", {"prompt_sha256": hashlib.sha256(b"a secret prompt").hexdigest()}),
        ("full", {"prompt": "a secret prompt"}),
    ],
)
def test_prompts_are_logged_as_configured(log_prompts, expected, serve, new_engine, captured_log_fields):
    with (
        serve(Config(log_prompts=log_prompts), new_engine()) as (url, _),
        captured_log_fields("noria.requests") as lines,
    ):
        wait_until_ready(url)
        for body in (BODY, BODY | {"n": 0}):
            httpx.post(f"{url}/t2i", json=body, verify=False, timeout=60)
        wait_until(lambda: len(lines()) == 2)
    for line in lines():
        assert {name: text for name, text in line.items() if "prompt" in name} == expected
