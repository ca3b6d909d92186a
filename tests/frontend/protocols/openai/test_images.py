"""The unmodified openai-python client against our routes."""

import base64
import io

import openai
import pytest
from PIL import Image


@pytest.fixture
def client(openai_client):
    return openai_client


def test_generate(client, engine):
    answer = client.images.generate(prompt="a red bicycle", model="tiny", size="32x16", extra_body={"seed": 5})
    (image,) = answer.data
    file = Image.open(io.BytesIO(base64.b64decode(image.b64_json)))
    assert (file.format, file.size, file.getpixel((0, 0))) == ("PNG", (32, 16), engine.colour(5))
    assert (image.seed, image.url) == (5, None)
    assert (answer.size, answer.output_format) == ("32x16", "png")
    assert answer.timings["denoise_s"] == 0.003
    assert answer.created > 1_700_000_000


def test_all_fields_of_openai_and_of_noria(client, engine):
    answer = client.images.generate(
        prompt="p", model="noria", n=2, size="auto", output_format="webp", output_compression=40,
        response_format="b64_json", quality="hd", style="vivid", background="auto", moderation="low", user="me",
        stream=False,
        extra_body={
            "seed": 7, "negative_prompt": "q", "inference_steps": 3, "guidance_scale": 1.5, "scheduler": "Euler",
        },
    )  # fmt: skip
    assert [image.seed for image in answer.data] == [7, 8]
    (request,) = engine.submitted
    assert (request.payload.n, request.payload.negative_prompt, request.payload.inference_steps) == (2, "q", 3)
    assert (request.payload.guidance_scale, request.payload.scheduler, request.payload.width) == (1.5, "euler", 64)


def test_compression_is_the_file_quality(client):
    sizes = []
    for quality in (1, 100):
        answer = client.images.generate(
            prompt="p", output_format="jpeg", output_compression=quality, extra_body={"seed": 5}
        )
        sizes.append(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))).quantization[0][0])
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(
    ("settings", "param", "says"),
    [
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"stream": True, "partial_images": 11}, "partial_images", "allowed are 0 to 10"),
        ({"extra_body": {"partial_images": 2}}, "partial_images", "stream is not true"),
        ({"size": "big"}, "size", '"512x512"'),
        ({"size": "33x31", "n": 9}, "n", "height is 31"),
        ({"size": "33x31"}, "size", "height is 31"),
        ({"size": "32x9999999999"}, "size", "512x512"),
        ({"output_compression": 101}, "output_compression", "101; allowed is 100 or less"),
        ({"output_format": "svg"}, "output_format", '"png"'),
    ],
)
def test_invalid_fields_are_openais_errors(client, engine, settings, param, says):
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="p", **settings)
    assert caught.value.param == param
    assert caught.value.code == "invalid_field"
    assert says in caught.value.message
    assert engine.submitted == []


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt="p", model="dall-e-3")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "'tiny'" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    assert client.models.retrieve("noria").id == "tiny"


def test_openais_client_retries_when_the_queue_is_full(client, engine):
    engine.failure = {"code": "queue_full", "message": "full", "retry_after_s": 0.1}
    with pytest.raises(openai.RateLimitError):
        client.images.generate(prompt="p")
    patient = client.with_options(max_retries=1)
    with pytest.raises(openai.RateLimitError):
        patient.images.generate(prompt="p")
    assert len(engine.submitted) == 3


def test_model_detail_has_load_and_costs(client, engine, spec):
    card = client.models.retrieve("noria")
    assert (card.id, card.owned_by, card.fingerprint) == ("tiny", "noria", spec.fingerprint)
    assert card.load == {"backlog_s": 1.5, "num_running": 2, "num_waiting": 3, "num_slots": 4}
    (costs,) = card.costs
    assert (costs["step_s"], costs["max_rows"]) == ({"1": 0.01, "2": 0.015}, 8)


def test_an_empty_text_is_a_field_that_is_left_out_as_in_a_form(web, engine):
    names = ("size", "model", "response_format", "output_format", "scheduler", "priority", "n", "seed", "stream")
    for fields in (*({name: ""} for name in names), dict.fromkeys(names, "")):
        answer = web.post("/v1/images/generations", json={"prompt": "p"} | fields)
        assert answer.status_code == 200, answer.text
    assert web.post("/v1/images/generations", json={"prompt": "p", "size": "", "quality": 3}).status_code == 400
