"""The rerankers' API of Jina, Cohere and vLLM in front of a fake engine with a reranker and an embedding model.

The bodies are those that Open WebUI, Dify and RAGFlow send; `tests/clients` has clients that install.
"""

import math

import msgspec
import numpy as np
import pytest

from frontends import served_models
from noria.config import Config, FrontendConfig
from noria.frontend.services.texts import text_request
from noria.protocol.text import PairTemplate
from noria.testing.fake_encoder import FAKE_ENCODER, fake_vector, word_id

RANKER = msgspec.structs.replace(
    FAKE_ENCODER, name="ranker", task="reranking", labels=("LABEL_0",), dimensions=1, pooling=()
)  # its activation is the identity: the model's own scores are logits
JUDGE = msgspec.structs.replace(
    RANKER,
    name="judge",
    template=PairTemplate(("Judge: ", " Q ", " D ", " end"), ("instruction", "query", "document"), "a b"),
)
DOCUMENTS = ["a", "b", "c d", "it"]
FORM = ["/v1/rerank", "/v2/rerank", "/rerank", "/"]


@pytest.fixture(scope="module")
def shared(folder):
    config = Config(frontend=FrontendConfig(max_texts=8, max_text_chars=500))
    with served_models(folder, FAKE_ENCODER, RANKER, JUDGE, config=config) as client:
        yield client


@pytest.fixture
def texts(shared):
    """A client; the engine behind it is reset."""
    shared.engine.reset()
    return shared


def logit(document):
    return float(fake_vector([1, *map(word_id, f"q {document}".split()), 2], 1)[0])


ORDER = sorted(range(4), key=lambda index: -logit(DOCUMENTS[index]))
SCORES = [1 / (1 + math.exp(-logit(document))) for document in DOCUMENTS]


def post(http, path="/v1/rerank", **body):
    answer = http.post(path, json={"query": "q", "documents": DOCUMENTS} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", FORM)
def test_documents_are_in_order_with_scores_from_0_to_1(texts, path):
    got = post(texts, path, model="ranker", top_n=4)
    assert got.keys() == {"id", "model", "results", "usage", "meta"}
    assert [each["index"] for each in got["results"]] == ORDER
    assert [each["relevance_score"] for each in got["results"]] == pytest.approx([SCORES[index] for index in ORDER])
    assert all(each.keys() == {"index", "relevance_score"} for each in got["results"])
    num_tokens = sum(3 + len(document.split()) for document in DOCUMENTS)
    assert got["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert got["meta"] == {
        "api_version": {"version": "2" if path == "/v2/rerank" else "1"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": num_tokens, "output_tokens": 0},
    }


@pytest.mark.parametrize(("top_n", "num_results"), [(1, 1), (3, 3), (9, 4), (0, 4), (None, 4)])
def test_the_best_top_n_are_returned(texts, top_n, num_results):
    assert [each["index"] for each in post(texts, top_n=top_n)["results"]] == ORDER[:num_results]


def test_documents_may_be_objects_and_are_returned_on_request(texts):
    objects = [{"text": document, "title": "ignored"} for document in DOCUMENTS[:2]]
    got = post(texts, documents=[*objects, *DOCUMENTS[2:]], return_documents=True, rank_fields=["text"])
    assert [each["document"] for each in got["results"]] == [{"text": DOCUMENTS[index]} for index in ORDER]


def test_ragflow_gets_scores_and_the_count_of_tokens(texts):
    as_jina = {"model": "ranker", "query": "q", "documents": DOCUMENTS, "top_n": len(DOCUMENTS)}
    of_jina = texts.post("/v1/rerank", json=as_jina).json()
    as_xinference = {"return_documents": "true", "return_len": "true"}
    of_xinference = post(texts, model="ranker", **as_xinference)
    for answer in (of_jina, of_xinference):
        scores = np.zeros(len(DOCUMENTS))
        for each in answer["results"]:
            scores[each["index"]] = each["relevance_score"]
        np.testing.assert_allclose(scores, SCORES)
    tokens = of_xinference["meta"]["tokens"]
    assert of_jina["usage"]["total_tokens"] == tokens["input_tokens"] + tokens["output_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "headers", "priority", "deadline_s"),
    [
        ({"priority": "high", "deadline_ms": 5000}, {}, "high", 5),
        ({"priority": 0}, {}, "normal", None),  # Cohere's: a lower number is more urgent, 0 the default
        ({}, {"X-Noria-Priority": "low", "X-Noria-Deadline-Ms": "5000"}, "low", 5),
    ],
)
def test_the_engine_is_asked_for_the_urgency(texts, body, headers, priority, deadline_s):
    answer = texts.post("/v2/rerank", json={"query": "q", "documents": ["a"]} | body, headers=headers)
    assert answer.status_code == 200, answer.text
    request = texts.engine.submitted[-1]
    assert (request.priority, request.deadline_s) == (priority, deadline_s and pytest.approx(deadline_s, abs=0.5))


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
@pytest.mark.parametrize(("body", "instruction"), [({}, "a b"), ({"instruction": "is it"}, "is it")])
def test_the_engine_gets_the_text_that_the_template_makes(texts, path, body, instruction):
    kind = {"texts": ["d"]} if path == "/rerank" else {"documents": ["d"]}
    answer = texts.post(path, json={"query": "q", "model": "judge"} | kind | body)
    assert answer.status_code == 200, answer.text
    ids = np.frombuffer(texts.engine.submitted[-1].payload.token_ids, "<u2").tolist()
    assert ids == [1, *map(word_id, f"Judge: {instruction} Q q D d end".split()), 2]


def test_a_reranker_with_a_template_takes_pairs_but_tokenizes_texts(texts):
    answer = texts.post("/predict", json={"inputs": "a", "model": "judge"})
    assert (answer.status_code, answer.json()["error"]) == (
        422, "text 0 is a text alone; judge takes pairs of a query and a document."
    )  # fmt: skip
    tokens = texts.post("/tokenize", json={"inputs": "a", "model": "judge"}).json()
    assert [each["text"] for each in tokens[0]] == ["[CLS]", "a", "[SEP]"]


def test_a_query_that_is_repeated_too_often_is_rejected(texts, monkeypatch):
    monkeypatch.setattr(text_request, "MAX_FILLED_CHARS", 20)
    post(texts, model="judge", query="q" * 6, documents=["a", "b"], instruction="abc")
    body = {"model": "judge", "query": "q" * 6, "documents": ["a", "b"], "instruction": "abcd"}
    answer = texts.post("/v1/rerank", json=body)
    assert (answer.status_code, "have 22 characters; allowed are at most 20." in answer.text) == (400, True)


BAD = [
    ({"instruction": "a"}, 400, "instruction is for rerankers whose template has one; ranker has none."),
    ({"model": "judge", "instruction": "a" * 501}, 400, "instruction has 501 characters; allowed are at most 500"),
    ({"query": ""}, 400, "query is empty."),
    ({"documents": []}, 400, "documents is empty"),
    ({"documents": ["a", {"text": ""}]}, 400, "documents[1] is empty; leave it out."),
    ({"documents": [{"title": "a"}]}, 400, "documents[0].text is missing."),
    ({"documents": "a"}, 400, "documents is"),
    ({"documents": ["a"] * 9}, 400, "9 texts; allowed are 1 to 8"),
    ({"documents": ["a" * 501]}, 400, "501 characters; allowed are at most 500"),
    ({"documents": ["a " * 99], "truncate": False}, 400, "takes at most 64"),
    ({"rank_fields": ["title", "text"]}, 400, 'allowed is a list of "text"'),
    ({"max_tokens_per_doc": 63}, 400, "allowed is at least 64, to which ranker cuts the pair"),
    ({"model": "fake-encoder"}, 400, "this route needs a reranking model or a model that embeds tokens: 'ranker'"),
    ({"model": "none"}, 404, "'none'"),
]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(("body", "status", "says"), BAD)
def test_an_error_has_the_words_where_each_client_reads_them(texts, path, body, status, says):
    answer = texts.post(path, json={"query": "q", "documents": DOCUMENTS} | body)
    error = answer.json()
    assert (answer.status_code, error.keys()) == (status, {"message", "detail", "error"}), error
    assert says in error["message"] == error["detail"] == error["error"]["message"]
    assert not texts.engine.submitted


def test_max_tokens_that_cut_nothing_are_accepted(texts):
    assert post(texts, max_tokens_per_doc=4096) | {"id": ""} == post(texts) | {"id": ""}


def test_an_error_of_documents_at_text_embeddings_inferences_route_is_in_its_form(texts):
    answer = texts.post("/rerank", json={"query": "q", "documents": [""]})
    assert (answer.status_code, answer.json()) == (
        400,
        {"error": "documents[0] is empty; leave it out.", "error_type": "Empty"},
    )
