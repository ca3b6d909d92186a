"""A request for images has one line in the log, however it ends; every other request its line of the access log."""

import hashlib
import json
import logging
import threading

import httpx
import pytest

from noria.config import Config
from noria.frontend.engines import client as engine_peer
from noria.observe.logs.request_log import REQUEST_FIELDS
from noria.protocol.messages import Timings

FAR = {"timings": Timings(0.25, 0.5, 0.75), "num_steps_run": 2, "mean_batch": 1.5}
AS_FAR = {"queue_s": 0.25, "encode_s": 0.5, "denoise_s": 0.75, "mean_batch": 1.5, "steps_run": 2}

LOGGERS = ("noria.requests", "noria.access")


@pytest.fixture
def line_of(caplog, until):
    """Sends what `ask` sends, and returns the one line that the log has of request `request_id`."""

    def find(ask, request_id="abc"):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            ask({"x-request-id": request_id})
            of_request = lambda: [  # noqa: E731
                record
                for record in list(caplog.records)
                if record.name in LOGGERS and record.noria_fields["request_id"] == request_id
            ]
            until(of_request)  # it is written after the answer is
        (record,) = of_request()
        assert record.levelno == logging.INFO
        return record.name, dict(record.noria_fields)

    return find


BODY = {"prompt": "a secret wish", "n": 2, "seed": 7, "inference_steps": 3, "scheduler": "euler", "guidance_scale": 2.0}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_drawn_has_a_line_with_all_that_an_operator_asks(stream, client, line_of):
    name, said = line_of(lambda headers: client.post("/t2i", json=BODY | {"stream": stream}, headers=headers).read())
    assert name == "noria.requests"
    assert (
        said.items()
        >= {
            "event": "request",
            "method": "POST",
            "path": "/t2i",
            "status": 200,
            "outcome": "ok",
            "model": "tiny",
            "model_version": "0123456789ab",
            "n": 2,
            "size": "64x48",
            "scheduler": "euler",
            "steps": 3,
            "guidance": 2.0,
            "seed": 7,
            "queue_s": 0.001,
            "encode_s": 0.002,
            "denoise_s": 0.003,
            "decode_s": 0.004,
            "predicted_s": 0.5,
            "mean_batch": 2.5,
            "steps_run": 3,
        }.items()
    )
    assert 0 < said["postprocess_s"] < said["total_s"] <= said["seconds"]
    assert said.keys() <= REQUEST_FIELDS.keys()
    assert "secret" not in str(said)


@pytest.mark.parametrize(
    ("path", "body", "outcome", "status"),
    [
        ("/t2i", BODY | {"inference_steps": 0}, "invalid_field", 400),
        ("/t2i", BODY | {"model": "none\nsuch"}, "model_not_found", 404),
        ("/v1/jobs", {"input": BODY | {"n": 99}}, "invalid_field", 400),
        ("/v1/images/generations", {"prompt": "a secret wish", "size": "63x63"}, "invalid_field", 400),
        ("/sdapi/v1/txt2img", {"prompt": "a secret wish", "steps": 9999}, "invalid_field", 400),
    ],
)
def test_what_is_refused_has_one_too(path, body, outcome, status, client, line_of):
    name, said = line_of(lambda headers: client.post(path, json=body, headers=headers))
    assert (name, said["outcome"], said["status"], said["path"]) == ("noria.requests", outcome, status, path)
    assert said["error"]
    assert "secret" not in str(said)


def test_what_fails_has_one_too(client, engine, line_of):
    engine.fails = {"code": "generation_failed", "message": "the model failed", **FAR}
    _, said = line_of(lambda headers: client.post("/t2i", json=BODY, headers=headers))
    assert (said["outcome"], said["status"], said["error"]) == ("generation_failed", 500, "the model failed")
    assert said["total_s"] >= 0
    assert said.items() >= AS_FAR.items()


def test_where_the_time_of_what_fails_went_is_left_out_if_no_engine_tells(client, engine, line_of):
    engine.fails = {"code": "generation_failed", "message": "the model failed"}
    _, said = line_of(lambda headers: client.post("/t2i", json=BODY, headers=headers))
    assert said["total_s"] >= 0
    assert "queue_s" not in said


@pytest.fixture
def patient(monkeypatch):
    """A front end that waits for an engine's last words for as long as they take."""
    monkeypatch.setattr(engine_peer, "_LAST_WORDS_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_what_its_client_leaves_has_one_too(engine, line_of, post_and_leave):
    engine.far = FAR
    _, said = line_of(lambda headers: post_and_leave("/t2i", BODY, headers))
    assert (said["outcome"], said["n"]) == ("cancelled", 2)
    assert said.items() >= (AS_FAR | {"predicted_s": 0.5}).items()


def test_an_engine_that_does_not_answer_keeps_the_line_of_who_left_no_longer_than_a_moment(
    engine, line_of, post_and_leave
):
    engine.answers_cancel = False
    _, said = line_of(lambda headers: post_and_leave("/t2i", BODY, headers))
    assert said["outcome"] == "cancelled"
    assert "queue_s" not in said


@pytest.mark.usefixtures("patient")
def test_what_is_late_has_one_too(client, engine, line_of):
    engine.holds, engine.far = True, FAR
    _, said = line_of(lambda headers: client.post("/t2i", json=BODY | {"deadline_ms": 100}, headers=headers))
    assert (said["outcome"], said["status"], said["deadline_s"]) == ("deadline_exceeded", 504, 0.1)
    assert said.items() >= AS_FAR.items()


def test_what_never_was_a_request_for_images_has_the_line_of_the_access_log(client, line_of):
    post = lambda headers: client.post("/t2i", content=b"{", headers=headers | {"content-type": "application/json"})  # noqa: E731
    name, said = line_of(post)
    assert (name, said["event"], said["status"], said["outcome"]) == ("noria.access", "access", 400, "invalid_body")


def test_an_accepted_jobs_answer_tells_the_log_which_job_it_is(client, line_of, until):
    answers = []
    name, said = line_of(lambda headers: answers.append(client.post("/v1/jobs", json={"input": BODY}, headers=headers)))
    job_id = answers[0].json()["id"]
    assert (name, said["status"], said["job_id"]) == ("noria.access", 202, job_id)
    assert "outcome" not in said
    until(lambda: client.get(f"/v1/jobs/{job_id}").json()["completed_at"])  # nor does it go on beside the next test


def test_a_job_has_a_line_when_it_has_ended(client, said_in, until):
    with said_in("noria.requests") as lines:
        job_id = client.post("/v1/jobs", json={"input": BODY}).json()["id"]
        until(lambda: [line for line in lines() if line["request_id"] == job_id])
    (line,) = [line for line in lines() if line["request_id"] == job_id]
    assert line.items() >= {"job_id": job_id, "attempt": 1, "outcome": "ok", "n": 2, "steps_run": 3}.items()
    assert "status" not in line


def test_a_job_that_fails_has_one_line_too(client, engine, said_in, until):
    engine.fails = {"code": "generation_failed", "message": "the model failed", **FAR}
    with said_in("noria.requests") as lines:
        job_id = client.post("/v1/jobs", json={"input": BODY}).json()["id"]
        until(lambda: client.get(f"/v1/jobs/{job_id}").json()["status"] == "failed")
        until(lambda: [line for line in lines() if line["request_id"] == job_id])
    (line,) = [line for line in lines() if line["request_id"] == job_id]
    assert (line["outcome"], line["error"]) == ("generation_failed", "the model failed")
    assert line.items() >= AS_FAR.items()


def test_a_job_that_is_cancelled_while_it_is_drawn_has_one_line_too(client, engine, said_in, until):
    engine.holds = True
    with said_in("noria.requests") as lines:
        job_id = client.post("/v1/jobs", json={"input": BODY}).json()["id"]
        until(lambda: client.get(f"/v1/jobs/{job_id}").json()["status"] == "processing")
        until(lambda: engine.submitted)
        client.delete(f"/v1/jobs/{job_id}")
        until(lambda: [line for line in lines() if line["request_id"] == job_id])
        until(lambda: engine.cancelled)  # who draws it has heard of its end, and writes no line of its own
    (line,) = [line for line in lines() if line["request_id"] == job_id]
    assert line["outcome"] == "cancelled"


def test_a_job_that_is_cancelled_before_it_is_drawn_has_one_line_beside_those_of_its_post_and_delete(
    client, engine, said_in, until
):
    engine.become("dead")
    until(lambda: client.get("/readyz").status_code == 503)
    with said_in("noria.requests") as lines, said_in("noria.access") as accesses:
        job_id = client.post("/v1/jobs", json={"input": BODY}, headers={"x-request-id": "made"}).json()["id"]
        for _ in range(2):
            client.delete(f"/v1/jobs/{job_id}", headers={"x-request-id": "unmade"})
        until(lambda: [line["request_id"] for line in accesses()].count("unmade") == 2)
    (line,) = [line for line in lines() if line["request_id"] in {job_id, "made", "unmade"}]
    told = {"job_id": job_id, "outcome": "cancelled", "job_status": "canceled", "attempt": 0, "n": 2, "steps": 3}
    assert line.items() >= (told | {"model": "tiny", "model_version": "0123456789ab"}).items()
    assert 0 <= line["waited_s"] == line["seconds"]
    assert "secret" not in str(line)
    (made,) = [line for line in accesses() if line["request_id"] == "made"]
    assert made["job_id"] == job_id


@pytest.mark.parametrize(
    ("log_prompts", "told"),
    [
        ("off", {}),
        ("hash", {"prompt_sha256": hashlib.sha256(b"a secret wish").hexdigest()}),
        ("full", {"prompt": "a secret wish"}),
    ],
)
def test_prompts_are_told_as_the_operator_says(log_prompts, told, serve, new_engine, said_in, ready, until):
    with serve(Config(log_prompts=log_prompts), new_engine()) as (url, _), said_in("noria.requests") as lines:
        ready(url)
        for body in (BODY, BODY | {"n": 0}):
            httpx.post(f"{url}/t2i", json=body, verify=False, timeout=60)
        until(lambda: len(lines()) == 2)
    for line in lines():
        assert {name: text for name, text in line.items() if "prompt" in name} == told


def test_two_requests_at_once_do_not_mix(client, said_in, until):
    with said_in("noria.requests") as lines:
        threads = [
            threading.Thread(
                target=client.post,
                args=("/t2i",),
                kwargs={"json": BODY | {"seed": n}, "headers": {"x-request-id": f"r{n}"}},
            )
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len([line for line in lines() if line["request_id"].startswith("r")]) == 8)
    ours = [line for line in lines() if line["request_id"].startswith("r")]
    assert {line["request_id"]: line["seed"] for line in ours} == {f"r{n}": n for n in range(8)}
    assert json.dumps(lines())
