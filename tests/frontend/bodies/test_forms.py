"""Forms with files, by OpenAI's edits."""

import base64
import io

import openai
import pytest
from PIL import Image

from uploads import file_of, left_half, photo

PHOTO = file_of(photo())
SIZE = photo().size


def transparent_left():
    mask = Image.new("RGBA", SIZE, "black")
    mask.paste((255, 255, 255, 0), (0, 0, 32, 48))
    return file_of(mask)


def test_openais_client_edits(openai_client, engine):
    answer = openai_client.images.edit(
        image=PHOTO, mask=transparent_left(), prompt="a red bicycle", model="noria", n=2, size="auto",
        output_format="webp", response_format="b64_json", quality="high", background="auto", input_fidelity="high",
        user="me", extra_body={"seed": 5, "strength": 0.5, "inference_steps": 6, "metadata": False},
    )  # fmt: skip
    assert [image.seed for image in answer.data] == [5, 6]
    file = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
    assert (file.format, file.size, answer.size) == ("WEBP", SIZE, "64x48")
    (request,), (data,) = engine.submitted, engine.data
    assert (request.payload.strength, request.payload.n, request.payload.inference_steps) == (0.5, 2, 6)
    assert data == photo().tobytes() + left_half().tobytes()


def test_openais_client_edits_a_list_of_one_and_streams(openai_client, engine):
    events = list(openai_client.images.edit(image=[PHOTO], prompt="p", size="32x16", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    (request,) = engine.submitted
    assert (request.payload.width, request.payload.height, request.payload.strength) == (32, 16, 0.8)


@pytest.mark.parametrize(
    ("arguments", "param", "says"),
    [
        ({"image": [PHOTO, PHOTO]}, "image", "image is there 2 times"),
        ({"mask": file_of(left_half())}, "mask", "no transparency"),
        ({"mask": file_of(Image.new("RGBA", (8, 8)))}, "mask", "8 × 8"),
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"extra_body": {"strength": "much"}}, "strength", "a number"),
        ({"extra_body": {"loras": "["}}, "loras", "no JSON"),
        (
            {"extra_body": {"loras": [{"name": "a"}, {"name": "b"}]}},
            "loras",
            "send loras as JSON text: json.dumps([…])",
        ),
        ({"extra_body": {"refiner": {"start": 0.5}}}, "refiner", "send refiner as JSON text: json.dumps({…})"),
        ({"extra_body": {"reference_images": ["a"]}}, "reference_images", "is a text; send files `image` in a form."),
        ({"extra_body": {"mask": "black"}}, "mask", "is a text, since it has no filename; send a file"),
    ],
)
def test_edits_that_are_not_allowed(openai_client, engine, arguments, param, says):
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.images.edit(**{"image": PHOTO, "prompt": "p"} | arguments)
    assert raised.value.param == param
    assert says in str(raised.value)
    assert engine.submitted == []


def test_numbers_of_forms_are_read_as_people_write_them(client, engine):
    form = {"prompt": " p", "strength": ".7", "n": " 1", "guidance_scale": "2.5 ", "output_compression": " 9"}
    response = client.post("/v1/images/edits", data=form, files={"image": ("a.png", PHOTO)})
    assert response.status_code == 200, response.text
    payload = engine.submitted[0].payload
    assert (payload.prompt, payload.strength, payload.guidance_scale) == (" p", 0.7, 2.5)


def test_edits_read_loras_as_json(client, engine):
    form = {"prompt": "p", "loras": '[{"name": "ink"}]'}
    response = client.post("/v1/images/edits", data=form, files={"image": ("a.png", PHOTO)})
    assert response.json()["error"]["code"] == "lora_not_found"


FORM = 'multipart/form-data; boundary="b"'
FILE = b'--b\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\nx\r\n'
PART = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\nx\r\n'


@pytest.mark.parametrize(
    ("content_type", "body", "status", "says"),
    [
        ("application/json", b"{}", 415, "send multipart/form-data"),
        ("multipart/form-data", b"", 400, "Missing boundary"),
        (FORM, b"", 400, "image is missing"),
        (FORM, b"nothing", 400, "Invalid multipart data"),
        (FORM, FILE % b"image" + (FILE % b"mask") * 2 + b"--b--", 400, "mask is there 2 times; one is allowed."),
        (FORM, FILE % b"image" + (FILE % b"ip_adapter_image") * 2 + b"--b--", 400, "image is there 2 times; one"),
        (FORM, PART % b"n" * 2 + b"--b--", 400, "'n' is there twice"),
        (FORM, b"".join(PART % str(number).encode() for number in range(70)) + b"--b--", 400, "Too many fields"),
        (FORM, PART % b"n" + b"\r\n--bx" * 100 + b"\r\n--b--", 400, "101 boundaries; at most 20 files"),
        (
            FORM,
            (PART % b"prompt").replace(b"x", b"x" * 100_000) + b"--b--",
            400,
            "A part without a filename is a text.",
        ),
        (FORM, (PART % b"prompt").replace(b"x", b"\xff") + b"--b--", 400, "image is missing"),
        (f"{FORM}; charset=unicode_escape", b"", 400, "send utf-8"),
        (FORM, b"--b\r\n" + b"X: y\r\n" * 1000 + b"\r\nx\r\n--b--", 400, "Invalid multipart data"),
    ],
)
def test_forms_that_are_none(client, engine, content_type, body, status, says):
    response = client.post("/v1/images/edits", content=body, headers={"content-type": content_type})
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
    assert engine.submitted == []


def test_variations_are_not_supported(openai_client):
    with pytest.warns(DeprecationWarning, match="deprecated"), pytest.raises(openai.InternalServerError) as raised:
        openai_client.images.create_variation(image=PHOTO)
    assert raised.value.status_code == 501
    assert "/v1/images/edits" in str(raised.value)
