"""A1111's upscalers of pixels: its extras, and its hires fix with them."""

import base64
import io
import json

import pytest

from extras_client import extra, opened
from noria.images.metadata_io import read_metadata
from noria.protocol.diffusion import PixelUpscaler, SecondPass

HIRES = {
    "prompt": "p", "steps": 20, "width": 64, "height": 48, "enable_hr": True, "hr_scale": 2, "denoising_strength": 0.7,
    "seed": 5,
}  # fmt: skip


@pytest.mark.parametrize(("crops", "size"), [(True, (64, 64)), (False, (104, 64))])
def test_an_image_of_other_proportions_is_cut_or_larger_on_one_side(client, crops, size):
    fields = {"resize_mode": 1, "upscaling_resize_w": 64, "upscaling_resize_h": 64, "upscaling_crop": crops}
    assert opened(extra(client, **fields).json()["image"]).size == size


def test_upscalers_are_listed(upscaling_server):
    client, _, _ = upscaling_server
    listed = {each["name"]: each for each in client.get("/sdapi/v1/upscalers").json()}
    assert list(listed) == ["None", "Lanczos", "Nearest", "4x-Tiny"]
    assert listed["4x-Tiny"]["model_path"] == "4x-Tiny.pth"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"upscaler_1": "R-ESRGAN 4x+"}, "upscaler_1 is 'R-ESRGAN 4x+'; upscalers of pixels are 'Lanczos', 'Nearest'."),
        ({"upscaling_resize": 9}, "upscaling_resize is 9.0; allowed are 1 to 8"),
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
def test_a_hires_fix_by_pixels(upscaling_server, name):
    client, engine, upscaler = upscaling_server
    expected = upscaler if name == "4x-Tiny" else PixelUpscaler("Lanczos" if name == "None" else name)
    answer = client.post("/sdapi/v1/txt2img", json=HIRES | {"hr_upscaler": name})
    assert answer.status_code == 200, answer.text
    second = engine.submitted[0].payload.second_pass
    assert second == SecondPass(128, 96, inference_steps=29, strength=0.7, pixel_upscaler=expected)
    file = base64.b64decode(answer.json()["images"][0])
    assert read_metadata(io.BytesIO(file)).second_pass == second
    assert f"Hires upscaler: {expected.name}" in json.loads(answer.json()["info"])["infotexts"][0]
