"""A1111's upscalers of pixels: its extras, and its hires fix with them."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image

from noria.config import Config, EngineConfig
from noria.frontend.http.body import MAX_LARGE_BODIES_PER_CLIENT
from noria.images.metadata_io import read_metadata
from noria.models.adapters.upscaler_folders import UpscalerFolders
from noria.protocol.diffusion import PixelUpscaler, SecondPass, Upscaling
from waiting import wait_until

# What webuiapi sends.
WEBUIAPI = {
    "resize_mode": 0, "show_extras_results": True, "gfpgan_visibility": 0, "codeformer_visibility": 0,
    "codeformer_weight": 0, "upscaling_resize": 2, "upscaling_resize_w": 512, "upscaling_resize_h": 512,
    "upscaling_crop": True, "upscaler_1": "Lanczos", "upscaler_2": "None", "extras_upscaler_2_visibility": 0,
    "upscale_first": False,
}  # fmt: skip
HIRES = {
    "prompt": "p", "steps": 20, "width": 64, "height": 48, "enable_hr": True, "hr_scale": 2, "denoising_strength": 0.7,
    "seed": 5,
}  # fmt: skip


def photo(size=(40, 24)):
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, (*size[::-1], 3), np.uint8))


def b64(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def opened(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def extra(client, **fields):
    return client.post("/sdapi/v1/extra-single-image", json=WEBUIAPI | {"image": b64(photo())} | fields)


@pytest.fixture
def served(serve, new_engine, tmp_path):
    (tmp_path / "4x-Tiny.pth").write_bytes(b"weights")
    engine = new_engine()
    config = Config(engine=EngineConfig(upscalers=(str(tmp_path),)))
    with serve(config, engine) as (url, _), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        yield client, engine, UpscalerFolders((str(tmp_path),)).complete("4x-Tiny", "upscaler_1")


@pytest.mark.parametrize(
    ("fields", "size", "resampling"),
    [
        ({}, (80, 48), Image.Resampling.LANCZOS),
        ({"upscaler_1": "Nearest", "upscaling_resize": "1.5"}, (56, 32), Image.Resampling.NEAREST),  # 60 × 36
        ({"upscaler_1": "None"}, (40, 24), None),
        ({"upscaler_1": None, "resize_mode": 1}, (40, 24), None),
    ],
)
def test_filters_enlarge_an_image_without_an_engine(client, engine, fields, size, resampling):
    answer = extra(client, **fields)
    assert answer.status_code == 200, answer.text
    image = opened(answer.json()["image"])
    assert (image.size, answer.json()["html_info"], engine.submitted) == (size, "", [])
    if resampling is None or size == (80, 48):
        expected = photo() if resampling is None else photo().resize(size, resampling)
        assert image.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("crops", "size"), [(True, (64, 64)), (False, (104, 64))])
def test_an_image_of_other_proportions_is_cut_or_larger_on_one_side(client, crops, size):
    fields = {"resize_mode": 1, "upscaling_resize_w": 64, "upscaling_resize_h": 64, "upscaling_crop": crops}
    assert opened(extra(client, **fields).json()["image"]).size == size


def test_an_upscaler_of_a_file_runs_in_an_engine(served):
    client, engine, upscaler = served
    answer = extra(client, upscaler_1="4x-Tiny", upscaling_resize=4)
    assert answer.status_code == 200, answer.text
    assert opened(answer.json()["image"]).size == (160, 96)
    (request,), (data,) = engine.submitted, engine.data
    assert (request.payload.upscaling, data) == (Upscaling(160, 96, upscaler), photo().tobytes())
    assert (request.payload.width, request.payload.height, request.payload.has_images) == (40, 24, False)
    files = [{"data": b64(photo((16, 16))), "name": "a"}, {"data": b64(photo((8, 24))), "name": "b"}]
    batch = client.post("/sdapi/v1/extra-batch-images", json=WEBUIAPI | {"imageList": files, "upscaler_1": "4x-Tiny"})
    assert [opened(each).size for each in batch.json()["images"]] == [(32, 32), (16, 48)]
    smaller = {"resize_mode": 1, "upscaling_resize_w": 16, "upscaling_resize_h": 16}
    assert opened(extra(client, upscaler_1="4x-Tiny", **smaller).json()["image"]).size == (16, 16)
    assert len(engine.submitted) == 3  # what gets smaller needs no upscaler


def test_priority_and_deadline_are_in_headers(served):
    client, engine, _ = served
    urgent = {"X-Noria-Priority": "high", "X-Noria-Deadline-Ms": "9000"}
    client.headers.update(urgent)
    assert extra(client, upscaler_1="4x-Tiny").status_code == 200
    (request,) = engine.submitted
    assert request.priority == "high" and 1 < request.deadline_s < 9
    for name, value in [("X-Noria-Priority", "top"), ("X-Noria-Deadline-Ms", "0")]:
        client.headers.update(urgent | {name: value})
        assert extra(client).status_code == 400


def test_images_that_engines_enlarge_hold_no_places_of_uploads(served):
    client, engine, _ = served
    engine.never_answers = True
    image = b64(photo((200, 200)))
    with ThreadPoolExecutor(MAX_LARGE_BODIES_PER_CLIENT) as threads:
        running = [
            threads.submit(extra, client, image=image, upscaler_1="4x-Tiny") for _ in range(MAX_LARGE_BODIES_PER_CLIENT)
        ]
        wait_until(lambda: len(engine.submitted) == len(running))
        assert extra(client, image=image).status_code == 200
        client.post("/sdapi/v1/interrupt")
    assert [each.result().status_code for each in running] == [499] * len(running)


def test_upscalers_are_listed(served):
    client, _, _ = served
    listed = {each["name"]: each for each in client.get("/sdapi/v1/upscalers").json()}
    assert list(listed) == ["None", "Lanczos", "Nearest", "4x-Tiny"]
    assert listed["4x-Tiny"]["model_path"] == "4x-Tiny.pth"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"upscaler_1": "R-ESRGAN 4x+"}, "upscaler_1 is 'R-ESRGAN 4x+'; upscalers of pixels are 'Lanczos', 'Nearest'."),
        ({"upscaling_resize": 9}, "upscaling_resize is 9.0; allowed are 1 to 8"),
        ({"resize_mode": 1, "upscaling_resize_w": 8000, "upscaling_resize_h": 8000}, "8000 × 8000 pixels; at most"),
        ({"image": None}, "image is missing"),
        ({"image": "abc"}, "image is no PNG, WebP or JPEG"),
    ],
)
def test_extras_that_are_not_allowed(client, engine, fields, says):
    answer = extra(client, **fields)
    assert answer.status_code in (400, 422)
    assert says in answer.json()["detail"]
    assert engine.submitted == []


def test_one_refusal_names_all_fields_that_are_not_supported(client):
    wrong = {
        "gfpgan_visibility": 0.5, "codeformer_visibility": 1, "upscaler_2": "Lanczos", "upscaler_1": "x",
        "upscaling_resize": 0.5, "resize_mode": 2,
    }  # fmt: skip
    answer = extra(client, extras_upscaler_2_visibility=0.5, **wrong)
    assert answer.status_code == 400
    for name in wrong:
        assert f"{name} is " in answer.json()["detail"]


@pytest.mark.parametrize("name", ["Lanczos", "None", "Nearest", "4x-Tiny"])
def test_a_hires_fix_by_pixels(served, name):
    client, engine, upscaler = served
    expected = upscaler if name == "4x-Tiny" else PixelUpscaler("Lanczos" if name == "None" else name)
    answer = client.post("/sdapi/v1/txt2img", json=HIRES | {"hr_upscaler": name})
    assert answer.status_code == 200, answer.text
    second = engine.submitted[0].payload.second_pass
    assert second == SecondPass(128, 96, inference_steps=29, strength=0.7, pixel_upscaler=expected)
    file = base64.b64decode(answer.json()["images"][0])
    assert read_metadata(io.BytesIO(file)).second_pass == second
    assert f"Hires upscaler: {expected.name}" in json.loads(answer.json()["info"])["infotexts"][0]
