"""POST /v1/embeddings in front of a fake engine, with the unmodified openai client and without."""

import base64

import numpy as np
import openai
import pytest
from PIL import Image

from noria.testing.fake_encoder import FAKE_ENCODER, fake_vector, word_id
from uploads import b64, file_of


@pytest.fixture
def client(texts):
    return openai.OpenAI(base_url=f"{texts.base_url}/v1", api_key="none", http_client=texts, max_retries=0)


def vector(*words, dimensions=8):
    return fake_vector([1, *map(word_id, words), 2])[:dimensions]


def png(width, height, colour=(200, 100, 50)):
    return b64(file_of(Image.new("RGB", (width, height), colour)))


PIXEL = png(1, 1)


def test_the_document_has_the_bounds_of_the_model(texts):
    fields = texts.get("/openapi.json").json()["components"]["schemas"]["EmbeddingsRequestBody"]["properties"]
    text, token_ids, *_ = fields["input"]["anyOf"]
    assert (text["minLength"], token_ids["items"]["maximum"]) == (1, FAKE_ENCODER.vocab_size - 1)
    assert fields["dimensions"]["maximum"] == FAKE_ENCODER.dimensions
    assert fields["prompt_name"]["enum"][-1] is None


def test_openais_client_gets_vectors_of_texts_and_images_in_order(client, texts):
    inputs = [{"image": f"data:image/png;base64,{png(7, 4)}"}, "a cat", {"text": "dogs"}, {"image": png(4, 9, "red")}]
    answer = client.embeddings.create(model="clip", input=inputs)
    images = [fake_vector(colour * 16) for colour in ((200, 100, 50), (255, 0, 0))]
    expected = [images[0], vector("a", "cat"), vector("dogs"), images[1]]
    np.testing.assert_array_equal(np.float32([each.embedding for each in answer.data]), expected)
    assert answer.usage.total_tokens == 5 + 4 + 3 + 5
    (one,) = post(texts, model="clip", input={"image": png(4, 9, "red")}, dimensions=3).json()["data"]
    np.testing.assert_array_equal(np.float32(one["embedding"]), images[1][:3])


def post(texts, **body):
    return texts.post("/v1/embeddings", json=body)


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.NOT_GIVEN])
def test_openais_client_gets_a_vector_for_each_text(client, encoding_format):
    answer = client.embeddings.create(model="noria", input=["a cat", "dogs"], encoding_format=encoding_format)
    assert [each.index for each in answer.data] == [0, 1]
    got = [
        np.frombuffer(base64.b64decode(each.embedding), "<f4")
        if isinstance(each.embedding, str)
        else np.array(each.embedding, np.float32)
        for each in answer.data
    ]
    np.testing.assert_array_equal(got, [vector("a", "cat"), vector("dogs")])
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("fake-encoder", 7, 7)


def test_a_text_token_ids_and_lists_of_them(texts):
    one = post(texts, input="a cat").json()["data"]
    np.testing.assert_array_equal(np.float32(one[0]["embedding"]), vector("a", "cat"))
    ids = [1, word_id("a"), word_id("cat"), 2]
    assert post(texts, input=ids).json()["data"] == one
    assert post(texts, input=[ids, ids]).json()["data"][1]["embedding"] == one[0]["embedding"]


def test_an_engines_error_reaches_openais_client(client, texts):
    texts.engine.failure = {"code": "queue_full", "message": "full", "retry_after_s": 2.5}
    with pytest.raises(openai.RateLimitError) as raised:
        client.embeddings.create(model="fake-encoder", input="a")
    assert (raised.value.code, raised.value.response.headers["retry-after"]) == ("queue_full", "3")


def test_an_image_route_does_not_take_a_text_encoder(texts):
    answer = texts.post("/t2i", json={"prompt": "a", "model": "fake-encoder"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        404,
        "model 'fake-encoder' is an embedding model; this route needs an image model: 'tiny'.",
    )


def test_a_server_without_text_encoders_says_so(client, web, engine):
    answer = web.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 404
    assert (
        answer.json()["error"]["message"] == "this needs a model of kind encoder; this server has 'tiny' (diffusion)."
    )


def test_models_of_both_kinds_are_listed(texts):
    image, text, _ = texts.get("/v1/models").json()["data"]
    assert (image["noria"]["kind"], text["noria"]["kind"]) == ("diffusion", "encoder")
    assert (text["id"], text["noria"]["dimensions"], text["noria"]["max_texts"]) == ("fake-encoder", 8, 8)
    detail = texts.get("/v1/models/fake-encoder").json()
    assert (detail["noria"], detail["load"]["num_slots"]) == (text["noria"], 4)
    assert (detail["precision"]["dtype"], detail["precision"]["fidelity"]) == ("int8", 0.999)
    unknown = texts.get("/v1/models/nope")
    assert unknown.status_code == 404
    assert f"allowed are {image['id']!r}, 'fake-encoder'" in unknown.json()["error"]["message"]
