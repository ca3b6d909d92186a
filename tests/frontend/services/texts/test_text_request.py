"""Requests for texts: their limits, and the part that the engine gets, by POST /v1/embeddings."""

import base64
import concurrent.futures
import io

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from noria.errors import InvalidField, RateLimited
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.http.body import MAX_LARGE_BODIES_PER_CLIENT
from noria.frontend.protocols.openai.embeddings import EmbeddingsRequestBody, as_settings
from noria.frontend.services.texts.image_inputs import ImageInputs
from noria.frontend.services.texts.text_request import TextRequestSettings, role_of, with_prompt
from noria.testing.fake_encoder import FAKE_ENCODER, IMAGES
from uploads import b64, file_of
from waiting import wait_until


def png(width, height, colour=(200, 100, 50)):
    return b64(file_of(Image.new("RGB", (width, height), colour)))


PIXEL = png(1, 1)


def post(texts, **body):
    return texts.post("/v1/embeddings", json=body)


def test_the_first_text_of_a_ranking_is_its_query_and_the_others_are_documents():
    ranking = TextRequestSettings(inputs=["q", "a", "b"], is_ranking=True, role="query")
    assert [ranking.role_at(index) for index in range(3)] == ["query", "document", "document"]
    assert [ranking.name(index) for index in range(3)] == ["the query", "text 0", "text 1"]
    others = TextRequestSettings(inputs=["a", "b"], images={1: "b64"}, role="document")
    assert [others.role_at(index) for index in range(3)] == ["document"] * 3
    assert [others.name(index) for index in range(2)] == ["text 0", "text 2"]  # between them is an image


@pytest.mark.parametrize(
    ("input_type", "task", "role"),
    [
        (None, None, None),
        ("query", None, "query"),
        ("search_document", None, "document"),
        (None, "retrieval.query", "query"),
        ("document", "retrieval.passage", "document"),
        (None, "classification", None),
    ],
)
def test_the_side_of_a_search_is_that_of_all_fields_that_name_one(input_type, task, role):
    assert role_of(input_type, task) == role


def test_a_body_with_images_may_be_longer_than_one_of_texts(texts):
    noise, file = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8), io.BytesIO()
    Image.fromarray(noise).resize((400, 400), Image.Resampling.NEAREST).save(file, "png", compress_level=0)
    body = {"model": "clip", "input": [{"image": base64.b64encode(file.getvalue()).decode()}]}
    assert post(texts, **body).status_code == 200
    body["input"] += ["a" * 90_000] * 7
    assert post(texts, **body).status_code == 413


@pytest.mark.parametrize(
    ("image", "status", "says"),
    [
        ("https://example.com/a.png", 422, "which is not fetched: the server reads neither URLs nor paths"),
        ("a!", 422, "input[0].image is 'a!', which is not base64"),
        ("", 422, "input[0].image is no PNG, WebP or JPEG: it is empty"),
        (base64.b64encode(b"GIF89a" + bytes(20)).decode(), 422, "input[0].image is no PNG, WebP or JPEG: it is GIF"),
        (PIXEL[:60], 422, "input[0].image is damaged"),
        (png(1, 5000), 422, "has 1 × 5000 pixels, so that it would be resized to 4 × 20000; at most 16383 pixels a"),
    ],
)
def test_an_image_that_cannot_be_read_says_what_is_wrong(texts, image, status, says):
    answer = post(texts, model="clip", input=[{"image": image}, "a"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "input")
    assert says in answer.json()["error"]["message"]
    assert not texts.engine.submitted


@pytest.mark.parametrize("has_image", [False, True], ids=["texts", "images"])
def test_long_bodies_that_wait_for_the_engine_keep_no_others_from_arriving(texts, has_image):
    engine = texts.engine
    engine.never_answers = True
    body = {"model": "clip", "input": ["a" * 70_000] + [{"image": PIXEL}] * has_image, "truncate": True}
    with concurrent.futures.ThreadPoolExecutor(MAX_LARGE_BODIES_PER_CLIENT + 1) as pool:
        answers = [pool.submit(post, texts, **body) for _ in range(MAX_LARGE_BODIES_PER_CLIENT)]
        wait_until(lambda: len(engine.submitted) == MAX_LARGE_BODIES_PER_CLIENT)
        answers.append(pool.submit(post, texts, **body))
        wait_until(lambda: len(engine.submitted) == MAX_LARGE_BODIES_PER_CLIENT + 1)
        engine.never_answers = False
        engine.set_state("dead")
        engine.set_state("ready")  # the requests are retried
    assert {each.result().status_code for each in answers} == {200}


def test_images_are_bounded_by_their_pixels_and_by_those_of_other_requests(texts, monkeypatch):
    monkeypatch.setattr("noria.frontend.services.texts.image_inputs._MAX_SOURCE_PIXELS", 30)
    answer = post(texts, model="clip", input=[{"image": png(7, 4)}, {"image": png(1, 3)}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert post(texts, model="clip", input=[{"image": png(7, 4)}, {"image": png(1, 2)}]).status_code == 200
    inputs, spec = ImageInputs(1, FairThreads(1)), replace(IMAGES, image_input=replace(IMAGES.image_input, side_px=224))
    with pytest.raises(InvalidField, match="has 446 images; of clip a request may have 445"):
        inputs.counted("a", range(446), spec)
    with (
        inputs.counted("a", range(445), spec),
        inputs.counted("a", range(445), spec),
        inputs.counted("b", range(445), spec),
        pytest.raises(RateLimited, match=r"^a has 133969920 bytes of images to embed already, and one client may have"),
        inputs.counted("a", range(445), spec),
    ):
        pass


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_a_large_response_is_encoded_beside_the_event_loop(texts, monkeypatch, encoding_format):
    inline = post(texts, input=["a cat", "dogs"], encoding_format=encoding_format).content
    monkeypatch.setattr("noria.frontend.services.texts.encoding._MAX_INLINE_NUMBERS", 0)
    assert post(texts, input=["a cat", "dogs"], encoding_format=encoding_format).content == inline


def test_what_the_engine_is_asked_for(texts):
    answer = texts.post(
        "/v1/embeddings",
        json={"input": "a cat", "dimensions": 3, "normalize": False, "priority": "low", "user": "me"},
        headers={"X-Noria-Deadline-Ms": "5000", "X-Request-Id": "abc"},
    )
    assert len(answer.json()["data"][0]["embedding"]) == 3
    (request,) = texts.engine.submitted
    payload = request.payload
    assert (request.request_id, request.model, request.priority) == ("abc", "fake-encoder", "low")
    assert 4.0 < request.deadline_s < 5.0
    assert (payload.dimensions, payload.normalize, payload.lengths, payload.id_bytes) == (3, False, (4,), 2)
    assert answer.headers["x-noria-model"] == "fake-encoder"
    timing = answer.headers["server-timing"]
    assert all(f"{stage};dur=" in timing for stage in ("tokenize", "queue", "infer", "postprocess", "predicted"))
    assert "x-noria-truncated" not in answer.headers


def test_a_text_that_is_too_long_is_cut_or_rejected(texts):
    long = " ".join(["word"] * 100)
    answer = post(texts, input=[long, "short"])
    assert answer.headers["x-noria-truncated"] == "1"
    assert texts.engine.submitted[0].payload.lengths == (64, 3)
    rejected = post(texts, input=["short", long], truncate=False)
    assert rejected.status_code == 400
    assert "text 1 has 102 tokens; fake-encoder takes at most 64" in rejected.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": ""}, "input", "text 0 is empty"),
        ({"input": []}, "input", "the request has 0 texts; allowed are 1 to 8"),
        ({"input": ["a"] * 9}, "input", "the request has 9 texts"),
        ({"input": ["a", 1]}, "input", "mixes texts and token ids"),
        ({"input": [1, 1000]}, "input", "the token id 1000; fake-encoder has the ids 0 to 999"),
        (
            {"input": 5},
            "input",
            "is 5; allowed is a string, an object or a list of strings, integers, lists of integers or objects.",
        ),
        ({"input": {"a": 1}}, "input", "input has the unknown field 'a'"),
        ({"input": ["a", {"text": "b", "image": "c"}]}, "input", "input[1] has both text and image"),
        ({"input": [{"image": PIXEL}, ""], "model": "clip"}, "input", "text 1 is empty"),
        ({"input": [{"image": PIXEL}, 5], "model": "clip"}, "input", "input mixes images and token ids"),
        ({"input": ["a", {"image": PIXEL}]}, "input", "input[1] is an image, and fake-encoder takes texts alone. Mod"),
        ({"input": ["a", None]}, "input", "input[1] is null; allowed is an integer, a string, an object or a list."),
        ({"input": [[1, True]]}, "input", "input[0][1] is true; allowed is an integer."),
        ({"input": "a\0b"}, "input", "cannot be tokenized"),
        ({}, "input", "input is missing"),
        ({"input": "a", "dimensions": 9}, "dimensions", "allowed for fake-encoder are 1 to 8"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "the model has no prompts"),
        ({"input": "a", "input_type": "clustering"}, "input_type", "'clustering'; allowed"),
        ({"input": "a", "input_type": "passage", "task": "retrieval.query"}, "task", "which differ; send one of them"),
        ({"input": "a", "task": "separation"}, "task", "allowed for fake-encoder are query and document alone"),
        ({"input": "a", "priority": "urgent"}, "priority", "urgent"),
        ({"input": "a", "deadline_ms": 0}, "deadline_ms", "allowed are 1 to"),
        ({"input": "a", "model": "tiny"}, "model", "is an image model; this route needs an embedding model"),
        ({"input": "a", "model": "other"}, "model", "allowed are 'fake-encoder', 'clip'"),
        ({"input": "a", "stop": 1}, "stop", "unknown field"),
    ],
)
def test_a_bad_request_says_what_is_wrong(texts, body, param, says):
    answer = texts.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert says in error["message"]
    assert not texts.engine.submitted


GEMMA = (("query", "task: "), ("document", "title: "))
NOMIC = (("search_query", "sq: "), ("search_document", "sd: "), ("classification", "c: "))
QWEN3 = (("query", "Instruct: "),)


@pytest.mark.parametrize(
    ("prompts", "fields", "text"),
    [
        (GEMMA, {"input_type": "query"}, "task: a"),
        (GEMMA, {"input_type": "search_document"}, "title: a"),  # Cohere's
        (GEMMA, {"task": "retrieval.passage"}, "title: a"),  # Jina's
        (NOMIC, {"input_type": "query", "task": "retrieval.query"}, "sq: a"),
        (NOMIC, {"input_type": "passage"}, "sd: a"),  # NVIDIA's
        (NOMIC, {"input_type": "passage", "prompt_name": "classification"}, "c: a"),
        (NOMIC, {"task": "classification"}, "c: a"),
        (NOMIC, {}, "sq: a"),  # the model's default prompt
        (QWEN3, {"input_type": "document"}, "a"),
        ((), {"input_type": "query"}, "a"),
    ],
)
def test_the_side_of_a_search_chooses_the_prompt(prompts, fields, text):
    default = "search_query" if prompts is NOMIC else None
    spec = msgspec.structs.replace(FAKE_ENCODER, prompts=prompts, default_prompt=default)
    settings = as_settings(msgspec.convert({"input": "a", **fields}, EmbeddingsRequestBody))
    assert with_prompt(settings, spec) == [text]


def test_one_refusal_names_all_options_and_all_types_that_are_wrong(texts):
    for wrong, says in (
        ({"dimensions": 99, "deadline_ms": 0, "prompt_name": "x"}, ("dimensions is 99", "deadline_ms is 0", "'x'")),
        ({"dimensions": "a", "stop": 1, "truncate": 3}, ("dimensions is 'a'", "'stop'", "truncate is 3")),
    ):
        message = texts.post("/v1/embeddings", json={"input": "a"} | wrong).json()["error"]["message"]
        assert all(each in message for each in says), message


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {"input": "a"}, "this route needs an embedding model: 'fake-encoder', 'clip'."),
        ("/embed", {"inputs": "a"}, "this route needs an embedding model: 'fake-encoder', 'clip'."),
        ("/predict", {"inputs": "a"}, "this route needs a classification model or a reranking model: none is served"),
        ("/tokenize", {"inputs": "a"}, "this route needs a text encoder: 'fake-encoder', 'clip'."),
        ("/v2/models/tiny/infer", {"inputs": []}, "this route needs a text encoder: 'fake-encoder', 'clip'."),
    ],
)
def test_a_text_route_does_not_take_an_image_model(texts, path, body, says):
    answer = texts.post(path, json=body | {"model": "tiny"})
    assert answer.status_code == 404
    assert f"model 'tiny' is an image model; {says}" in answer.text


def test_one_line_and_metrics_for_each_request(texts, captured_log_fields):
    def value(name):
        lines = texts.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    names = (
        'noria_texts_total{model="fake-encoder"}',
        'noria_requests_total{model="fake-encoder",outcome="ok"}',
        'noria_requests_total{model="fake-encoder",outcome="invalid_field"}',
        'noria_stage_seconds_count{model="fake-encoder",stage="tokenize"}',
        'noria_stage_seconds_count{model="fake-encoder",stage="infer"}',
        'noria_stage_seconds_count{model="fake-encoder",stage="postprocess"}',
    )
    before = [value(name) for name in names]
    with captured_log_fields("noria.requests") as lines:
        texts.post("/v1/embeddings", json={"input": ["a cat", "b"]}, headers={"X-Request-Id": "abc"})
        post(texts, input="")
        wait_until(lambda: len(lines()) == 2)
    done, rejected = lines()
    assert {
        name: done[name] for name in ("request_id", "event", "outcome", "model", "task", "num_texts", "num_tokens")
    } == {
        "request_id": "abc",
        "event": "request",
        "outcome": "ok",
        "model": "fake-encoder",
        "task": "embedding",
        "num_texts": 2,
        "num_tokens": 7,
    }
    assert (done["infer_s"], done["postprocess_s"] > 0) == (0.002, True)
    assert (rejected["outcome"], rejected["num_texts"]) == ("invalid_field", 1)
    assert [value(name) - was for name, was in zip(names, before, strict=True)] == [2, 1, 1, 1, 1, 1]
