"""The routes of sparse encoders and of those that embed tokens, in front of a fake engine with both and a reranker."""

import numpy as np
import pytest

from frontends import served_models
from noria.config import Config, FrontendConfig
from noria.frontend.services.texts import text_request
from noria.testing.fake_encoder import FAKE_ENCODER, LATE, SPARSE, fake_vector, word_id

FILL = 3


@pytest.fixture(scope="module")
def shared(folder):
    config = Config(frontend=FrontendConfig(max_texts=8, max_text_chars=500))
    with served_models(folder, FAKE_ENCODER, SPARSE, LATE, config=config) as client:
        yield client


@pytest.fixture
def texts(shared):
    """A client; the engine behind it is reset."""
    shared.engine.reset()
    return shared


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(*ids):
    return np.stack([fake_vector([each]) for each in ids])


def words(text):
    return [1, *map(word_id, text.split()), 2]


@pytest.mark.parametrize("path", ["/embed_sparse", "/"])
def test_a_sparse_embedding_has_the_numbers_that_are_not_0(texts, path):
    counts = [{1: 1, 2: 1, word_id("a"): 2, word_id("b"): 1}, {1: 1, 2: 1, word_id("c"): 1}]
    expected = [[{"index": index, "value": own[index]} for index in sorted(own)] for own in counts]
    assert post(texts, path, inputs=["a b a", "c"], model="sparse") == expected
    assert post(texts, path, inputs=[1, word_id("c"), 2], model="sparse") == expected[1:]


@pytest.mark.parametrize("path", ["/embed_all", "/"])
@pytest.mark.parametrize(
    ("side", "ids"),
    [
        ({}, words("a b")),
        ({"input_type": "query"}, [*words("q: a b"), FILL]),
        ({"task": "retrieval.passage"}, words("d: a b")),
        ({"prompt_name": "query"}, words("q: a b")),
    ],
)
def test_each_token_has_a_vector(texts, path, side, ids):
    (got,) = post(texts, path, inputs="a b", model="late", **side)
    np.testing.assert_allclose(got, vectors(*ids), atol=1e-6)


def test_texts_are_cut_to_the_length_of_their_side_and_documents_lack_tokens(texts):
    (query,) = post(texts, "/embed_all", inputs="a b c d e f", input_type="query", model="late")
    np.testing.assert_allclose(query, vectors(*words("q: a b c")), atol=1e-6)
    (document,) = post(texts, "/embed_all", inputs="the a b c", input_type="document", model="late")
    np.testing.assert_allclose(document, vectors(1, word_id("d:"), word_id("a"), 2), atol=1e-6)
    assert texts.engine.submitted[-1].payload.num_seen == (5,)
    answer = texts.post(
        "/embed_all", json={"inputs": "a b c d e", "truncate": False, "input_type": "query", "model": "late"}
    )
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")


def test_vectors_that_are_too_many_for_a_response_are_rejected(texts, monkeypatch):
    monkeypatch.setattr(text_request, "MAX_TOKEN_NUMBERS", 8 * 6)
    post(texts, "/embed_all", inputs=["a", "b"], model="late")
    answer = texts.post("/embed_all", json={"inputs": ["a", "b c"], "model": "late"})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    assert "the texts have 7 tokens; of late a request may have the vectors of 6." in answer.json()["error"]


def test_documents_are_ranked_by_the_vectors_of_their_tokens(texts):
    documents = ["a", "x y", "b the"]
    query = vectors(*words("q: a b"), FILL)
    kept = [words("d: a"), words("d: x y"), [*words("d: b")]]
    sums = [float((query @ vectors(*own).T).max(1).sum()) for own in kept]
    order = sorted(range(3), key=lambda index: -sums[index])
    ranks = post(texts, "/rerank", query="a b", texts=documents, model="late")
    assert [each["index"] for each in ranks] == order
    assert [each["score"] for each in ranks] == pytest.approx([sums[index] for index in order], abs=1e-5)
    results = post(texts, "/v1/rerank", query="a b", documents=documents, model="late")["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx(
        [max(0, sums[index] / 6) for index in order], abs=1e-6
    )


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"texts": []}, 400, "the request has 0 texts; allowed are 1 to 8."),
        ({"texts": ["a"] * 9}, 422, "the request has 9 texts; allowed are 1 to 8."),
        ({"texts": ["a", ""]}, 400, "text 1 is empty."),
        ({"texts": ["a"], "query": ""}, 400, "the query is empty."),
        ({"texts": ["a", "b c d"]}, 422, "text 1 has 6 tokens; late takes at most 5."),
        ({"texts": ["a"], "query": "a b c d"}, 422, "the query has 7 tokens; late takes at most 6."),
    ],
)
def test_errors_of_a_ranking_count_and_number_its_documents(texts, body, status, says):
    post(texts, "/rerank", query="q", texts=["a"] * 8, model="late")
    answer = texts.post("/rerank", json={"query": "q", "model": "late", "truncate": False} | body)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


def test_the_open_inference_protocol_has_the_zeros_up_to_a_limit(texts, monkeypatch):
    body = {"inputs": [{"name": "TEXT", "shape": [2], "datatype": "BYTES", "data": ["a b a", "c"]}]}
    output = post(texts, "/v2/models/sparse/infer", **body)["outputs"][0]
    assert (output["name"], output["shape"]) == ("embedding", [2, SPARSE.dimensions])
    dense = np.reshape(output["data"], output["shape"])
    assert dense[0, word_id("a")] == 2
    assert dense.sum() == 8
    monkeypatch.setattr(text_request, "MAX_TOKEN_NUMBERS", 2 * 6 * 8)
    late = post(texts, "/v2/models/late/infer", **body, parameters={"input_type": "query"})["outputs"]
    assert [(each["name"], each["shape"]) for each in late] == [("embedding", [2, 6, 8]), ("num_tokens", [2])]
    monkeypatch.setattr(text_request, "MAX_TOKEN_NUMBERS", 2 * 5 * 8 - 1)
    for model, shape in (("late", [2, 5, 8]), ("sparse", [2, SPARSE.dimensions])):
        answer = texts.post(f"/v2/models/{model}/infer", json=body)
        assert answer.status_code == 400
        assert f"would have the shape {shape}" in answer.json()["error"]
