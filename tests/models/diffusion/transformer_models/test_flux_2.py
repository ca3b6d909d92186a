"""FLUX.2 in what only it does; `test_each_family.py` has the rest."""

import itertools

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import Flux2KleinInpaintPipeline

import tiny_models
from flow_pipelines import generate_with_pipeline, make_request, open_pipeline, remember_prompts
from generating import PARITY_TOLERANCE, difference, generate, load
from noria.sampling.schedule import shift_of_length_and_steps


@pytest.fixture(scope="module")
def klein(folder_of):
    """Spec, executor, and diffusers' pipeline."""
    folder = folder_of("flux-2-klein")
    return *load(folder), open_pipeline(folder)


def test_a_distilled_model_takes_neither_guidance_nor_a_negative_prompt(tmp_path):
    folder = tiny_models.save_flux_2_klein(tmp_path, is_distilled=True, scheduler={"use_dynamic_shifting": False})
    spec, executor = load(folder)
    assert (spec.default_steps, spec.default_guidance, spec.schedulers) == (4, 1.0, ("flow-euler", "flow-unipc"))
    request = make_request(0, negative_prompt="blue", guidance_scale=7.0)
    assert not executor.prepare(request).guided
    ours = generate(executor, [request])[request.request_id, 0]
    theirs = generate_with_pipeline(open_pipeline(folder), make_request(0, guidance_scale=1.0))
    assert difference(ours, theirs) <= PARITY_TOLERANCE


@pytest.mark.parametrize(("family", "num_layers"), [("flux-2-klein", 28), ("flux-2-dev", 31)])
def test_layers_of_the_text_encoder_that_change_nothing_are_not_kept(folder_of, family, num_layers):
    assert len(load(folder_of(family))[1].model._text_encoder.layers) == num_layers


@pytest.mark.parametrize("has_mask", [True, False])
def test_start_images_and_masks_are_those_of_the_pipeline_without_its_reference(klein, has_mask, monkeypatch):
    """The pipeline for masks also shows the image to the transformer, as a reference, which is not served."""
    spec, executor, pipe = klein
    pixels = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    mask = np.full((32, 48), 0 if has_mask else 255, np.uint8)
    mask[8:24, 16:40] = 255
    start_pipe = remember_prompts(Flux2KleinInpaintPipeline(**pipe.components))
    start_pipe.set_progress_bar_config(disable=True)
    monkeypatch.setattr(
        start_pipe, "prepare_image_latents", lambda *_: (torch.zeros(1, 0, 16), torch.zeros(1, 0, 4, dtype=torch.long))
    )
    requests = [
        make_request(k, width=48, height=32, inference_steps=steps, strength=strength, has_mask=has_mask)
        for k, (steps, strength) in enumerate([(4, 0.5), (5, 0.75), (2, 1.0)])
    ]
    frame = memoryview(pixels.tobytes() + (mask.tobytes() if has_mask else b""))
    images = generate(executor, requests, frames=dict.fromkeys((each.request_id for each in requests), frame))
    for request in requests:
        theirs = generate_with_pipeline(
            start_pipe,
            request,
            folder=spec.path,
            strength=request.payload.strength,
            image=PIL.Image.fromarray(pixels),
            mask_image=PIL.Image.fromarray(mask),
        )
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_previews_are_near_the_image(klein):
    denoiser, pixels = klein[1].model, torch.full((1, 16, 16, 3), 128, dtype=torch.uint8)
    distribution = denoiser.encode(pixels)
    assert distribution.deviation_BCHW is None, "the pipeline draws no noise to encode"
    assert denoiser.preview_colours.shape == (17, 3)
    assert denoiser.decode(distribution.mean_BCHW).shape == pixels.shape


def test_the_shift_is_that_of_the_pipeline():
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    for num_tokens, num_steps in itertools.product((4, 4096, 4300, 4301, 9000), (1, 4, 50, 200)):
        assert shift_of_length_and_steps(num_tokens, num_steps) == compute_empirical_mu(num_tokens, num_steps)
