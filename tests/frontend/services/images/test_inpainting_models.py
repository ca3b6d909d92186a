"""A model for inpainting: every route says what it needs, and the model list and the document do."""

import base64
import io

import msgspec
import pytest
from PIL import Image

from frontends import served_models
from noria.testing.fake_engine import FAKE_MODEL

INPAINTING = msgspec.structs.replace(FAKE_MODEL, name="repaint", needs_mask=True, default_strength=0.9999)


def b64(colour, mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, (64, 48), colour).save(file, format="png")
    return base64.b64encode(file.getvalue()).decode()


IMAGE, MASK = b64("red"), b64(255, "L")


@pytest.fixture(scope="module")
def server(folder):
    with served_models(folder, INPAINTING, FAKE_MODEL) as client:
        yield client


@pytest.fixture
def served(server):
    server.engine.reset()
    return server


def test_a_request_has_the_models_default_strength_and_others_need_no_mask(served):
    for body in ({"image": IMAGE, "mask": MASK}, {"model": "tiny", "image": IMAGE}, {"model": "tiny"}):
        assert served.post("/t2i", json={"prompt": "p", **body}).status_code == 200
    payloads = [each.payload for each in served.engine.submitted]
    assert [(each.strength, each.has_mask) for each in payloads] == [(0.9999, True), (0.8, False), (None, False)]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/t2i", {}, "image"),
        ("/t2i", {"strength": 0.5}, "image"),
        ("/t2i", {"image": IMAGE}, "mask"),
        ("/v1/images/generations", {}, "image"),
        ("/v1/jobs", {"input": {"prompt": "p", "image": IMAGE}}, "mask"),
        ("/sdapi/v1/txt2img", {}, "init_images"),
        ("/sdapi/v1/img2img", {"init_images": [IMAGE]}, "mask"),
    ],
)
def test_each_route_names_what_is_missing(served, path, body, field):
    response = served.post(path, json=body if "input" in body else {"prompt": "p", **body})
    assert response.status_code == 400
    assert f"{field} is missing: repaint is a model for inpainting" in response.text
    assert "/v1/images/edits" in response.text
    assert served.engine.submitted == []


def test_edits_without_a_mask_are_rejected(served):
    files = {"image": base64.b64decode(IMAGE)}
    response = served.post("/v1/images/edits", data={"prompt": "p"}, files=files)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "mask")


def test_the_model_list_and_the_document_say_it(served):
    cards = {card["id"]: card["noria"] for card in served.get("/v1/models").json()["data"]}
    starts = {
        name: (card["start_image"]["needs_mask"], card["start_image"]["default_strength"])
        for name, card in cards.items()
    }
    assert starts == {"repaint": (True, 0.9999), "tiny": (False, 0.8)}
    document = served.get("/openapi.json").json()
    assert "repaint, a model for inpainting: each of its requests needs an image and a mask" in str(document["info"])
    schemas = document["components"]["schemas"]
    assert {name: schemas[name]["required"] for name in ("ImageRequestBody", "EditsFields", "Img2Img")} == {
        "ImageRequestBody": ["image", "mask", "prompt"],
        "EditsFields": ["image", "mask", "prompt"],
        "Img2Img": ["init_images", "mask"],
    }
    for route, name in (("/t2i", "ImageRequestBody"), ("/sdapi/v1/img2img", "Img2Img")):
        assert served.post(route, json=schemas[name]["example"]).status_code == 200


def test_settings_of_a_file_are_recovered(served):
    body = {"prompt": "p", "image": IMAGE, "mask": MASK, "seed": 5}
    file = served.post("/t2i", json=body).content
    recovered = served.post("/v1/images/metadata", content=file).json()
    assert recovered["settings"]["seed"] == 5
    assert [each["field"] for each in recovered["rejected"]] == ["image", "mask"]
