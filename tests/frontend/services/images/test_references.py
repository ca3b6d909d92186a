"""Reference images in requests of every API, and in the files of images."""

import hashlib
import io

import msgspec
import openai
import pytest
from PIL import Image

from frontends import served_models
from noria.config import Config, FrontendConfig
from noria.frontend.engines.versions.version_choice import RequestVersions
from noria.images.metadata_io import read_metadata
from noria.protocol.diffusion import Reference
from noria.testing.fake_engine import FAKE_MODEL
from uploads import b64, file_of, photo
from waiting import wait_until

EDITOR = msgspec.structs.replace(FAKE_MODEL, name="editor", max_references=2)
KONTEXT = msgspec.structs.replace(
    FAKE_MODEL, name="kontext", max_references=1, reference_size="preferred", multiple_px=16
)


@pytest.fixture(scope="module")
def server(folder):
    config = Config(frontend=FrontendConfig(max_body_bytes=4096, max_image_bytes=100_000))
    with served_models(folder, EDITOR, FAKE_MODEL, KONTEXT, config=config) as client:
        yield client


@pytest.fixture
def web(server):
    """A client of a server with models that take reference images, and one that takes none."""
    server.engine.reset()
    return server


@pytest.fixture
def editors(web):
    return web.engine


def digest(file):
    return hashlib.sha256(file).hexdigest()[:12]


PHOTO, OTHER = file_of(photo((72, 64))), file_of(photo((100, 65), 1))
SHOWN = photo((72, 64)).tobytes(), photo((100, 65), 1).crop((2, 0, 98, 64)).tobytes()  # sides are multiples of 8
REFERENCES = Reference(72, 64, digest(PHOTO)), Reference(96, 64, digest(OTHER))


def test_an_engine_and_the_file_get_the_references_and_their_pixels(web, editors):
    answer = web.post("/t2i", json={"prompt": "p", "reference_images": [b64(PHOTO), b64(OTHER)]})
    assert answer.status_code == 200, answer.text
    (request,), (data,) = editors.submitted, editors.data
    payload = request.payload
    assert (payload.reference_images, payload.strength) == (REFERENCES, None)
    assert (payload.width, payload.height) == (72, 64), "the size of the first one, as the model is shown it"
    assert data == b"".join(SHOWN)
    assert read_metadata(io.BytesIO(answer.content)).reference_images == REFERENCES
    assert f"Reference 1: {digest(OTHER)}" in Image.open(io.BytesIO(answer.content)).text["parameters"]
    (rejected,) = web.post("/v1/images/metadata", content=answer.content).json()["rejected"]
    assert (rejected["field"], rejected["value"]) == ("reference_images", [digest(PHOTO), digest(OTHER)])


def test_they_follow_a_start_image_and_have_sizes_of_their_own(web, editors):
    body = {"prompt": "p", "image": b64(OTHER), "reference_images": [b64(PHOTO)], "width": 32, "height": 24}
    assert web.post("/t2i", json=body).status_code == 200
    assert editors.data[0] == photo((100, 65), 1).resize((32, 24), Image.Resampling.LANCZOS).tobytes() + SHOWN[0]


def test_kontext_is_shown_one_of_its_sizes_and_makes_one_in_its_bounds(web, editors):
    answer = web.post("/t2i", json={"prompt": "p", "model": "kontext", "reference_images": [b64(OTHER)]})
    assert answer.status_code == 200, answer.text
    (request,) = editors.submitted
    (reference,) = request.payload.reference_images
    assert (reference.width, reference.height) == (1248, 832)
    assert (request.payload.width, request.payload.height) == (128, 80)
    assert len(editors.data[0]) == 3 * 1248 * 832


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "tiny"}, 400, "reference_images has 1 entry, for tiny; it takes none. A start image is sent as"),
        ({"reference_images": [b64(PHOTO)] * 3}, 400, "has 3 entries, for editor; at most 2 are allowed."),
        ({"reference_images": [b64(PHOTO)] * 5}, 400, "has 5 entries; at most 4 are allowed."),
        ({"reference_images": [b64(PHOTO), "%"]}, 422, "reference_images[1] is '%', which is not base64"),
        ({"reference_images": [b64(b"GIF89a")]}, 422, "reference_images[0] is no PNG, WebP or JPEG: it is GIF."),
        ({"reference_images": [b64(PHOTO[:-40])]}, 422, "reference_images[0] is damaged"),
        ({"reference_images": [b64(file_of(photo((63, 80))))]}, 400, "[0] has 63 × 80 pixels; each side must have at"),
        (
            {"reference_images": [b64(file_of(Image.new("RGB", (64, 520))))]},
            400,
            "the longer side may be at most 8 times the sho",
        ),
        ({"model": "kontext", "reference_images": [b64(file_of(photo((15, 80))))]}, 400, "each side must have at leas"),
        (
            {"reference_images": [b64(PHOTO + bytes(100_001 - len(PHOTO)))]},
            413,
            "at most 100000 are allowed (frontend.max_image_b",
        ),
        ({"reference_images": "abc"}, 400, "reference_images"),
        ({"reference_images": [None]}, 400, "reference_images"),
    ],
)
@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations", "/v1/jobs"])
def test_others_are_rejected(web, editors, path, fields, status, message):
    body = {"prompt": "p", "reference_images": [b64(PHOTO)]} | fields
    answer = web.post(path, json={"input": body | {"endpoint": "/t2i"}} if path == "/v1/jobs" else body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    prefix = "input." if path == "/v1/jobs" else ""
    assert answer.json()["error"]["param"].startswith(f"{prefix}reference_images")
    assert editors.submitted == []


@pytest.mark.parametrize("endpoint", ["/t2i", "/v1/images/generations"])
def test_a_job_has_them_and_keeps_their_digests(web, editors, endpoint):
    asked = {"prompt": "p", "reference_images": [b64(PHOTO), b64(OTHER)], "endpoint": endpoint}
    answer = web.post("/v1/jobs", json={"input": asked})
    assert answer.status_code == 202, answer.text
    wait_until(lambda: editors.submitted)
    assert editors.submitted[0].payload.reference_images == REFERENCES
    assert editors.data[0] == b"".join(SHOWN)
    stored = web.get(f"/v1/jobs/{answer.json()['id']}").json()["input"]["reference_images"]
    assert stored == [f"sha256:{digest(PHOTO)}", f"sha256:{digest(OTHER)}"]


def transparent_left():
    mask = Image.new("RGBA", (72, 64), "black")
    mask.paste((255, 255, 255, 0), (0, 0, 32, 48))
    return file_of(mask)


@pytest.mark.parametrize(
    ("images", "fields", "strength", "references"),
    [
        ([PHOTO], {}, None, REFERENCES[:1]),
        ([PHOTO, OTHER], {}, None, REFERENCES),
        ([PHOTO], {"mask": transparent_left()}, 0.8, REFERENCES[:1]),
        ([PHOTO, OTHER], {"mask": transparent_left()}, 0.8, REFERENCES),
        ([PHOTO, OTHER, OTHER], {"mask": transparent_left()}, 0.8, REFERENCES[1:] * 2),
        ([PHOTO], {"extra_body": {"strength": 0.5}}, 0.5, ()),
    ],
)
def test_openais_client_edits_with_references(web, editors, images, fields, strength, references):
    client = openai.OpenAI(base_url=f"{web.base_url}/v1", api_key="none", http_client=web, max_retries=0)
    client.images.edit(image=images, prompt="a red hat", model="editor", **fields)
    (payload,) = [request.payload for request in editors.submitted]
    assert (payload.strength, payload.has_mask, payload.reference_images) == (strength, "mask" in fields, references)
    assert editors.data[0].endswith(b"".join(SHOWN[REFERENCES.index(each)] for each in references))


@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations"])
def test_forms_have_them_as_files(web, editors, path):
    files = [("reference_image[]", ("a.png", each)) for each in (PHOTO, OTHER)]
    answer = web.post(path, data={"prompt": "p", "model": "editor"}, files=files)
    assert answer.status_code == 200, answer.text
    assert editors.submitted[0].payload.reference_images == REFERENCES
    assert editors.data[0] == b"".join(SHOWN)


def test_edits_name_their_own_field(web, editors):
    for images, status, message in (
        ([PHOTO] * 3, 400, "image has 3 entries, for editor; at most 2 are allowed."),
        ([b"GIF89a"], 422, "image[0] is no PNG, WebP or JPEG: it is GIF."),
    ):
        files = [("image[]", ("a.png", each)) for each in images]
        answer = web.post("/v1/images/edits", data={"prompt": "p"}, files=files)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["message"]) == (status, "image", message)
    assert editors.submitted == []


def test_several_images_for_no_model_are_rejected_for_the_model(web, editors):
    files = [("image[]", ("a.png", each)) for each in (PHOTO, OTHER)]
    for model, status, message in (
        ("none", 404, "model 'none' is not served here"),
        ("tiny", 400, "image is there 2 times; one is allowed: tiny does not take several."),
    ):
        answer = web.post("/v1/images/edits", data={"prompt": "p", "model": model}, files=files)
        assert (answer.status_code, message in answer.text) == (status, True), answer.text
    body = {"prompt": "p", "init_images": [b64(PHOTO)] * 2, "override_settings": {"sd_model_checkpoint": "absent"}}
    answer = web.post("/sdapi/v1/img2img", json=body)
    assert (answer.status_code, "model 'absent' is not served" in answer.text) == (404, True), answer.text
    assert editors.submitted == []


@pytest.mark.parametrize(
    ("fields", "strength", "references"),
    [
        ({"denoising_strength": 1, "init_images": [b64(PHOTO), b64(OTHER)]}, None, REFERENCES),
        ({"denoising_strength": 0.6}, 0.6, ()),
        ({}, 0.75, ()),
        ({"denoising_strength": 1, "mask": b64(file_of(Image.new("L", (72, 64), 255)))}, 1.0, ()),
        ({"denoising_strength": 1, "override_settings": {"sd_model_checkpoint": "tiny"}}, 1.0, ()),
    ],
)
def test_images_of_img2img_are_references_where_nothing_of_them_is_kept(web, editors, fields, strength, references):
    body = {"prompt": "p", "init_images": [b64(PHOTO)], "override_settings": {"sd_model_checkpoint": "editor"}} | fields
    answer = web.post("/sdapi/v1/img2img", json=body)
    assert answer.status_code == 200, answer.text
    (payload,) = [request.payload for request in editors.submitted]
    assert (payload.strength, payload.reference_images) == (strength, references)


def test_only_requests_with_equally_large_references_are_compared_by_canaries(web, monkeypatch):
    shapes = []
    monkeypatch.setattr(RequestVersions, "record", lambda *_, shape, **__: shapes.append(shape()))
    for number in (0, 1, 2, 1):
        shown = [b64(file_of(Image.new("RGB", (512, 512))))] * number
        body = {"prompt": "p", "reference_images": shown, "width": 64, "height": 64}
        assert web.post("/t2i", json=body).status_code == 200
    assert len(set(shapes)) == 3 and shapes[1] == shapes[3]


def test_models_say_how_many_they_take(web):
    models = {each["id"]: each["noria"]["max_references"] for each in web.get("/v1/models").json()["data"]}
    assert models == {"editor": 2, "tiny": 0, "kontext": 1}
