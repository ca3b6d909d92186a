"""Every image request is counted once, by its outcome."""

import contextlib

import httpx
import pytest

from metrics_page import samples_of
from noria.config import Config
from waiting import wait_until


def counts(client):
    """The nonzero values of `noria_requests_total` and `noria_rejected_total`, by name, model and outcome or reason."""
    return {
        (sample.name.split("_")[1], *(sample.labels[label] for label in sample.labels)): sample.value
        for sample in samples_of(client.get("/metrics").text, "noria_requests", "noria_rejected")
        if sample.value
    }


@contextlib.contextmanager
def counting(client):
    """Yields a dictionary, which at the end of the context holds what was counted within it."""
    before, found = counts(client), {}
    yield found
    found |= {key: value - before.get(key, 0) for key, value in counts(client).items() if value != before.get(key, 0)}


@pytest.fixture
def loading(serve, new_engine):
    """A front end whose engine has never been ready."""
    engine = new_engine("loading")
    with serve(Config(), engine) as (url, _), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        wait_until(lambda: client.get("/readyz").json()["engines"][0]["state"] == "loading")
        yield client, engine


def test_requests_rejected_before_any_model_is_known_are_counted(loading):
    client, _ = loading
    for path, body in (
        ("/t2i", {"prompt": "p"}),
        ("/t2i", {"prompt": "p", "model": "tiny"}),
        ("/v1/images/generations", {"prompt": "p"}),
        ("/v1/jobs", {"input": {"prompt": "p"}}),
        ("/sdapi/v1/txt2img", {"prompt": "p"}),
    ):
        with counting(client) as found:
            assert client.post(path, json=body).status_code == 503
        assert found == {(name, "other", "engine_unavailable"): 1 for name in ("requests", "rejected")}, path


def test_requests_for_unknown_models_are_counted_under_one_name(client):
    with counting(client) as found:
        for k in range(10):
            assert client.post("/t2i", json={"prompt": "p", "model": f"model-{k}"}).status_code == 404
    assert found == {("requests", "other", "model_not_found"): 10, ("rejected", "other", "model_not_found"): 10}


@pytest.mark.parametrize(
    ("code", "counted_in"),
    [
        ("queue_full", {"requests", "rejected"}),
        ("generation_failed", {"requests"}),
        ("invalid_field", {"requests", "rejected"}),
    ],
)
def test_a_request_that_the_engine_rejects_or_fails_is_counted_once(client, engine, code, counted_in):
    engine.failure = {"code": code, "message": "no"}
    with counting(client) as found:
        client.post("/t2i", json={"prompt": "p"})
    assert found == {(name, "tiny", code): 1 for name in counted_in}


@pytest.fixture
def ended(captured_log_fields):
    """Waits for the log line of a job's end; the job is counted before that."""
    with captured_log_fields("noria.requests") as lines:
        yield lambda job_id: wait_until(lambda: any(line["request_id"] == job_id for line in lines()))


def test_a_rejected_job_is_counted_as_rejected(client, ended):
    headers = {"Idempotency-Key": "the-same"}
    with counting(client) as found:
        answers = [client.post("/v1/jobs", json={"input": {"prompt": p}}, headers=headers) for p in ("p", "p", "q")]
        assert [answer.status_code for answer in answers] == [202, 200, 422]
        ended(answers[0].json()["id"])
    rejected = {(name, "tiny", "idempotency_conflict"): 1 for name in ("requests", "rejected")}
    assert found == rejected | {("requests", "tiny", "ok"): 1}
