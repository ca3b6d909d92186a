"""/v1/jobs over HTTP, with a real database and a fake engine."""

import contextlib
import json
import math
import threading
import time

import httpx
import pytest

import waiting
from frontends import serving
from jobs.webhook_receiver import Receiver
from noria.config import Config, FrontendConfig, JobsConfig
from noria.jobs.webhooks.signing import read_secrets, sign
from noria.observe.metrics import declarations
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until


@contextlib.contextmanager
def serving_jobs(engine, data_dir, drain_s=20.0, **jobs):
    """Start a front end with the jobs of a folder; yields a client, the engine and the server."""
    frontend = FrontendConfig(max_images=4, max_steps=100, max_prompt_chars=200, drain_s=drain_s)
    config = Config(data_dir=str(data_dir), frontend=frontend, jobs=JobsConfig(**jobs))
    with (
        serving(config, engine) as (address, server),
        httpx.Client(base_url=address, timeout=60, verify=False) as client,
    ):
        wait_until(lambda: client.get("/readyz").status_code == 200)
        yield client, engine, server


@pytest.fixture
def serve_jobs(new_engine, tmp_path):
    """Start front ends whose jobs are in the test's folder."""
    return lambda **options: serving_jobs(new_engine(), tmp_path, **options)


@pytest.fixture
def served(serve_jobs):
    with serve_jobs() as (client, engine, _):
        yield client, engine


@pytest.fixture(scope="module")
def client(folder, tmp_path_factory):
    """A client of the server of those tests that leave the engine alone."""
    with (
        FakeEngine(f"ipc://{folder}/jobs") as engine,
        serving_jobs(engine, tmp_path_factory.mktemp("jobs")) as (client, _, _),
    ):
        yield client


def post(client, headers=None, **body):
    return client.post("/v1/jobs", json={"input": {"prompt": "p", "seed": 7}} | body, headers=headers)


def ended(client, job_id):
    def has_ended():
        job = client.get(f"/v1/jobs/{job_id}").json()
        return job if job["completed_at"] else None

    return waiting.wait_until(has_ended)


def stream(client, job_id, last=None):
    """The events of a job as (id, name, data), until the end of the stream."""
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    with client.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = [frame for frame in "".join(answer.iter_text()).split("\n\n") if frame and not frame.startswith(":")]
    events = [dict(line.split(": ", 1) for line in frame.splitlines()) for frame in frames]
    return [(int(event["id"]), event["event"], json.loads(event["data"])) for event in events]


# ── Running ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_job_is_accepted_at_once_and_its_images_are_those_of_t2i(client):
    body = {"prompt": "w " * 80, "seed": 7, "n": 2, "inference_steps": 5}
    answer = client.post("/v1/jobs", json={"input": body})
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == job["urls"]["get"] == f"{client.base_url}/v1/jobs/{job['id']}"
    assert (job["status"], job["input"], job["model"]) == ("starting", body, "tiny")
    done = ended(client, job["id"])
    assert (done["status"], done["error"]) == ("succeeded", None)
    assert done["metrics"]["num_steps_run"] == done["metrics"]["num_truncated_tokens"] == 5
    assert done["metrics"]["total_time"] >= done["metrics"]["predict_time"] > 0
    single = client.post("/t2i", json=body | {"n": 1})
    for index, url in enumerate(done["output"]):
        image = client.get(url)
        assert (image.status_code, image.headers["content-type"]) == (200, "image/png")
        assert (image.content == single.content) == (index == 0)


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        *(("/noria", "/noria"), ("/a/b-c_d.e~f/", "/a/b-c_d.e~f"), ("", ""), ("/", "")),
        *(("/a, /b", "/a"), ("/a ,/b", "/a"), ("/,/b", ""), (",/b", "")),
    ],
)
def test_urls_have_the_path_below_which_a_proxy_serves(client, prefix, path):
    headers = {"X-Forwarded-Prefix": prefix, "X-Forwarded-Proto": "https", "Host": "localhost"}
    answer = client.post("/v1/jobs", json={"input": {"prompt": "p"}}, headers=headers)
    url = answer.json()["urls"]["get"]
    assert url == answer.headers["location"] == f"https://localhost{path}/v1/jobs/{answer.json()['id']}"
    client.post("/v1/jobs", json={"input": {"prompt": "p"}})
    page = client.get("/v1/jobs?limit=1", headers=headers).json()
    assert page["next"].startswith(f"https://localhost{path}/v1/jobs?")
    assert f"https://localhost{path}/t2i" in client.get("/docs", headers=headers).text


@pytest.mark.parametrize(
    "prefix", ["noria", "//evil.example", "/..", "/a/../b", "/a b", '/"><b>', "//a, /b", "/" + "a" * 300]
)
def test_a_prefix_is_a_plain_path(client, prefix):
    for method, path in (("POST", "/v1/jobs"), ("GET", "/docs")):
        answer = client.request(method, path, json={"input": {"prompt": "p"}}, headers={"X-Forwarded-Prefix": prefix})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_field")
        assert "X-Forwarded-Prefix" in answer.json()["error"]["message"]


def test_job_gets_its_random_seed_when_it_is_accepted(served):
    client, engine = served
    job = client.post("/v1/jobs", json={"input": {"prompt": "p"}}).json()
    ended(client, job["id"])
    assert job["input"]["seed"] == engine.submitted[-1].payload.seed


def test_input_can_be_a_body_of_the_openai_route(client):
    given = {"endpoint": "/v1/images/generations", "prompt": "p", "size": "32x16", "output_format": "webp"}
    job = post(client, input=given).json()
    assert job["input"]["endpoint"] == given["endpoint"]
    image = client.get(ended(client, job["id"])["output"][0])
    assert image.headers["content-type"] == "image/webp"


def test_event_stream_is_complete_and_can_be_resumed(client):
    job_id = post(client).json()["id"]
    events = stream(client, job_id)
    assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
    statuses = [data["status"] for _, name, data in events if name == "status"]
    assert statuses == ["starting", "processing", "succeeded"]
    assert events[-1][2]["output"] == ended(client, job_id)["output"]
    assert stream(client, job_id, last=1) == events[1:]
    for last in (len(events), 999):  # no more events; 204 stops reconnecting
        assert client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(last)}).status_code == 204


def test_cancelled_job_is_cancelled_in_the_engine(served):
    client, engine = served
    engine.never_answers = True
    job_id, events = post(client).json()["id"], []
    reader = threading.Thread(target=lambda: events.extend(stream(client, job_id)))
    reader.start()
    wait_until(lambda: engine.submitted)
    answer = client.delete(f"/v1/jobs/{job_id}")
    assert (answer.status_code, answer.json()["status"]) == (200, "canceled")
    reader.join()
    assert events[-1][2]["status"] == "canceled"
    wait_until(lambda: engine.cancelled)
    assert client.delete(f"/v1/jobs/{job_id}").json() == ended(client, job_id)  # a second time does nothing
    assert stream(client, job_id)[-1][2]["status"] == "canceled"


def test_failed_job_has_the_error(served):
    client, engine = served
    engine.failure = {"code": "generation_failed", "message": "the model returned NaN."}
    job = ended(client, post(client).json()["id"])
    assert (job["status"], job["error"], job["error_code"]) == (
        "failed",
        "the model returned NaN.",
        "generation_failed",
    )
    assert job["output"] is None


def test_only_its_deadline_limits_how_long_a_job_waits_in_the_engine(served):
    client, engine = served
    ended(client, post(client).json()["id"])
    assert (engine.submitted[-1].timeout_s, engine.submitted[-1].deadline_s) == (math.inf, None)
    ended(client, post(client, input={"prompt": "p", "deadline_ms": 60_000}).json()["id"])
    assert 0 < engine.submitted[-1].deadline_s < 60


def test_job_is_accepted_without_an_engine_and_runs_when_it_is_ready(served):
    client, engine = served
    engine.set_state("dead")
    wait_until(lambda: client.get("/readyz").status_code == 503)
    job_id = post(client).json()["id"]
    engine.set_state("ready")
    assert ended(client, job_id)["status"] == "succeeded"


def test_stopping_front_end_ends_its_streams(serve_jobs):
    with serve_jobs(drain_s=280.0) as (client, engine, server):
        engine.never_answers = True
        job_id = post(client).json()["id"]
        wait_until(lambda: engine.submitted)
        with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            lines = answer.iter_lines()
            assert any('"processing"' in line for line in lines)  # read before the end, which may follow at once
            server.should_exit = True
            started = time.monotonic()
            rest = list(lines)
        assert time.monotonic() - started < 140  # less than drain_s
        assert not any('"succeeded"' in line for line in rest)


# ── Lists ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pages_follow_their_cursor_to_the_oldest_job(served):
    client, _ = served
    names = [post(client).json()["id"] for _ in range(5)]
    url, found = "/v1/jobs?limit=2", []
    while url:
        page = client.get(url).json()
        found.append([job["id"] for job in page["results"]])
        post(client)  # newer jobs do not move the pages
        url = page["next"]
    assert [len(page) for page in found] == [2, 2, 1]
    assert [name for page in found for name in page] == names[::-1]


# ── Idempotency ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_idempotency_key_creates_one_job(client):
    first = post(client, headers={"Idempotency-Key": "k"})
    again = post(client, headers={"Idempotency-Key": "k"})
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    other = post(client, headers={"Idempotency-Key": "k"}, input={"prompt": "another"})
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_conflict"
    assert first.json()["id"] in other.json()["error"]["message"]


def test_full_queue_is_429_except_for_a_known_idempotency_key(serve_jobs):
    with serve_jobs(max_queued=1, concurrency=1) as (client, engine, _):
        engine.never_answers = True
        post(client)
        wait_until(lambda: engine.submitted)
        assert post(client, headers={"Idempotency-Key": "k"}).status_code == 202
        rejected = post(client)
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "queue_full")
        assert int(rejected.headers["retry-after"]) > 0
        assert post(client, headers={"Idempotency-Key": "k"}).status_code == 200


# ── Errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "input", "missing"),
        ({"input": "a red circle"}, "input", "allowed is"),
        ({"input": {}}, "input.prompt", "missing"),
        ({"input": {"prompt": "p", "width": 17}}, "input.width", "multiple of"),
        ({"input": {"prompt": "p", "stream": True}}, "input.stream", "urls.stream"),
        ({"input": {"prompt": "p", "stream": True, "width": 17}}, "input.stream", "width is 17"),
        ({"input": {"prompt": "p", "image": "no file", "width": 17}}, "input.width", "multiple of"),
        ({"input": {"prompt": "p", "endpoint": "/v1/chat"}}, "input.endpoint", "/v1/images/generations"),
        ({"input": {"prompt": "p", "endpoint": "/v1/images/generations", "size": "9x9"}}, "input.size", "at|allowed"),
        (
            {"input": {"prompt": "p", "endpoint": "/v1/images/generations", "stream": True}},
            "input.stream",
            "urls.stream",
        ),
        ({"input": {"prompt": "p"}, "webhook": 3}, "webhook", "allowed is"),
        ({"input": {"prompt": "p"}, "webhook": "ftp://example.com"}, "webhook", "http"),
        ({"input": {"prompt": "p"}, "webhook": "http://127.0.0.1:1/"}, "webhook", "not public"),
        ({"input": {"prompt": "p"}, "webhook_events_filter": ["outputs"]}, "webhook_events_filter", '"completed"'),
        ({"input": {"prompt": "p"}, "webhooks": "x"}, "webhooks", "Did you mean 'webhook'"),
    ],
)
def test_invalid_job_is_rejected_at_once(client, body, field, words):
    before = client.get("/v1/jobs?limit=1").json()["results"]
    answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert any(word in answer.json()["error"]["message"] for word in words.split("|"))
    after = client.get("/v1/jobs?limit=1").json()["results"]
    assert [job["id"] for job in after] == [job["id"] for job in before]


@pytest.mark.parametrize("path", ["", "/events", "/images/0"])
def test_unknown_job_is_404_on_every_route(client, path):
    for name in ("job_00000000000000000000000000", "x", "..%2f..%2fetc", "%00", "ü"):
        answer = client.get(f"/v1/jobs/{name}{path}")
        assert answer.status_code == 404, name
    answer = client.get(f"/v1/jobs/job_x{path}")
    assert answer.json()["error"]["code"] == "job_not_found"


def test_unknown_image_is_404(client):
    job = ended(client, post(client).json()["id"])
    for index in ("1", "-1", "x", "9" * 30, "0.png", "%00"):
        answer = client.get(f"/v1/jobs/{job['id']}/images/{index}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found"), index


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=-1", "limit=x", "limit=", "limit=1e1", "limit=٣"])
def test_invalid_limit_is_rejected(client, query):
    answer = client.get(f"/v1/jobs?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    assert "1 to 100" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "cursor", ["", "x", "====", "MTI=x", "LTE", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5", "%00", "ü", "A" * 5000]
)
def test_invalid_cursor_is_rejected(client, cursor):
    answer = client.get(f"/v1/jobs?cursor={cursor}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cursor")


def test_invalid_last_event_id_is_rejected(client):
    job_id = post(client).json()["id"]
    for last in ("-1", "x", "1.5", "9" * 30, "", "1, 2"):
        answer = client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": last})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID"), last


@pytest.mark.parametrize("key", ["", "a b", "k" * 256])
def test_invalid_idempotency_key_is_rejected(client, key):
    answer = post(client, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_deadline_counts_from_the_acceptance_of_the_job(served):
    client, engine = served
    engine.set_state("dead")
    wait_until(lambda: client.get("/readyz").status_code == 503)
    missed = declarations.DEADLINES_MISSED.labels("tiny")._value
    before = missed.get()
    job_id = post(client, input={"prompt": "p", "deadline_ms": 1}).json()["id"]
    engine.set_state("ready")
    job = ended(client, job_id)
    assert (job["status"], job["error_code"]) == ("failed", "deadline_exceeded")
    assert missed.get() - before == 1


# ── Webhooks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_webhook_is_sent_at_the_end_and_signed(serve_jobs, tmp_path):
    with Receiver() as receiver, serve_jobs(webhook_allow_private=True) as (client, _, _):
        events = ["output", "logs", "completed"]  # Replicate's, of which two never come
        job = post(client, webhook=f"{receiver.url}/hook", webhook_events_filter=events).json()
        done = ended(client, job["id"])
        wait_until(lambda: receiver.received)
    ((_, headers, body),) = receiver.received
    assert json.loads(body) == done
    signature = sign(
        read_secrets(tmp_path / "webhook-secret"), headers["webhook-id"], int(headers["webhook-timestamp"]), body
    )
    assert headers["webhook-signature"] == signature


def test_without_keys_each_address_has_its_share_of_pending_webhooks(serve_jobs):
    url = "http://127.0.0.1:1/nobody-listens"
    with serve_jobs(webhook_allow_private=True, max_pending_webhooks=4) as (client, _, _):
        first = post(client, {"X-Forwarded-For": "192.0.2.1"}, webhook=url, webhook_events_filter=["completed"])
        ended(client, first.json()["id"])
        rejected = post(client, {"X-Forwarded-For": "192.0.2.1"}, webhook=url)
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "rate_limited")
        assert "the address 192.0.2.1 has 1 pending webhooks" in rejected.json()["error"]["message"]
        assert post(client, {"X-Forwarded-For": "192.0.2.2"}, webhook=url).status_code == 202


def test_the_documented_input_is_a_body_of_either_route_without_streaming(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    forms = schemas["JobRequestBody"]["properties"]["input"]["anyOf"]
    for form, endpoint, name, more in (
        (forms[0], "/t2i", "ImageRequestBody", []),
        (forms[1], "/v1/images/generations", "GenerationsRequestBody", ["endpoint"]),
    ):
        body = schemas[name]
        assert form["properties"].keys() == body["properties"].keys() - {"stream", "partial_images"} | {"endpoint"}
        assert form["properties"]["endpoint"] == {"const": endpoint}
        assert form["required"] == [*body["required"], *more]
        assert (form["additionalProperties"], form.get("allOf")) == (False, body.get("allOf"))
    assert len(forms) == 2
