"""The images and masks of A1111's img2img."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from noria.frontend.services.images import generation
from noria.images.start_image import StartImage
from uploads import b64, file_of, left_half, photo

PHOTO = file_of(photo())
MASK = file_of(left_half())
SIZE = photo().size

# What webuiapi sends with every request.
WEBUIAPI = {
    "resize_mode": 0, "denoising_strength": 0.75, "mask_blur": 4, "inpainting_fill": 0, "inpaint_full_res": True,
    "inpaint_full_res_padding": 0, "inpainting_mask_invert": 0, "initial_noise_multiplier": 1, "prompt": "p",
    "styles": [], "seed": -1, "subseed": -1, "subseed_strength": 0, "seed_resize_from_h": 0, "seed_resize_from_w": 0,
    "sampler_name": "Euler", "batch_size": 1, "n_iter": 1, "steps": 8, "cfg_scale": 7.0, "width": 64, "height": 48,
    "restore_faces": False, "tiling": False, "do_not_save_samples": False, "do_not_save_grid": False,
    "negative_prompt": "", "eta": 1.0, "s_churn": 0, "s_tmax": 0, "s_tmin": 0, "s_noise": 1, "override_settings": {},
    "override_settings_restore_afterwards": True, "sampler_index": "Euler", "include_init_images": False,
    "send_images": True, "save_images": False, "alwayson_scripts": {},
}  # fmt: skip
WITH_MASK = {"mask": b64(MASK), "mask_blur": 0, "inpaint_full_res": False, "inpainting_fill": 1}


def img2img(client, **fields):
    return client.post("/sdapi/v1/img2img", json=WEBUIAPI | {"init_images": [b64(PHOTO)]} | fields)


def test_webuiapis_img2img(client, engine):
    response = img2img(client, init_images=["data:image/png;base64," + b64(PHOTO)], seed=5)
    assert response.status_code == 200
    answer = response.json()
    assert Image.open(io.BytesIO(base64.b64decode(answer["images"][0]))).size == SIZE
    assert (answer["parameters"]["init_images"], answer["parameters"]["denoising_strength"]) == (None, 0.75)
    assert "Denoising strength: 0.75" in answer["info"]
    (request,), (data,) = engine.submitted, engine.data
    assert (request.payload.strength, request.payload.num_steps, data) == (0.75, 6, photo().tobytes())


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, left_half()),
        ({"inpainting_mask_invert": 1}, left_half(inside=0, outside=255)),
        ({"mask": b64(file_of(left_half(mode="RGBA", inside=(0, 0, 0, 255), outside=(0, 0, 0, 0))))}, left_half()),
        ({"mask": b64(file_of(left_half(mode="RGBA", inside="white", outside="black")))}, left_half()),
    ],
)
def test_masks_of_img2img(client, engine, fields, mask):
    assert img2img(client, **WITH_MASK | fields).status_code == 200
    assert engine.data == [photo().tobytes() + mask.tobytes()]


def test_without_a_strength_it_is_a1111s(client, engine):
    client.post("/sdapi/v1/img2img", json={"init_images": [b64(file_of(photo((40, 24))))]})
    (request,) = engine.submitted
    assert (request.payload.strength, request.payload.width, request.payload.height) == (0.75, 40, 24)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"init_images": []}, "init_images has 0 images; allowed is one"),
        ({"init_images": [b64(PHOTO)] * 2}, "init_images has 2 images"),
        ({"resize_mode": 4}, "resize_mode is 4; allowed are 0 (Just resize), 1 (Crop and resize), 2 (Resize and fill)"),
        ({"mask": b64(MASK), "mask_blur_x": 300, "mask_blur": None}, "mask_blur_x is 300.0; allowed are 0 to 256."),
        ({"mask": b64(file_of(left_half(inside=0)))}, "mask covers nothing, so there is no part to repaint"),
        ({"initial_noise_multiplier": 0.5}, "initial_noise_multiplier is 0.5"),
        ({"enable_hr": True}, "the hires fix of an image is not supported"),
        ({"denoising_strength": 0}, "denoising_strength is 0.0; allowed are 0.01 to 1.0"),
        (WITH_MASK | {"mask": b64(file_of(left_half((8, 8))))}, "mask has 8 × 8 pixels"),
    ],
)
def test_img2img_that_is_not_allowed(client, engine, fields, says):
    response = img2img(client, **fields)
    assert response.status_code == 400
    assert says in response.json()["detail"]
    assert engine.submitted == []


def test_an_unknown_model_is_said_of_several_images_and_beside_what_is_wrong_with_one(client):
    unknown = {"override_settings": {"sd_model_checkpoint": "nope"}}
    assert "'nope'" in img2img(client, init_images=[b64(PHOTO)] * 2, **unknown).json()["detail"]
    assert "resize_mode is 4" in img2img(client, resize_mode=4, **unknown).json()["detail"]


def test_one_refusal_names_all_fields_of_images_and_masks(client, engine):
    wrong = {"mask_blur": -1, "resize_mode": "x", "inpainting_fill": 4, "inpaint_full_res_padding": 5000}
    response = img2img(client, mask=b64(MASK), tiling=True, latent_mask="x", steps=999, **wrong)
    assert response.status_code == 400
    for name in (*wrong, "tiling", "latent_mask", "steps"):
        assert f"{name} is " in response.json()["detail"]
    assert img2img(client, **wrong | {"resize_mode": "Just resize"}).status_code == 200  # there is no mask


def test_what_webuiapi_repaints_is_pasted_into_the_image(client, engine):
    """It sends a whole image and a mask of a part, which the engine gets alone and enlarged."""
    image, mask = photo((256, 128)), Image.new("L", (256, 128))
    mask.paste(255, (100, 40, 140, 70))
    response = img2img(client, init_images=[b64(file_of(image))], mask=b64(file_of(mask)), seed=5, mask_blur=0)
    assert response.status_code == 200, response.text
    pasted = Image.open(io.BytesIO(base64.b64decode(response.json()["images"][0])))
    assert pasted.size == (256, 128)
    expected = image.copy()
    expected.paste(engine.colour(5), (100, 40, 140, 70))
    assert pasted.tobytes() == expected.tobytes()
    (request,), (data,) = engine.submitted, engine.data
    assert (request.payload.width, request.payload.height, request.payload.mask_fill) == (64, 48, None)
    assert np.frombuffer(data[-64 * 48 :], np.uint8).mean() > 250


def test_an_image_is_written_before_the_next_is_pasted(client, engine, monkeypatch):
    """Pasted images may be much larger than generated ones: one of a request is held at once."""
    events = []
    paste, write = StartImage.paste, generation.write_images
    monkeypatch.setattr(StartImage, "paste", lambda *args: events.append("paste") or paste(*args))
    monkeypatch.setattr(generation, "write_images", lambda *args: events.append(len(args[0])) or write(*args))
    response = img2img(client, mask=b64(MASK), batch_size=3, seed=5, mask_blur=0, inpainting_mask_invert=1)
    assert response.status_code == 200, response.text
    assert events == ["paste", 1] * 3
    files = [Image.open(io.BytesIO(base64.b64decode(each))) for each in response.json()["images"]]
    assert [file.getpixel((SIZE[0] - 1, 0)) for file in files] == [engine.colour(seed) for seed in (5, 6, 7)]


@pytest.mark.parametrize(("number", "fill"), [(0, None), (1, None), (2, "noise"), (3, "nothing")])
def test_the_engine_is_told_which_latents_replace_those_of_the_image(client, engine, number, fill):
    assert img2img(client, **WITH_MASK | {"inpainting_fill": number}).status_code == 200
    assert engine.submitted[0].payload.mask_fill == fill


def test_an_image_of_other_proportions_is_cut(client, engine):
    image = photo((128, 48))
    for mode in (1, "1", "Crop and resize"):
        assert img2img(client, init_images=[b64(file_of(image))], resize_mode=mode).status_code == 200
    assert set(engine.data) == {image.crop((32, 0, 96, 48)).tobytes()}


def test_an_image_whose_latents_are_resized_keeps_its_size(client, engine):
    image = photo((128, 40))
    for mode in (3, "Just resize (latent upscale)"):
        assert img2img(client, init_images=[b64(file_of(image))], resize_mode=mode).status_code == 200
    assert {request.payload.start_px for request in engine.submitted} == {(128, 40)}
    assert set(engine.data) == {image.tobytes()}
    assert img2img(client, resize_mode=3).status_code == 200
    assert engine.submitted[-1].payload.start_px is None
    for fields, says in (
        (WITH_MASK, "resize_mode is 3; with a mask allowed are 0 to 2"),
        ({"init_images": [b64(file_of(photo((136, 48))))]}, "init_images has 136 × 48 pixels; to resize its latents"),
    ):
        assert says in img2img(client, resize_mode=3, **fields).json()["detail"]


def test_the_document_has_the_bounds_of_each_number(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    image, extra = (
        {name: (each["minimum"], each["maximum"]) for name, each in fields.items() if "minimum" in each}
        for fields in (schemas[body]["properties"] for body in ("Img2Img", "ExtraSingleImage"))
    )
    expected = {
        "resize_mode": (0, 3),
        "denoising_strength": (0.01, 1),
        "mask_blur": (0, 256),
        "inpainting_fill": (0, 3),
    }
    assert image.items() >= (expected | {"steps": (1, 100), "n_iter": (1, 4)}).items()
    assert image["seed"][0] == -1
    assert extra.items() >= {"resize_mode": (0, 1), "upscaling_resize": (1, 8)}.items()
    assert schemas["Img2Img"]["required"] == ["init_images"]
