"""A1111's hires fix as its clients ask for it."""

import base64
import io
import json
import threading

import pytest
from PIL import Image

from noria.images.metadata_io import read_metadata
from noria.protocol.diffusion import SecondPass
from waiting import wait_until

# What SillyTavern sends with it switched on.
HIRES = {
    "prompt": "p", "sampler_name": "Euler", "scheduler": "Automatic", "steps": 20, "cfg_scale": 7, "width": 64,
    "height": 48, "enable_hr": True, "hr_upscaler": "Latent", "hr_scale": 2, "hr_additional_modules": [],
    "denoising_strength": 0.7, "hr_second_pass_steps": 0, "seed": 5, "hr_prompt": "", "hr_negative_prompt": "",
    "hr_sampler_name": "Use same sampler", "hr_scheduler": None, "hr_resize_x": 0, "hr_resize_y": 0, "n_iter": 2,
    "hr_checkpoint_name": "Use same checkpoint",
}  # fmt: skip


def txt2img(client, **fields):
    return client.post("/sdapi/v1/txt2img", json=HIRES | fields)


def test_the_second_pass_is_of_the_same_request(client, engine):
    answer = txt2img(client)
    assert answer.status_code == 200, answer.text
    (request,) = engine.submitted
    payload = request.payload
    assert (payload.width, payload.height, payload.n, payload.inference_steps) == (64, 48, 2, 20)
    assert payload.second_pass == SecondPass(128, 96, inference_steps=29, strength=0.7, upscaler="bilinear")
    assert payload.num_steps == 40  # as in A1111, all 20 are made
    files = [base64.b64decode(text) for text in answer.json()["images"]]
    assert {Image.open(io.BytesIO(file)).size for file in files} == {(128, 96)}
    assert read_metadata(io.BytesIO(files[0])).second_pass == payload.second_pass
    (rejected,) = client.post("/v1/images/metadata", content=files[0]).json()["rejected"]
    assert (rejected["field"], rejected["value"]["strength"]) == ("second_pass", 0.7)
    assert "noria generate --like" in rejected["reason"]
    info = json.loads(answer.json()["info"])
    assert (info["denoising_strength"], info["ignored"]) == (0.7, [])
    for said in ("Size: 64x48", "Denoising strength: 0.7", "Hires resize: 128x96", "Hires upscaler: Latent"):
        assert said in info["infotexts"][0]


@pytest.mark.parametrize(
    ("fields", "second_pass"),
    [
        ({"hr_scale": 1.3}, SecondPass(80, 56, 29, 0.7)),  # 83.2 × 62.4
        ({"hr_resize_x": 120}, SecondPass(120, 88, 29, 0.7)),
        ({"hr_resize_y": 96, "hr_scale": 9}, SecondPass(128, 96, 29, 0.7)),
        ({"hr_resize_x": 72, "hr_resize_y": 128}, SecondPass(72, 128, 29, 0.7)),
        ({"hr_second_pass_steps": 7, "denoising_strength": 0.5}, SecondPass(128, 96, 14, 0.5)),
        ({"denoising_strength": 1}, SecondPass(128, 96, 20, 1.0)),
        ({"denoising_strength": None, "steps": None}, SecondPass(128, 96, 18, 0.7)),  # the model's default is 12
        ({"hr_upscaler": "Latent (bicubic antialiased)"}, SecondPass(128, 96, 29, 0.7, "bicubic antialiased")),
        ({"hr_upscaler": None, "hr_scale": None}, SecondPass(128, 96, 29, 0.7)),
        ({"hr_sampler_name": "Euler", "hr_prompt": "p", "hr_cfg": 7.0}, SecondPass(128, 96, 29, 0.7)),
        ({"enable_hr": "False", "hr_scale": 9, "hr_upscaler": "R-ESRGAN 4x+"}, None),
    ],
)
def test_its_size_its_steps_and_how_latents_are_enlarged(client, engine, fields, second_pass):
    answer = txt2img(client, **fields)
    assert answer.status_code == 200, answer.text
    assert engine.submitted[0].payload.second_pass == second_pass


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"hr_upscaler": "R-ESRGAN 4x+"},
            "'Latent (nearest-exact)', 'Lanczos', 'Nearest'. Others are files in the folders of engine.upscalers",
        ),
        ({"hr_scale": 5}, "hr_scale is 5.0; allowed are 1 to 4"),
        ({"hr_scale": 3}, "width of the hires fix is 192; allowed are 16 to 128 (hr_scale, hr_resize_x, hr_resize_y)"),
        ({"denoising_strength": 0}, "denoising_strength is 0.0; allowed are 0.01 to 1 with enable_hr"),
        ({"denoising_strength": 0.009}, "denoising_strength is 0.009; allowed are 0.01 to 1 with enable_hr"),
        ({"hr_resize_y": 10**30}, "hr_resize_y is 1"),
        (
            {"denoising_strength": 0.1},
            "steps is 20, of which the second pass makes all: with denoising_strength 0.1 allowed are 1 to 10",
        ),
        ({"steps": 10**30}, "steps is 1"),
        ({"hr_second_pass_steps": 101}, "hr_second_pass_steps is 101, of which the second pass makes all"),
        ({"hr_second_pass_steps": -1}, "hr_second_pass_steps is -1, of which the second pass makes all"),
        ({"calls": 0.5}, "with a second pass no calls can be skipped"),
    ],
)
def test_a_hires_fix_that_is_not_allowed(client, engine, fields, says):
    answer = txt2img(client, **fields)
    assert answer.status_code == 400
    assert says in answer.json()["detail"]
    assert engine.submitted == []


def test_one_refusal_names_all_fields_that_are_not_supported(client, engine):
    wrong = {
        "hr_prompt": "q", "hr_negative_prompt": "r", "hr_sampler_name": "DDIM", "hr_scheduler": "Karras", "hr_cfg": 3,
        "hr_checkpoint_name": "other", "hr_upscaler": "Lanczos 3", "hr_scale": 9, "tiling": True,
    }  # fmt: skip
    answer = txt2img(client, **wrong)
    assert answer.status_code == 400
    for name in wrong:
        assert f"{name} is " in answer.json()["detail"]
    assert engine.submitted == []


def test_latent_upscalers_are_listed(client):
    names = [each["name"] for each in client.get("/sdapi/v1/latent-upscale-modes").json()]
    assert names[0] == "Latent"
    assert all(txt2img(client, hr_upscaler=name).status_code == 200 for name in names)


def test_progress_counts_the_steps_of_both_passes(client, engine):
    engine.never_answers = True
    thread = threading.Thread(target=txt2img, args=(client,))
    thread.start()
    wait_until(lambda: client.get("/sdapi/v1/progress").json()["state"]["job_count"] == 1)
    assert client.get("/sdapi/v1/progress").json()["state"]["sampling_steps"] == 40
    client.post("/sdapi/v1/interrupt")
    thread.join()
