"""FLUX.2 klein and dev in the running batch, compared with diffusers' own pipeline and with each image alone."""

import itertools
import json
import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import Flux2KleinInpaintPipeline

import tiny_models
from flow_pipelines import PARITY_TOLERANCE, PROMPTS, generate_with_pipeline, load, make_request, open_pipeline
from generating import assert_rows_as_alone, difference, generate
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.sampling.schedule import shift_of_length_and_steps

SCHEDULERS = ("flow-euler", "flow-unipc", "flow-dpm++2m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_flux_2_klein(tmp_path_factory.mktemp("klein") / "base")


@pytest.fixture(scope="module")
def klein(folder):
    """Spec, executor, and diffusers' pipeline."""
    return *load(folder), open_pipeline(folder)


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    folder = tiny_models.save_flux_2_dev(tmp_path_factory.mktemp("dev") / "dev")
    return *load(folder), open_pipeline(folder)


@pytest.fixture(params=["klein", "dev"])
def model(request):
    return request.getfixturevalue(request.param)


def pipeline_image(pipe, request, **options):
    """The pipeline of klein takes a negative prompt only as its embedding, that of dev none."""
    negative = request.payload.negative_prompt
    if negative is not None and type(pipe).__name__ != "Flux2Pipeline":
        with torch.inference_mode():
            options["negative_prompt_embeds"] = pipe.encode_prompt(negative)[0]
    options = {"negative_prompt": None} | options
    return generate_with_pipeline(pipe, request, **options)


def test_each_scheduler_gives_the_image_of_the_pipeline(model):
    spec, executor, pipe = model
    assert spec.schedulers == SCHEDULERS
    requests = [
        make_request(number, scheduler=name, inference_steps=steps)
        for number, (name, steps) in enumerate(itertools.product(SCHEDULERS, (2, 5)))
    ]
    for request in requests:
        ours = generate(executor, [request])[request.request_id, 0]
        assert difference(ours, pipeline_image(pipe, request)) <= PARITY_TOLERANCE, request
        assert ours.std() > 10, "the image is flat"


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(model):
    spec, executor, pipe = model
    requests = [
        make_request(
            k,
            scheduler=spec.schedulers[k % 3],
            inference_steps=2 + k % 5,
            guidance_scale=[1.0, 3.5, 7.0][k % 3],
            width=[32, 48][k // 4],
            negative_prompt=[None, "blue"][k % 2],
        )
        for k in range(8)
    ]
    together = generate(executor, requests, arrivals=[(5 * k) % 7 for k in range(8)])
    for request in requests:
        image = together[request.request_id, 0]
        assert difference(image, pipeline_image(pipe, request)) <= PARITY_TOLERANCE, request
        assert difference(image, generate(executor, [request])[request.request_id, 0]) <= 1, request


def test_a_distilled_model_takes_neither_guidance_nor_a_negative_prompt(tmp_path):
    folder = tiny_models.save_flux_2_klein(tmp_path, is_distilled=True, scheduler={"use_dynamic_shifting": False})
    spec, executor = load(folder)
    assert (spec.default_steps, spec.default_guidance, spec.schedulers) == (4, 1.0, ("flow-euler", "flow-unipc"))
    request = make_request(0, negative_prompt="blue", guidance_scale=7.0)
    assert not executor.prepare(request).guided
    ours = generate(executor, [request])[request.request_id, 0]
    theirs = generate_with_pipeline(open_pipeline(folder), make_request(0, guidance_scale=1.0))
    assert difference(ours, theirs) <= PARITY_TOLERANCE


def test_rows_of_a_call_equal_the_rows_alone(model):
    denoiser = model[1].model
    with torch.inference_mode():
        texts = denoiser.text_encode(PROMPTS)
        latents, times = torch.randn(3, *denoiser.latent_shape(32, 24)), torch.tensor([999.0, 640.0, 3.0])
        assert_rows_as_alone(denoiser, latents, times, texts)


def test_prompts_are_encoded_and_cut_as_by_the_pipeline(model):
    prompts = [*PROMPTS, "", "<|im_end|> é 水车 " * 99, "</s>[/INST][IMG]"]
    with torch.inference_mode():
        ours = model[1].model.text_encode(prompts)
        for prompt, text in zip(prompts, ours, strict=True):
            expected = model[2].encode_prompt(prompt)[0][0]
            actual = text.tokens["encoder_hidden_states"]
            assert actual.shape == (512, 48)
            assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    num_layers = {"Flux2KleinPipeline": 28, "Flux2Pipeline": 31}[model[0].pipeline]
    assert len(model[1].model._text_encoder.layers) == num_layers, "the last layers change nothing"


@pytest.mark.parametrize("has_mask", [True, False])
def test_start_images_and_masks_are_those_of_the_pipeline_without_its_reference(klein, has_mask, monkeypatch):
    """The pipeline for masks also shows the image to the transformer, as a reference, which is not served."""
    spec, executor, pipe = klein
    pixels = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    mask = np.full((32, 48), 0 if has_mask else 255, np.uint8)
    mask[8:24, 16:40] = 255
    start_pipe = Flux2KleinInpaintPipeline(**pipe.components)
    start_pipe.set_progress_bar_config(disable=True)
    monkeypatch.setattr(
        start_pipe, "prepare_image_latents", lambda *_: (torch.zeros(1, 0, 16), torch.zeros(1, 0, 4, dtype=torch.long))
    )
    requests = [
        make_request(k, width=48, height=32, inference_steps=steps, strength=strength, has_mask=has_mask)
        for k, (steps, strength) in enumerate([(4, 0.5), (5, 0.5), (3, 1.0)])
    ]
    frame = memoryview(pixels.tobytes() + (mask.tobytes() if has_mask else b""))
    images = generate(executor, requests, frames=dict.fromkeys((each.request_id for each in requests), frame))
    for request in requests:
        theirs = pipeline_image(
            start_pipe,
            request,
            folder=spec.path,
            strength=request.payload.strength,
            image=PIL.Image.fromarray(pixels),
            mask_image=PIL.Image.fromarray(mask),
        )
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_previews_are_near_the_image(model):
    denoiser, pixels = model[1].model, torch.full((1, 16, 16, 3), 128, dtype=torch.uint8)
    distribution = denoiser.encode(pixels)
    assert distribution.deviation_BCHW is None, "the pipeline draws no noise to encode"
    assert denoiser.preview_colours.shape == (17, 3)
    assert denoiser.decode(distribution.mean_BCHW).shape == pixels.shape


def test_the_shift_is_that_of_the_pipeline():
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    for num_tokens, num_steps in itertools.product((4, 4096, 4300, 4301, 9000), (1, 4, 50, 200)):
        assert shift_of_length_and_steps(num_tokens, num_steps) == compute_empirical_mu(num_tokens, num_steps)


def test_bounds_and_defaults(model):
    spec = model[0]
    assert (spec.family, spec.pipeline) in (("flux-2-klein", "Flux2KleinPipeline"), ("flux-2-dev", "Flux2Pipeline"))
    assert (spec.default_width_px, spec.min_side_px, spec.max_side_px, spec.multiple_px) == (512, 16, 1024, 8)
    assert (spec.default_scheduler, spec.default_steps, spec.default_guidance) == ("flow-euler", 50, 4.0)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer/config.json", {"joint_attention_dim": 24}, "joint_attention_dim is 24; supported is 48"),
        ("transformer/config.json", {"attention_head_dim": 8}, "attention_head_dim is 8; supported is 16"),
        ("transformer/config.json", {"num_attention_heads": 4}, "x_embedder.weight is .32, 16., but config.json has"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "Flux2Transformer2DModel"),
        ("text_encoder/config.json", {"num_hidden_layers": 20}, "num_hidden_layers is 20; at least 27 are needed"),
        ("text_encoder/config.json", {"model_type": "mistral3"}, "model_type"),
        ("text_encoder/config.json", {"vocab_size": 20}, "token ids up to 258, but the text encoder has 20"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "one of the flow family"),
        ("vae/config.json", {"latent_channels": 8}, "in_channels is 16; supported is 32"),
        ("vae/config.json", {"patch_size": [2, 3]}, "patch_size is 3; supported is 2"),
        ("model_index.json", {"is_distilled": "yes"}, "is_distilled"),
        ("model_index.json", {"_class_name": "Flux2Pipeline"}, "supported: PixtralProcessor"),
        ("model_index.json", {"_class_name": "Flux2KleinKVPipeline"}, "which no model family has"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "'AutoencoderKL'; supported: AutoencoderKLFlux2"),
    ],
)
def test_parts_of_another_model_are_rejected(folder, tmp_path, file, change, words):
    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
    with pytest.raises(ModelError, match=words):
        open_model(str(copy))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"guidance_embeds": False}, "guidance_embeds is false"),
        ("text_encoder/config.json", {"model_type": "qwen3"}, "model_type is 'qwen3'; supported: mistral3"),
        ("text_encoder/config.json", {"text_config": {"hidden_size": 16, "vocab_size": 264}}, "num_hidden_layers"),
        (
            "text_encoder/config.json",
            {"text_config": tiny_models.FLUX_2_TEXT | {"num_hidden_layers": 20}},
            "num_hidden_layers is 20; at least 30 are needed",
        ),
    ],
)
def test_parts_of_another_model_than_dev_are_rejected(dev, tmp_path, file, change, words):
    copy = shutil.copytree(dev[0].folder, tmp_path / "m")
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
    with pytest.raises(ModelError, match=words):
        open_model(str(copy))


def test_weights_in_several_files_are_read(klein, tmp_path):
    copy = shutil.copytree(klein[0].folder, tmp_path / "m")
    shutil.rmtree(copy / "transformer")
    klein[2].transformer.save_pretrained(copy / "transformer", max_shard_size="40KB")
    assert len(list((copy / "transformer").glob("*.safetensors"))) > 1
    request = make_request(0, inference_steps=1)
    ours, expected = (generate(executor, [request])["r0", 0] for executor in (load(copy)[1], klein[1]))
    assert np.array_equal(ours, expected)
