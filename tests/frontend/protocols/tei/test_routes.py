"""text-embeddings-inference's routes in front of a fake engine with a model of each task.

huggingface_hub's client is unmodified; of LlamaIndex' and LangChain's the bodies are those that they send.
"""

import contextlib
import math
import re

import msgspec
import numpy as np
import pytest
from huggingface_hub import InferenceClient, close_session
from huggingface_hub.errors import HfHubHTTPError

from frontends import served_models
from noria import __version__
from noria.config import Config, EngineConfig, FrontendConfig
from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.testing.fake_encoder import FAKE_ENCODER, FakeTokenizer, fake_vector, word_id


def model(name, task, *labels, activation="softmax"):
    return msgspec.structs.replace(
        FAKE_ENCODER, name=name, task=task, labels=labels, dimensions=len(labels), activation=activation, pooling=()
    )


MODELS = (
    msgspec.structs.replace(FAKE_ENCODER, prompts=(("query", "query: "),)),
    model("moods", "classification", "bad", "neutral", "good"),
    model("ranker", "reranking", "LABEL_0", activation="sigmoid"),
    model("names", "token_classification", "O", "B-PER", "I-PER"),
)


@pytest.fixture(scope="module")
def shared(folder):
    engine = EngineConfig(encoder_batch_tokens=4096)
    config = Config(frontend=FrontendConfig(max_texts=8, max_text_chars=500), engine=engine)
    with served_models(folder, *MODELS, config=config) as client:
        yield client


@pytest.fixture
def texts(shared):
    """A client; the engine behind it is reset."""
    shared.engine.reset()
    return shared


@pytest.fixture
def hub(texts):
    yield InferenceClient(str(texts.base_url))
    close_session()  # all clients of the process share one


def vector(text, dimensions=8):
    return fake_vector([1, *map(word_id, text.split()), 2], dimensions)


def softmax(logits):
    shifted = np.exp(np.float64(logits) - np.max(logits))
    return shifted / shifted.sum()


def sigmoid(logit):
    return 1 / (1 + math.exp(-logit))


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_huggingfaces_client_gets_embeddings(hub, texts):
    np.testing.assert_array_equal(hub.feature_extraction("a cat"), [vector("a cat")])
    assert texts.engine.submitted[-1].payload.normalize is True
    got = hub.feature_extraction(["a cat", "dogs"], normalize=False, dimensions=3, prompt_name="query", truncate=True)
    np.testing.assert_array_equal(got, [vector("query: a cat")[:3], vector("query: dogs")[:3]])
    assert texts.engine.submitted[-1].payload.normalize is False


def test_huggingfaces_client_gets_similarities(hub):
    source = vector("a cat")
    expected = [
        float(source @ other / np.linalg.norm(source) / np.linalg.norm(other)) for other in map(vector, ("a dog", "it"))
    ]
    np.testing.assert_allclose(hub.sentence_similarity("a cat", other_sentences=["a dog", "it"]), expected, rtol=1e-6)


@pytest.fixture
def hub_of(folder):
    """Clients of servers whose first model is another."""
    with contextlib.ExitStack() as stack:

        def make(name):
            models = sorted(MODELS, key=lambda each: each.name != name)
            web = stack.enter_context(served_models(folder, *models))
            return InferenceClient(str(web.base_url))

        yield make
        close_session()


def test_huggingfaces_client_gets_labels(hub_of):
    client = hub_of("moods")
    expected = sorted(zip(softmax(vector("so so", 3)), ("bad", "neutral", "good"), strict=True), reverse=True)
    got = client.text_classification("so so")
    assert [each.label for each in got] == [label for _, label in expected]
    np.testing.assert_allclose([each.score for each in got], [score for score, _ in expected], rtol=1e-6)
    (best,) = client.text_classification("so so", top_k=1, function_to_apply="none")
    assert (best.label, best.score) == (expected[0][1], pytest.approx(max(vector("so so", 3))))


def test_huggingfaces_client_gets_entities(hub_of):
    client, text = hub_of("names"), "c d Bob in it e it"
    labels = {word: int(np.argmax(fake_vector([word_id(word)], 3))) for word in text.split()}
    assert set(labels.values()) == {0, 1, 2}
    for found in client.token_classification(text, aggregation_strategy="none"):
        assert text[found.start : found.end] == found.word
        assert found.entity == ("O", "B-PER", "I-PER")[labels[found.word]]
        assert found.score == pytest.approx(max(softmax(fake_vector([word_id(found.word)], 3))))
    every = client.token_classification(text, aggregation_strategy="none", ignore_labels=[])
    assert [each.word for each in every] == text.split()
    groups = [(each.word, each.entity_group) for each in client.token_classification(text)]
    assert groups == [("Bob", "PER"), ("in it", "PER"), ("it", "PER")]


def test_what_llamaindex_and_langchain_send(texts):
    """`TextEmbeddingsInference` posts this to /embed and reads a list of lists, whatever the status."""
    expected = [vector("a cat").tolist(), vector("dogs").tolist()]
    np.testing.assert_allclose(post(texts, "/embed", inputs=["a cat", "dogs"], truncate=True), expected, rtol=1e-6)
    np.testing.assert_allclose(post(texts, "/", inputs=["a cat", "dogs"]), expected, rtol=1e-6)


def test_predictions_of_a_text_a_pair_and_a_batch(texts):
    text, pair = post(texts, "/predict", inputs="so so"), post(texts, "/predict", inputs=["so", "so"])
    assert text == pair == post(texts, "/predict", inputs=["so so"])  # the fake tokenizer joins pairs
    assert post(texts, "/predict", inputs=[["so so"], ["so", "so"]]) == [text, pair]
    assert [each["score"] for each in text] == sorted((each["score"] for each in text), reverse=True)
    raw = post(texts, "/predict", inputs="so so", raw_scores=True)
    assert [each["label"] for each in raw] == [each["label"] for each in text]
    np.testing.assert_allclose(sorted(each["score"] for each in raw), sorted(vector("so so", 3)), rtol=1e-6)
    (pair,) = post(texts, "/predict", inputs=["so", "so"], model="ranker")
    assert pair == {"score": pytest.approx(sigmoid(vector("so so", 1)[0])), "label": "LABEL_0"}


@pytest.mark.parametrize("path", ["/rerank", "/"])
def test_ranks_are_in_order(texts, path):
    documents = ["a", "b", "c d"]
    logits = [float(vector(f"q {each}", 1)[0]) for each in documents]
    order = sorted(range(3), key=lambda index: -logits[index])
    got = post(texts, path, query="q", texts=documents)
    assert [each["index"] for each in got] == order
    assert [each["score"] for each in got] == pytest.approx([sigmoid(logits[index]) for index in order])
    raw = post(texts, path, query="q", texts=documents, raw_scores=True, return_text=True)
    assert [each["score"] for each in raw] == pytest.approx([logits[index] for index in order])
    assert [each["text"] for each in raw] == [documents[index] for index in order]


def test_tokens_of_texts(texts):
    got = post(texts, "/tokenize", inputs=["a cat", "é"])
    assert got[0] == [
        {"id": 1, "text": "[CLS]", "special": True, "start": None, "stop": None},
        {"id": word_id("a"), "text": "a", "special": False, "start": 0, "stop": 1},
        {"id": word_id("cat"), "text": "cat", "special": False, "start": 2, "stop": 5},
        {"id": 2, "text": "[SEP]", "special": True, "start": None, "stop": None},
    ]
    assert post(texts, "/tokenize", inputs="é", add_special_tokens=False) == [got[1][1:-1]]
    assert [each["text"] for each in post(texts, "/tokenize", inputs="a", prompt_name="query")[0]][1:-1] == [
        "query:",
        "a",
    ]


def test_a_text_that_is_too_long_is_cut_where_the_client_says(texts):
    words = [f"w{number}" for number in range(100)]
    answer = texts.post("/embed", json={"inputs": " ".join(words), "truncation_direction": "Left"})
    assert answer.headers["x-noria-truncated"] == "1"
    np.testing.assert_array_equal(np.float32(answer.json()[0]), vector(" ".join(words[-62:])))
    body = {"inputs": " ".join(words), "model": "names", "truncation_direction": "left"}
    options = {"aggregation_strategy": "none", "ignore_labels": []}
    assert [each["word"] for each in post(texts, "/", **body, parameters=options)] == words[-62:]


@pytest.mark.parametrize(
    ("fields", "missing"),
    [({}, "texts is missing."), ({"documents": ["a"]}, None), ({"documents": ["a"], "texts": ["b"]}, None)],
)
def test_a_body_with_a_query_has_texts_or_documents(texts, fields, missing):
    answer = texts.post("/rerank", json={"model": "ranker", "query": "q"} | fields)
    if missing is None:
        assert isinstance(answer.json(), dict) is ("texts" not in fields)
    else:
        assert answer.status_code == 422 and missing in answer.text


def test_the_documented_inputs_are_those_of_each_route(texts):
    schemas = texts.get("/openapi.json").json()["components"]["schemas"]
    text = {"type": "string", "minLength": 1, "maxLength": 500}
    several = {"type": "array", "minItems": 1, "maxItems": 8}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    pair = {"type": "array", "minItems": 1, "maxItems": 2, "items": text}
    with_ids = [text, several | {"items": text}, ids, several | {"items": ids}]
    for body, forms in (
        ("EmbedRequestBody", with_ids),
        ("EncodeRequestBody", with_ids),
        ("PredictRequestBody", [text, pair, several | {"items": pair}]),
        ("TokenizeRequestBody", with_ids[:2]),
        ("TokenClassificationRequestBody", with_ids[:2]),
    ):
        assert schemas[body]["properties"]["inputs"]["anyOf"] == forms
    sentences = schemas["SimilarityInputs"]["properties"]
    assert (sentences["source_sentence"], sentences["sentences"]) == (text, with_ids[1])
    ranked = schemas["RerankRequestBody"]["properties"]
    assert ranked["query"] | text == ranked["query"] and ranked["texts"] | with_ids[1] == ranked["texts"]


def test_info_and_health(texts):
    assert texts.get("/info").json() == {
        "model_id": "fake-encoder",
        "model_sha": FAKE_ENCODER.fingerprint,
        "model_dtype": "int8",  # the engine's precision
        "served_model_name": "fake-encoder",
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_concurrent_requests": None,
        "max_input_length": 64,
        "max_batch_tokens": 4096,
        "max_batch_requests": None,
        "max_client_batch_size": 8,
        "auto_truncate": True,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    health = texts.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert "text/html" in texts.get("/").headers["content-type"]
    assert texts.put("/").headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/embed", {"inputs": "a"}, {"truncat": True, "user": "ann", "extra": None}),
        ("/predict", {"inputs": "a", "model": "moods", "parameters": {}}, {"parameters": {"k": 0}, "options": {}}),
        ("/rerank", {"query": "q", "texts": ["a", "b"]}, {"documents": [], "return_documents": True, "top_n": None}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, {"parameters": {"wait": 1}}),
        ("/tokenize", {"inputs": "a"}, {"return_ids": True}),
        ("/", {"inputs": "a"}, {"raw_scores": True, "parameters": None}),
        ("/", {"inputs": ["a"], "model": "names"}, {"parameters": {"stride": 2}}),
    ],
)
def test_unknown_fields_are_ignored_as_in_tei(texts, path, body, ignored):
    expected, answer = texts.post(path, json=body), texts.post(path, json=body | ignored)
    assert (answer.status_code, answer.json()) == (200, expected.json())


@pytest.mark.parametrize(("top_n", "num_ranks"), [(1, 1), (2, 2), (9, 3), (0, 3), (-1, 3)])
def test_top_n_ranks_are_returned(texts, top_n, num_ranks):
    body = {"query": "q", "texts": ["a", "b", "c"]}
    ranks = texts.post("/rerank", json=body).json()
    assert texts.post("/rerank", json=body | {"top_n": top_n}).json() == ranks[:num_ranks]


def test_hugging_faces_client_for_javascript_gets_a_batch(texts):
    headers = {"User-Agent": "@huggingface/inference/4.13.0"}
    body = {"inputs": "a", "model": "moods"}
    assert texts.post("/", json=body, headers=headers).json() == [texts.post("/", json=body).json()]


@pytest.mark.parametrize(
    ("body", "headers"), [({"parameters": {"num_inference_steps": 4}}, {}), ({}, {"Accept": "image/png"})]
)
def test_a_client_that_wants_an_image_of_the_root_is_told_the_route(texts, body, headers):
    answer = texts.post("/", json={"inputs": "a red circle"} | body, headers=headers)
    assert (answer.status_code, "POST /t2i" in answer.json()["error"]) == (501, True)
    assert not texts.engine.submitted


BAD = [
    ("/embed", {"inputs": ""}, 400, "Empty", "text 0 is empty"),
    ("/embed", {"inputs": "a" * 501}, 422, "Validation", "has 501 characters; allowed are at most 500"),
    ("/embed", {"inputs": [["a", "b"]]}, 422, "Validation", "inputs[0][0] is 'a'; allowed is an integer."),
    ("/embed", {"inputs": ["a", 1]}, 422, "Validation", "inputs mixes texts and token ids"),
    ("/embed", {"inputs": "w " * 100, "truncate": False}, 422, "Validation", "has 102 tokens"),
    ("/embed", {"inputs": "a\0"}, 422, "Tokenizer", "cannot be tokenized"),
    ("/embed", {"inputs": "a", "model": "moods"}, 424, "Backend", "needs an embedding model: 'fake-encoder'"),
    ("/embed", {"inputs": "a", "model": "other"}, 404, "Validation", "is not served here"),
    ("/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation", "a list of 3 texts"),
    ("/predict", {"inputs": ["a", ["b"]]}, 422, "Validation", "inputs mixes texts and lists"),
    ("/predict", {"inputs": [["a", ""]]}, 400, "Empty", "text 0 is a pair with an empty text"),
    ("/predict", {"inputs": "a", "parameters": {"top_k": 0}}, 422, "Validation", "top_k: Expected `int` >= 1"),
    ("/rerank", {"query": "q", "texts": []}, 400, "Empty", "0 texts"),
    ("/rerank", {"texts": ["a"]}, 422, "Validation", "query is missing"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", "sentences is empty"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [None]}}, 422, "Validation",
     "inputs.sentences[0] is null; allowed is a string."),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "error_type", "says"), BAD)
def test_a_bad_request_says_what_is_wrong(texts, path, body, status, error_type, says):
    answer = texts.post(path, json=body)
    error = answer.json()
    assert (answer.status_code, error.keys(), error["error_type"]) == (status, {"error", "error_type"}, error_type)
    assert says in error["error"]
    assert not texts.engine.submitted


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"inputs": NaN}', "no JSON numbers"),
        (b"", "empty"),
        (b"[]", "object"),
        (b'{"inputs": "\\ud83d"}', "in pairs only"),
    ],
)
def test_what_is_no_json_object_is_invalid(texts, content, says):
    answer = texts.post("/", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    assert says in answer.json()["error"]


@pytest.mark.parametrize(
    ("code", "status", "error_type"),
    [("queue_full", 429, "Overloaded"), ("generation_failed", 424, "Backend"), ("deadline_exceeded", 504, "Backend")],
)
def test_an_engines_error_has_the_protocols_status(hub, texts, code, status, error_type):
    texts.engine.failure = {"code": code, "message": "no luck", "retry_after_s": 2.5}
    with pytest.raises(HfHubHTTPError, match="no luck") as raised:
        hub.feature_extraction("a")
    assert (raised.value.response.status_code, raised.value.response.json()["error_type"]) == (status, error_type)
    assert raised.value.response.headers["retry-after"] == "3"


def test_a_text_without_tokens_is_an_error_of_the_tokenizer(texts, monkeypatch):
    monkeypatch.setattr(FakeTokenizer, "_encode", lambda *_: TokenizedText(0, b""))
    answer = texts.post("/embed", json={"inputs": " "})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Tokenizer")
    assert re.match("text 0 has no tokens: the tokenizer of fake-encoder", answer.json()["error"])
