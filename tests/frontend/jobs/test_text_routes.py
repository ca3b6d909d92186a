"""POST /v1/jobs/texts over HTTP, with a real database and a fake engine."""

import asyncio
import contextlib
import io
import json
import re

import msgspec
import numpy as np
import pytest
import scipy.sparse
from starlette.requests import Request

from frontends import served_client
from noria.config import Config, FrontendConfig, JobsConfig
from noria.errors import InvalidBody
from noria.frontend.access.api_keys import generate_key
from noria.frontend.http.body import stream_bytes
from noria.frontend.jobs import text_executor as executor
from noria.frontend.jobs import text_lines as lines
from noria.protocol.text import LateInteraction, TaskAdapter
from noria.testing.fake_encoder import FAKE_ENCODER, fake_vector, word_id
from noria.testing.fake_engine import FAKE_MODEL
from waiting import wait_until

MOODS = msgspec.structs.replace(
    FAKE_ENCODER,
    name="moods",
    task="classification",
    dimensions=2,
    labels=("bad", "good"),
    activation="softmax",
    pooling=(),
    normalize=False,
)
SPARSE = msgspec.structs.replace(FAKE_ENCODER, name="sparse", task="sparse_embedding", pooling=(), dimensions=1000)
LATE = msgspec.structs.replace(
    FAKE_ENCODER,
    name="late",
    task="token_embedding",
    pooling=(),
    prompts=(("query", "q: "),),
    late_interaction=LateInteraction(8, 8, fill_id=3, fill_length=7, skipped_ids=(word_id("number"),)),
)
ONE_TASK = msgspec.structs.replace(FAKE_ENCODER, name="one-task", adapters=(TaskAdapter("separation", "", 1, 1.0),))
PLAIN, JSONL = {"Content-Type": "text/plain"}, {"Content-Type": "application/jsonl"}
TEXTS = [f"text number {index}" for index in range(10)]


@pytest.fixture
def serve_texts(new_engine, tmp_path, monkeypatch):
    """Start front ends whose jobs are in the test's folder, in chunks of 3 texts; yields a client and the engine."""
    monkeypatch.setattr(lines, "MAX_CHUNK_TEXTS", 3)
    monkeypatch.setattr(executor, "MAX_PIECE_TEXTS", 2)

    @contextlib.contextmanager
    def start(api_keys_file="", **jobs):
        engine = new_engine(models=(FAKE_MODEL, FAKE_ENCODER, MOODS, SPARSE, LATE, ONE_TASK))
        frontend = FrontendConfig(max_text_chars=200, max_texts=1, api_keys_file=api_keys_file)
        config = Config(data_dir=str(tmp_path / "data"), frontend=frontend, jobs=JobsConfig(**jobs))
        with served_client(config, engine) as client:
            yield client, engine

    return start


@pytest.fixture
def served(serve_texts):
    with serve_texts() as (client, engine):
        yield client, engine


def post(client, texts=TEXTS, headers=PLAIN, **query):
    return client.post("/v1/jobs/texts", content="\n".join(texts), headers=headers, params=query)


def ended(client, job_id, **headers):
    def has_ended():
        job = client.get(f"/v1/jobs/{job_id}", headers=headers).json()
        return job if job["completed_at"] else None

    return wait_until(has_ended)


def vectors(texts, dimensions=8):
    return np.stack([fake_vector([1, *map(word_id, text.split()), 2])[:dimensions] for text in texts])


def test_job_is_accepted_at_once_and_its_vectors_are_those_of_the_texts(served):
    client, engine = served
    answer = post(client, dimensions=3, normalize="false", truncate="true")
    job = answer.json()
    assert (answer.status_code, job["status"], job["model"]) == (202, "starting", "fake-encoder")
    options = {"dimensions": 3, "normalize": False, "truncate": True}
    assert job["input"] == {"endpoint": "/v1/jobs/texts", "num_texts": 10, **options}
    done = ended(client, job["id"])
    assert (done["status"], done["error"]) == ("succeeded", None)
    assert done["metrics"].items() >= {"num_texts": 10, "num_tokens": 50, "num_truncated": 0}.items()
    npy, jsonl = (client.get(url) for url in done["output"])
    assert npy.headers["content-length"] == str(len(npy.content))
    np.testing.assert_array_equal(np.load(io.BytesIO(npy.content)), vectors(TEXTS, 3))
    rows = [json.loads(line) for line in jsonl.text.splitlines()]
    assert [row["index"] for row in rows] == list(range(10))
    np.testing.assert_array_equal(np.float32([row["embedding"] for row in rows]), vectors(TEXTS, 3))
    assert client.head(done["output"][0]).headers["content-length"] == str(len(npy.content))
    requests = engine.submitted
    assert {(request.priority, request.payload.normalize) for request in requests} == {("low", False)}
    assert max(request.payload.num_texts for request in requests) == 2


def test_pairs_get_labels(served):
    client, _ = served
    done = ended(client, post(client, ['["a", "b"]', '{"text": "c", "id": 1}'], JSONL, model="moods").json()["id"])
    rows = [json.loads(line)["labels"] for line in client.get(done["output"][1]).text.splitlines()]
    logits = np.stack([fake_vector([1, *map(word_id, words), 2], 2) for words in ("ab", "c")])
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(np.load(io.BytesIO(client.get(done["output"][0]).content)), expected, rtol=1e-5)
    assert [row[0]["label"] for row in rows] == [("bad", "good")[index] for index in expected.argmax(1)]


def test_sparse_results_are_a_matrix_of_scipy(served):
    client, _ = served
    texts = [*TEXTS[:3], "a a", *TEXTS[3:]]
    done = ended(client, post(client, texts, model="sparse").json()["id"])
    assert [url.rpartition(".")[2] for url in done["output"]] == ["npz", "jsonl"]
    matrix = scipy.sparse.load_npz(io.BytesIO(client.get(done["output"][0]).content))
    expected = np.zeros((11, 1000), np.float32)
    for row, text in enumerate(texts):
        np.add.at(expected[row], [1, *map(word_id, text.split()), 2], 1)
    np.testing.assert_array_equal(matrix.toarray(), expected)
    rows = [json.loads(line) for line in client.get(done["output"][1]).text.splitlines()]
    assert [each["index"] for each in rows] == list(range(11))
    assert rows[3] == {"index": 3, "indices": [1, 2, word_id("a")], "values": [1, 1, 2]}


@pytest.mark.parametrize("side", [{}, {"input_type": "query"}])
def test_vectors_of_tokens_are_in_one_array_with_the_place_of_each_text(served, monkeypatch, side):
    monkeypatch.setattr("noria.frontend.jobs.text_routes._MAX_JSON_NUMBERS", 70)  # two texts at once
    client, _ = served
    texts = ["a", "b number c", "d e"]
    done = ended(client, post(client, texts, model="late", **side).json()["id"])
    ids = [[1, *map(word_id, text.replace("number", "").split()), 2] for text in texts]
    if side:
        ids = [[1, word_id("q:"), *map(word_id, text.split()), 2] for text in texts]
        ids = [own + [3] * (7 - len(own)) for own in ids]
    expected = [np.stack([fake_vector([each]) for each in own]) for own in ids]
    archive = np.load(io.BytesIO(client.get(done["output"][0]).content))
    assert archive["indptr"].tolist() == [0, *np.cumsum([len(own) for own in ids])]
    np.testing.assert_array_equal(archive["data"], np.concatenate(expected))
    rows = [json.loads(line) for line in client.get(done["output"][1]).text.splitlines()]
    for index, (row, right) in enumerate(zip(rows, expected, strict=True)):
        assert row["index"] == index
        np.testing.assert_allclose(row["embeddings"], right, rtol=1e-6)
    answer = client.get(f"/v1/jobs/{done['id']}/results.npy")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    assert "has no results.npy: its results are in results.npz and results.jsonl" in answer.text


def test_progress_and_the_end_are_events(served, monkeypatch):
    client, _ = served
    monkeypatch.setattr("noria.jobs.worker.TICK_S", 0.005)
    job_id = post(client, TEXTS * 30).json()["id"]
    ended(client, job_id)
    stream = client.get(f"/v1/jobs/{job_id}/events").text
    done = [int(each) for each in re.findall(r'"num_done":(\d+),"num_texts":300', stream)]
    assert done == sorted(set(done)) and 1 <= len(done) <= 100
    assert "/results.npy" in stream.rpartition("event: status")[2]


def test_a_job_continues_where_its_front_end_ended(serve_texts, tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "_CHUNKS_AT_ONCE", 1)
    with serve_texts() as (client, engine):
        engine.never_answers = True
        job_id = post(client).json()["id"]
        wait_until(lambda: engine.submitted)
        vector = vectors(TEXTS)
        folder = tmp_path / "data" / "results" / job_id
        folder.mkdir(mode=0o700)
        (folder / "part-000000-3-15-0.f32").write_bytes(vector[:3].tobytes())  # as if its chunk were done
        (folder / "part-000002-3-15-0.f32").write_bytes(vector[6:9].tobytes())
    with serve_texts() as (client, engine):
        done = ended(client, job_id)
        np.testing.assert_array_equal(np.load(io.BytesIO(client.get(f"/v1/jobs/{job_id}/results.npy").content)), vector)
        assert sum(request.payload.num_texts for request in engine.submitted) == 4
        assert done["metrics"]["num_tokens"] == 50


def test_a_cancelled_job_leaves_the_engine_and_no_files(served, tmp_path):
    client, engine = served
    engine.never_answers = True
    job_id = post(client).json()["id"]
    wait_until(lambda: engine.submitted)
    folder = tmp_path / "data" / "results" / job_id
    folder.mkdir(mode=0o700)
    (folder / "part-000002-3-15-0.f32").write_bytes(b"a")  # as if a chunk were done
    assert client.delete(f"/v1/jobs/{job_id}").json()["status"] == "canceled"
    wait_until(lambda: engine.cancelled)
    wait_until(lambda: not folder.exists())
    for name in ("results.npy", "results.jsonl", "images/0"):
        assert client.get(f"/v1/jobs/{job_id}/{name}").json()["error"]["code"] == "job_not_found"


def test_a_job_waits_while_the_engine_is_full(served):
    client, engine = served
    engine.failure = {"code": "queue_full", "message": "full", "retry_after_s": 0.05}
    job_id = post(client).json()["id"]
    wait_until(lambda: len(engine.submitted) > 8)
    engine.failure = None
    assert ended(client, job_id)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("line", "query", "words"),
    [
        ("a\0b", {}, "line 8: a text cannot be tokenized for fake-encoder: NUL"),
        ("a " * 99, {"truncate": "false"}, "line 8 has 101 tokens; fake-encoder takes at most 64"),
    ],
)
def test_a_text_that_fails_names_its_line(served, line, query, words):
    client, _ = served
    job = ended(client, post(client, [*TEXTS[:7], line, *TEXTS], **query).json()["id"])
    assert (job["status"], words in job["error"]) == ("failed", True)


def test_a_text_on_which_the_model_fails_names_its_line(served):
    client, engine = served
    engine.failure = {"code": "generation_failed", "message": "text 0: the model's result is not finite"}
    job = ended(client, post(client).json()["id"])
    assert job["status"] == "failed"
    assert re.search(r"line \d+: the model's result is not finite", job["error"])


BAD_REQUESTS = [
    (["a", "", "b"], {}, "body", "line 2 is empty"),
    ([""], {}, "body", "the body is empty"),
    (["a"] * 21, {}, "body", "more than 20 lines (jobs.max_job_texts)"),
    (["a"], {"dimensions": "x"}, "dimensions", "allowed is an integer"),
    (["a"], {"dimensions": 2, "model": "moods"}, "dimensions", "is for embeddings"),
    (["a"], {"webhook": "ftp://x"}, "webhook", "http"),
    (["a"], {"webhook_events_filter": "outputs"}, "webhook_events_filter", '"completed"'),
    (["a"], {"model": "one-task", "input_type": "passage"}, "input_type", "'document'; allowed for one-task are sep"),
    (["a"], {"dimension": 2}, "dimension", "Did you mean 'dimensions'"),
]


def test_a_bad_request_is_rejected_at_once(serve_texts):
    with serve_texts(max_job_texts=20) as (client, _):
        for texts, query, param, words in BAD_REQUESTS:
            answer = post(client, texts, **query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert words in answer.json()["error"]["message"]
        assert client.get("/v1/jobs").json()["results"] == []


def test_other_bodies_models_and_sizes_are_rejected(serve_texts):
    with serve_texts(max_job_bytes=1024, max_queued_bytes=1500) as (client, engine):
        assert post(client, headers={"Content-Type": "application/json"}).status_code == 415
        assert post(client, model="tiny").json()["error"]["code"] == "model_not_found"
        assert post(client, ["a" * 100] * 11).status_code == 413
        chunked = client.post("/v1/jobs/texts", content=iter([b"a" * 100 + b"\n"] * 11), headers=PLAIN)
        assert chunked.status_code == 413
        engine.never_answers = True
        first = post(client, ["a" * 100] * 10, headers=PLAIN | {"Idempotency-Key": "k"})
        assert post(client, ["a" * 100] * 10).json()["error"]["code"] == "queue_full"
        again = post(client, ["a" * 100] * 10, headers=PLAIN | {"Idempotency-Key": "k"})
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        assert post(client, ["b"], headers=PLAIN | {"Idempotency-Key": "k"}).status_code == 422
        client.delete(f"/v1/jobs/{first.json()['id']}")
        assert post(client, ["a" * 100] * 10).status_code == 202


def test_a_body_that_stalls_is_rejected():
    async def stall():
        await asyncio.Event().wait()

    async def read(http):
        return [piece async for piece in stream_bytes(http, 9, 0.01)]

    http = Request({"type": "http", "headers": [], "state": {}}, stall)
    with pytest.raises(InvalidBody, match=r"0\.01 s; 0 bytes"):
        asyncio.run(read(http))
    assert http.state.must_close


def test_keys_pay_for_their_texts_and_see_their_own_jobs(serve_texts, tmp_path):
    (alice, alices), (bob, bobs) = generate_key("alice"), generate_key("bob")
    (tmp_path / "keys.toml").write_text(f"{alices}\ntexts_per_minute = 10\n{bobs}")
    with serve_texts(api_keys_file=str(tmp_path / "keys.toml")) as (client, engine):
        key = {"X-Api-Key": alice}
        too_many = post(client, [*TEXTS, "more"], PLAIN | key)
        assert (too_many.status_code, "allowed are 1 to 10" in too_many.text) == (400, True)
        job_id = post(client, headers=PLAIN | key).json()["id"]
        limited = post(client, headers=PLAIN | key)
        assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limited")
        url = ended(client, job_id, **key)["output"][0]
        assert client.get(url, headers=key).status_code == 200
        assert client.get(url, headers={"X-Api-Key": bob}).status_code == 404
        assert engine.submitted[0].client == "alice"
