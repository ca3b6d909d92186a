"""Stable Diffusion XL in the running batch, compared with diffusers' own pipeline and with itself alone."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

import tiny_models
from generating import PARITY_TOLERANCE, difference, generate, load
from noria.engine.diffusion import loading
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.models.diffusion import vae
from noria.models.diffusion.conditioning import collate
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler

# They stand for one call and two a step, with noise and with a history; `sampling/test_parity.py` has all.
KINDS = ("euler", "dpm++2m-sde", "euler-a", "kdpm2-a", "unipc", "heun", "pndm", "dpm++2m-karras")
PROMPTS = ["a red circle", "a blue square above a green star", "a large ring at the top left"]


@pytest.fixture(scope="module")
def xl(tiny_xl_folder):
    return load(tiny_xl_folder)


@pytest.fixture(scope="module")
def pipeline(tiny_xl_folder):
    return open_pipeline(StableDiffusionXLPipeline, tiny_xl_folder)


def make_request(spec, number, **fields):
    settings = {
        "prompt": PROMPTS[number % 3],
        "negative_prompt": [None, "", "a black cross"][number % 3],
        "seed": 2000 + number,
        "width": spec.default_width_px,
        "height": spec.default_height_px,
        "inference_steps": 3,
        "guidance_scale": 4.0,
    }
    return make_image_request(f"r{number}", **settings | fields)


def generate_with_pipeline(pipe, request, **options):
    """The image of diffusers' own loop, [height, width, 3]."""
    set_scheduler(pipe, request, clip_sample=False)
    return run_pipeline(pipe, request, **options)


def assert_like_the_pipeline(executor, pipe, request, **options):
    ours = generate(executor, [request])[request.request_id, 0]
    assert difference(ours, generate_with_pipeline(pipe, request, **options)) <= PARITY_TOLERANCE, request


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(xl, pipeline):
    spec, executor = xl
    requests = [
        make_request(
            spec,
            k,
            scheduler=name,
            inference_steps=3 + k % 4,
            guidance_scale=[1.0, 3.5, 7.0][k % 3],
            width=[32, 48][k // 4],
        )
        for k, name in enumerate(KINDS)
    ]
    together = generate(executor, requests, arrivals=[(5 * k) % 3 for k in range(8)])
    for request in requests:
        image = together[request.request_id, 0]
        assert difference(image, generate_with_pipeline(pipeline, request)) <= PARITY_TOLERANCE, request
    for request in requests[2:5]:
        assert difference(together[request.request_id, 0], generate(executor, [request])[request.request_id, 0]) <= 1


def test_rows_of_a_call_equal_the_rows_alone(xl):
    model = xl[1].model
    with torch.inference_mode():
        texts = model.text_encode([*PROMPTS, None])
        latents, times = torch.randn(4, 4, 8, 8), torch.tensor([999.0, 640.0, 333.0, 1.0])
        together = model.predict(latents, times, collate(texts), None)
        for k in range(4):
            alone = model.predict(latents[k : k + 1], times[k : k + 1], collate(texts[k : k + 1]), None)[0]
            assert (together[k] - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_an_absent_negative_prompt_is_zeros_and_an_empty_one_is_not(xl, pipeline):
    spec, executor = xl
    images = []
    for negative_prompt in (None, ""):
        request = make_request(spec, 1, negative_prompt=negative_prompt)
        assert_like_the_pipeline(executor, pipeline, request)
        images.append(generate(executor, [request])["r1", 0])
    assert difference(*images) > PARITY_TOLERANCE


def test_a_folder_can_say_that_an_absent_negative_prompt_is_empty(tmp_path):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, force_zeros_for_empty_prompt=False)
    spec, executor = load(folder)
    absent, empty = (generate(executor, [make_request(spec, 1, negative_prompt=text)])["r1", 0] for text in (None, ""))
    assert np.array_equal(absent, empty)
    assert_like_the_pipeline(
        executor, open_pipeline(StableDiffusionXLPipeline, folder), make_request(spec, 1, negative_prompt=None)
    )


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        ({"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}, "euler-a"),  # Turbo
        ({"timestep_spacing": "trailing"}, "euler"),  # Lightning
        ({"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, "euler"),  # zero terminal SNR
        ({"steps_offset": 0}, "ddim"),
    ],
    ids=str,
)
def test_the_schedulers_own_settings_are_the_folders(tmp_path, scheduler, name):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, scheduler=scheduler)
    spec, executor = load(folder)
    assert spec.default_scheduler == name or "steps_offset" in scheduler
    pipe = open_pipeline(StableDiffusionXLPipeline, folder)
    for steps, guidance in ((1, 0.0), (3, 3.0)):
        request = make_request(spec, 1, scheduler=name, inference_steps=steps, guidance_scale=guidance)
        assert_like_the_pipeline(executor, pipe, request)


def test_an_lcm_takes_the_guidance_scale_itself_in_one_row(tmp_path, monkeypatch):
    lcm = {"_class_name": "LCMScheduler"}
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, unet={"time_cond_proj_dim": 16}, scheduler=lcm)
    spec, executor = load(folder)
    assert (spec.default_scheduler, spec.default_steps, spec.default_guidance) == ("lcm", 4, 8.0)
    rows, real = [], executor.model.predict
    monkeypatch.setattr(
        executor.model, "predict", lambda latents, *rest: rows.append(len(latents)) or real(latents, *rest)
    )
    pipe = open_pipeline(StableDiffusionXLPipeline, folder)
    requests = [make_request(spec, k, scheduler="lcm", guidance_scale=1.0 + 7 * k) for k in range(3)]
    images = generate(executor, requests)
    assert rows == [3, 3, 3]
    for request in requests:
        theirs = generate_with_pipeline(pipe, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE
    stronger = generate(executor, [make_request(spec, 0, scheduler="lcm", guidance_scale=9.0)])
    assert difference(images["r0", 0], stronger["r0", 0]) > 1


def test_warming_up_fills_each_bucket_of_a_model_with_one_row_an_image(tmp_path, monkeypatch):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, unet={"time_cond_proj_dim": 16})
    spec, executor = load(folder, buckets=(2, 4), slots=4)
    images, real = [], loading.run_warmup_request

    def run(executor, spec, config, costs, num_images, *more):
        images.append(num_images)
        real(executor, spec, config, costs, num_images, *more)

    monkeypatch.setattr(loading, "run_warmup_request", run)
    loading.warm_up(executor, spec, executor.config)
    assert images == [2, 4]


def test_a_stable_diffusion_with_embedded_guidance_gives_the_image_of_its_pipeline(tmp_path):
    folder = tiny_models.save_stable_diffusion(tmp_path, unet={"time_cond_proj_dim": 16})
    spec, executor = load(folder)
    pipe = open_pipeline(StableDiffusionPipeline, folder, safety_checker=None)
    for guidance in (1.0, 8.0):
        request = make_request(spec, 1, scheduler="lcm", guidance_scale=guidance)
        assert_like_the_pipeline(executor, pipe, request)


def test_latents_with_mean_and_deviation_are_decoded_as_by_the_pipeline(tmp_path):
    statistics = {"latents_mean": [-1.6, 1.2, 0.4, -2.6], "latents_std": [8.4, 5.9, 5.3, 4.8]}
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, vae=statistics)
    spec, executor = load(folder)
    assert_like_the_pipeline(executor, open_pipeline(StableDiffusionXLPipeline, folder), make_request(spec, 1))
    pixels = torch.rand(2, 3, 32, 32) * 2 - 1
    with torch.inference_mode():
        mode = executor.model._vae._vae.encode(pixels).latent_dist.mode()
        mean, std = (torch.tensor(statistics[name])[:, None, None] for name in statistics)
        expected = (mode - mean) * executor.model._vae._factor / std
        torch.testing.assert_close(executor.model._vae._encode(pixels).mean_BCHW, expected)


def test_tiles_are_decoded_as_by_the_pipeline(tmp_path):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, vae={"sample_size": 16})
    spec, executor = load(folder, vae_tiling=True)
    pipe = open_pipeline(StableDiffusionXLPipeline, folder)
    pipe.vae.enable_tiling()
    assert_like_the_pipeline(executor, pipe, make_request(spec, 1, inference_steps=1))


def test_by_default_only_large_images_are_decoded_in_tiles_and_many_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(vae, "MAX_PIXELS", 48 * 48)
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, vae={"sample_size": 16})
    chosen, tiled, whole = (load(folder, vae_tiling=tiling)[1].model for tiling in ("auto", True, False))
    num_decoded = []
    chosen._vae._vae.decoder.register_forward_pre_hook(lambda _, inputs: num_decoded.append(len(inputs[0])))
    generator = torch.Generator().manual_seed(0)
    small, large = (torch.randn(2, *chosen.latent_shape(side, side), generator=generator) for side in (32, 64))
    with torch.inference_mode():
        assert torch.equal(chosen.decode(small), whole.decode(small))
        assert num_decoded == [2]
        assert torch.equal(found := chosen.decode(large), tiled.decode(large))
        assert not torch.equal(found, whole.decode(large))
        assert set(num_decoded[1:]) == {1}
        pixels = torch.zeros(2, 64, 64, 3)
        torch.testing.assert_close(chosen.encode(pixels).mean_BCHW, tiled.encode(pixels).mean_BCHW)
        chosen.decode(torch.cat([small, small, small]))
    assert num_decoded[-6:] == [1] * 6


def test_the_deviation_of_guided_outputs_is_rescaled_as_by_the_pipeline(tiny_xl_folder, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_xl_folder, folder)
    (folder / "noria.json").write_text('{"guidance_rescale": 0.7}')
    spec, executor = load(folder)
    pipe = open_pipeline(StableDiffusionXLPipeline, folder)
    for guidance in (1.0, 9.0):
        request = make_request(spec, 1, guidance_scale=guidance)
        assert_like_the_pipeline(executor, pipe, request, guidance_rescale=0.7)


@pytest.mark.parametrize(("force_upcast", "dtype"), [(True, torch.float32), (False, torch.float16)])
def test_a_vae_that_overflows_in_float16_is_in_float32(tmp_path, force_upcast, dtype):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, vae={"force_upcast": force_upcast})
    model = load(folder, dtype="float16")[1].model
    assert (model._vae._vae.dtype, model.unet.dtype, model.dtype) == (dtype, torch.float16, torch.float16)
    with torch.inference_mode():
        assert model.decode(torch.zeros(1, 4, 8, 8)).shape == (1, 32, 32, 3)


def test_bounds_and_defaults(xl):
    spec, _ = xl
    assert (spec.family, spec.pipeline) == ("stable-diffusion-xl", "StableDiffusionXLPipeline")
    assert (spec.default_width_px, spec.min_side_px, spec.max_side_px, spec.multiple_px) == (32, 16, 64, 8)
    assert (spec.default_scheduler, spec.default_steps, spec.default_guidance) == ("euler", 25, 5.0)


@pytest.mark.parametrize(
    ("unet", "words"),
    [
        ({"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 40 + 6 * 8}, "make 64.*the refiner"),
        (
            {
                "addition_embed_type": None,
                "addition_time_embed_dim": None,
                "projection_class_embeddings_input_dim": None,
            },
            "addition_embed_type is None; a UNet of SDXL has 'text_time'",
        ),
    ],
)
def test_a_unet_of_another_input_is_rejected(tmp_path, unet, words):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, unet=unet)
    with pytest.raises(ModelError, match=words):
        open_model(str(folder))


def test_a_scheduler_that_would_clip_is_rejected(tmp_path):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, scheduler={"clip_sample": True})
    with pytest.raises(ModelError, match="clip_sample is true"):
        open_model(str(folder))


def test_text_encoders_of_another_width_are_rejected(tmp_path):
    folder = tiny_models.save_stable_diffusion_xl(tmp_path, unet={"cross_attention_dim": 32})
    with pytest.raises(ModelError, match="cross_attention_dim 32, but the text encoder's hidden_size is 80"):
        open_model(str(folder))
