"""Chroma in the running batch, compared with diffusers' own pipelines and with each image alone."""

import json
import shutil

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch

import tiny_models
from flow_pipelines import PARITY_TOLERANCE, PROMPTS, generate_with_pipeline, load, make_request, open_pipeline
from generating import assert_rows_as_alone, difference, generate
from noria.errors import ModelError
from noria.models.catalog import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_chroma(tmp_path_factory.mktemp("chroma") / "chroma")


@pytest.fixture(scope="module")
def model(folder):
    """Spec, executor, and diffusers' pipeline."""
    return *load(folder), open_pipeline(folder)


@pytest.mark.parametrize("settings", [{"use_dynamic_shifting": False}, {"use_beta_sigmas": True}])
def test_the_schedulers_own_settings_are_the_folders(tmp_path, settings):
    folder = tiny_models.save_chroma(tmp_path, scheduler=settings)
    executor, pipe, request = load(folder)[1], open_pipeline(folder), make_request(0, inference_steps=5)
    ours = generate(executor, [request])[request.request_id, 0]
    assert difference(ours, generate_with_pipeline(pipe, request)) <= PARITY_TOLERANCE


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(model):
    _, executor, pipe = model
    requests = [
        make_request(
            k,
            inference_steps=2 + k % 5,
            guidance_scale=[1.0, 3.5, 7.0][k % 3],
            width=[32, 48][k // 4],
            negative_prompt=[None, "blue", ""][k % 3],
        )
        for k in range(8)
    ]
    together = generate(executor, requests, arrivals=[(5 * k) % 7 for k in range(8)])
    for request in requests:
        image = together[request.request_id, 0]
        assert difference(image, generate_with_pipeline(pipe, request)) <= PARITY_TOLERANCE, request
        assert difference(image, generate(executor, [request])[request.request_id, 0]) <= 1, request
        assert image.std() > 10, "the image is flat"


def test_rows_of_a_call_equal_the_rows_alone(model):
    denoiser = model[1].model
    with torch.inference_mode():
        texts = denoiser.text_encode(PROMPTS)
        latents, times = torch.randn(3, *denoiser.latent_shape(32, 24)), torch.tensor([999.0, 640.0, 3.0])
        assert_rows_as_alone(denoiser, latents, times, texts, min_change=1e-4)


def test_prompts_and_their_masks_are_those_of_the_pipeline(model):
    prompts = [*PROMPTS, "", "red " * 600]
    with torch.inference_mode():
        ours = model[1].model.text_encode(prompts)
        for prompt, text in zip(prompts, ours, strict=True):
            expected, _, mask, *_ = model[2].encode_prompt(prompt, do_classifier_free_guidance=False)
            torch.testing.assert_close(text.tokens["encoder_hidden_states"], expected[0])
            assert torch.equal(text.tokens["attention_mask"], mask[0])


@pytest.mark.parametrize("has_mask", [False, True])
def test_start_images_and_masks_give_the_images_of_the_pipelines(model, has_mask):
    spec, executor, pipe = model
    pixels = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    mask = np.zeros((32, 48), np.uint8)
    mask[8:24, 16:40] = 255
    options = {"image": PIL.Image.fromarray(pixels), "max_sequence_length": 512}  # that for masks has 256 by default
    if has_mask:
        options["mask_image"] = PIL.Image.fromarray(mask)
    start_class = diffusers.ChromaInpaintPipeline if has_mask else diffusers.ChromaImg2ImgPipeline
    start_pipe = start_class(**pipe.components)
    start_pipe.set_progress_bar_config(disable=True)
    pipe.transformer.register_to_config(guidance_embeds=False)  # the pipeline for masks reads it, and fails without
    requests = [
        make_request(k, width=48, height=32, inference_steps=steps, strength=strength, has_mask=has_mask)
        for k, (steps, strength) in enumerate([(4, 0.5), (5, 0.75), (3, 1.0)])
    ]
    frame = memoryview(pixels.tobytes() + (mask.tobytes() if has_mask else b""))
    images = generate(executor, requests, frames=dict.fromkeys((each.request_id for each in requests), frame))
    for request in requests:
        theirs = generate_with_pipeline(start_pipe, request, spec.path, strength=request.payload.strength, **options)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_bounds_and_defaults(model):
    spec = model[0]
    assert (spec.family, spec.pipeline, spec.schedulers) == ("chroma", "ChromaPipeline", ("flow-euler",))
    assert (spec.default_width_px, spec.min_side_px, spec.max_side_px, spec.multiple_px) == (512, 16, 1024, 8)
    assert (spec.default_scheduler, spec.default_steps, spec.default_guidance) == ("flow-euler", 35, 5.0)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer/config.json", {"joint_attention_dim": 24}, "joint_attention_dim is 24; supported is 40"),
        ("transformer/config.json", {"attention_head_dim": 8}, "attention_head_dim is 8; supported is 16"),
        ("transformer/config.json", {"num_attention_heads": 4}, "x_embedder.weight is .32, 16., but config.json has"),
        ("transformer/config.json", {"approximator_num_channels": 16}, "in_proj.weight is .16, 8., but config.json"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "ChromaTransformer2DModel"),
        ("text_encoder/config.json", {"vocab_size": 20}, "has 35 token ids, but the text encoder has 20 tokens"),
        ("text_encoder/config.json", {"vocab_size": 99}, "shared.weight is .64, 40., but config.json has vocab_size"),
        ("tokenizer/tokenizer.json", {"model": {"vocab": {"a": 1}}}, "contains no vocabulary of T5"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "one of the flow family"),
        ("vae/config.json", {"latent_channels": 8}, "in_channels is 16; supported is 32"),
        ("model_index.json", {"text_encoder": ["transformers", "CLIPTextModel"]}, "supported: T5EncoderModel"),
        ("noria.json", {"default_scheduler": "flow-unipc"}, "flow-unipc; supported are flow-euler"),
    ],
)
def test_parts_of_another_model_are_rejected(folder, tmp_path, file, change, words):
    copy = shutil.copytree(folder, tmp_path / "m")
    tree = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    (copy / file).write_text(json.dumps(tree | change))
    with pytest.raises(ModelError, match=words):
        open_model(str(copy))
