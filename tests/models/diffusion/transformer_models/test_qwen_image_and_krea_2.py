"""Qwen-Image and Krea 2 in what only they do; `test_each_family.py` has the rest."""

import numpy as np
import torch

import tiny_models
from flow_pipelines import generate_with_pipeline, make_request, open_pipeline
from generating import PARITY_TOLERANCE, difference, generate, load


def test_without_a_negative_prompt_an_image_is_not_guided(tiny_qwen_image_folder):
    executor, pipe = load(tiny_qwen_image_folder)[1], open_pipeline(tiny_qwen_image_folder)
    settings = {"prompt": "a square", "seed": 1, "width": 64, "height": 64, "inference_steps": 4}
    requests = [
        make_request(number, negative_prompt=negative, guidance_scale=scale, **settings)
        for number, (negative, scale) in enumerate([(None, 20.0), (None, 1.0), ("", 20.0), ("", 1.0)])
    ]
    assert [executor.prepare(request).num_rows for request in requests] == [1, 1, 2, 1]
    absent, absent_at_1, empty, empty_at_1 = generate(executor, requests).values()
    assert max(difference(absent, other) for other in (absent_at_1, empty_at_1)) <= 1
    assert difference(absent, empty) > 5
    assert difference(empty, generate_with_pipeline(pipe, requests[2])) <= PARITY_TOLERANCE


def test_krea_2_begins_with_the_latents_of_a_start_image_as_the_others_do(tmp_path):
    """Its pipeline takes latents and the last noise levels, but no image."""
    folder = tiny_models.save_krea2(tmp_path)
    executor, pipe = load(folder)[1], open_pipeline(folder)
    request = make_request(
        1, negative_prompt="", guidance_scale=8.0, inference_steps=5, strength=0.6, width=64, height=64
    )
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    ours = generate(executor, [request], frames={"r1": memoryview(pixels.tobytes())})["r1", 0]
    generator = torch.Generator().manual_seed(request.payload.seed)
    with torch.inference_mode():
        image = torch.from_numpy(pixels).movedim(-1, 0)[None, :, None] / 127.5 - 1
        latents = pipe.vae.encode(image).latent_dist.sample(generator)[:, :, 0]
    mean, std = (torch.tensor(pipe.vae.config[name])[:, None, None] for name in ("latents_mean", "latents_std"))
    levels = np.linspace(1, 1 / 5, 5)[2:]
    pipe.scheduler.set_timesteps(sigmas=levels, mu=executor.model.schedule(64, 64, 5).mu)
    sigma = pipe.scheduler.sigmas[0]
    noise = torch.randn(1, 4, 16, 16, generator=generator)
    packed = pipe._pack_latents(sigma * noise + (1 - sigma) * (latents - mean) / std, 1, 4, 16, 16)
    theirs = generate_with_pipeline(pipe, request, sigmas=levels, latents=packed)
    assert difference(ours, theirs) <= PARITY_TOLERANCE


def test_distilled_krea_2_has_a_constant_shift(tmp_path):
    folder = tiny_models.save_krea2(tmp_path, is_distilled=True)
    spec, executor = load(folder)
    assert (spec.default_steps, spec.default_guidance) == (8, 0.0)
    assert {executor.model.schedule(*size, 4).mu for size in ((64, 64), (32, 48), (64, 48))} == {1.15}
    request = make_request(3, guidance_scale=0.5)
    ours = generate(executor, [request])["r3", 0]
    assert difference(ours, generate_with_pipeline(open_pipeline(folder), request)) <= PARITY_TOLERANCE
