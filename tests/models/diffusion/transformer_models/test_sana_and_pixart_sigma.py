"""Sana and PixArt-Σ in the running batch, compared with diffusers' pipelines at exact sizes, and with each alone."""

import json
import shutil

import numpy as np
import pytest
import torch

import tiny_models
from flow_pipelines import PARITY_TOLERANCE, load, open_pipeline
from generating import assert_rows_as_alone, difference, generate
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.errors import InvalidField, ModelError
from noria.images import scheduler_names
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.protocol.diffusion import Lora
from noria.testing.requests import make_image_request
from pipelines import run_pipeline, set_scheduler

SAVE = {"sana": tiny_models.save_sana, "pixart-sigma": tiny_models.save_pixart_sigma}
SCHEDULERS = {
    "sana": [choice.name for choice in scheduler_names.choices_of_family("flow")],
    "pixart-sigma": [choice.name for choice in scheduler_names.choices_of_family("diffusion")],
}
# They stand for one call and two a step, with noise and with a history; `sampling/test_parity.py` has all.
KINDS = ("dpm++2m", "pndm", "heun", "dpm++2m-sde", "unipc")
EACH_KIND = [("sana", name) for name in SCHEDULERS["sana"]] + [("pixart-sigma", name) for name in KINDS]
PROMPTS = [" A Red circle ", "a blue square above a green star, drawn with a soft pencil on grey paper", ""]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of each family a folder's spec and executor, and diffusers' pipeline."""
    found = {}
    for family, save in SAVE.items():
        folder = save(tmp_path_factory.mktemp("tiny") / family)
        found[family] = (*load(folder), open_pipeline(folder))
    return found


@pytest.fixture(params=SAVE)
def model(request, models):
    return models[request.param]


def make_request(spec, number, **fields):
    settings = {
        "prompt": PROMPTS[number % 3],
        "negative_prompt": [None, "A black cross", ""][number % 3],
        "seed": 4000 + number,
        "width": spec.default_width_px,
        "height": spec.default_height_px,
        "inference_steps": 3 + number % 5,
        "guidance_scale": [6.0, 1.0, 3.5][number % 3],
        "scheduler": spec.default_scheduler,
    }
    return make_image_request(f"r{number}", **settings | fields)


def generate_with_pipeline(pipe, request):
    """The image of diffusers' own loop, [height, width, 3]."""
    set_scheduler(pipe, request, **({"clip_sample": False} if "PixArt" in type(pipe).__name__ else {}))
    negative_prompt = request.payload.negative_prompt or ""
    return run_pipeline(
        pipe, request, negative_prompt=negative_prompt, clean_caption=False, use_resolution_binning=False
    )


def assert_like_the_pipeline(model, request):
    _, executor, pipe = model
    ours = generate(executor, [request])[request.request_id, 0]
    assert difference(ours, generate_with_pipeline(pipe, request)) <= PARITY_TOLERANCE, request
    assert ours.std() > 10, "the image is flat"


@pytest.mark.parametrize(("family", "name"), EACH_KIND)
def test_each_kind_of_scheduler_gives_the_image_of_the_pipeline(models, family, name):
    spec = models[family][0]
    assert name in spec.schedulers
    for number, steps in enumerate([4, 9]):
        request = make_request(spec, number, scheduler=name, inference_steps=steps, width=96 if number else 64)
        assert_like_the_pipeline(models[family], request)


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(model):
    spec, executor, pipe = model
    names = SCHEDULERS[spec.family]
    requests = [
        make_request(
            spec,
            number,
            scheduler=names[(5 * number) % len(names)],
            inference_steps=2 + number,
            width=[64, 96][number // 3],
        )
        for number in range(6)
    ]
    together = generate(executor, requests, arrivals=[(5 * number) % 7 for number in range(6)])
    for request in requests:
        image = together[request.request_id, 0]
        assert difference(image, generate_with_pipeline(pipe, request)) <= PARITY_TOLERANCE, request
        assert difference(image, generate(executor, [request])[request.request_id, 0]) <= 1, request


def test_rows_of_a_call_equal_the_rows_alone(model):
    """Texts of several lengths are padded in the call, and not when they are alone."""
    denoiser = model[1].model
    generator = torch.Generator().manual_seed(0)
    times = torch.tensor([1000.0, 640.0, 333.0, 1.0])
    with torch.inference_mode():
        texts = denoiser.text_encode([*PROMPTS, "many words " * 60])
        assert len({len(text.tokens["encoder_hidden_states"]) for text in texts}) == 4
        latents = torch.randn(4, *denoiser.latent_shape(96, 64), generator=generator)
        assert_rows_as_alone(denoiser, latents, times, texts)


def test_prompts_are_encoded_and_cut_as_by_the_pipeline(model):
    spec, executor, pipe = model
    prompts = [PROMPTS[0], "", "É many Words " * 99]
    default = {} if spec.family == "pixart-sigma" else {"complex_human_instruction": _default_instruction(pipe)}
    prefix = executor.model.guidance.prompt_prefix
    with torch.inference_mode():
        ours = executor.model.text_encode([prefix + prompt for prompt in prompts] + prompts)
        theirs = []
        for prompt in prompts:
            padded, mask, negative, negative_mask = pipe.encode_prompt(prompt, negative_prompt=prompt, **default)
            theirs.append((padded[mask.bool()], negative[negative_mask.bool()]))
    for text, expected in zip(ours, [each for pair in zip(*theirs, strict=True) for each in pair], strict=True):
        tokens = text.tokens["encoder_hidden_states"]
        assert tokens.shape == expected.shape
        assert (tokens - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert max(len(text.tokens["encoder_hidden_states"]) for text in ours) == 300


def _default_instruction(pipe):
    import inspect

    return inspect.signature(pipe.__call__).parameters["complex_human_instruction"].default


def test_prompts_sizes_and_guidance_change_the_image(model):
    """Else the comparisons with the pipeline could not fail for them."""
    spec, executor, _ = model
    image = generate(executor, [make_request(spec, 0)])["r0", 0]
    changes = {"prompt": "a"}, {"negative_prompt": PROMPTS[1]}, {"guidance_scale": 1.0}
    images = [generate(executor, [make_request(spec, 0, **change)])["r0", 0] for change in changes]
    assert min(difference(image, other) for other in images) > PARITY_TOLERANCE


def test_rows_padded_to_buckets_change_no_image(model):
    spec, executor, _ = model
    padded = load(spec.folder, buckets=(4, 16))[1]
    requests = [make_request(spec, number) for number in range(3)]
    without, images = generate(executor, requests), generate(padded, requests)
    assert all(difference(images[key], image) <= 1 for key, image in without.items())


def test_images_of_sana_in_bfloat16_begin_with_noise_in_float32(models):
    """Their rounding errors grow in random models: by as much in diffusers' pipelines."""
    spec, executor, _ = models["sana"]
    rounded = load(spec.folder, dtype="bfloat16")[1]
    assert (rounded.model.dtype, rounded.model.noise_dtype) == (torch.bfloat16, torch.float32)
    requests = [make_request(spec, number) for number in range(2)]
    images, of_rounded = generate(executor, requests), generate(rounded, requests)
    assert all(np.abs(image - of_rounded[key].astype(float)).mean() < 20 for key, image in images.items())


@pytest.mark.parametrize(
    ("family", "transformer", "scheduler"),
    [
        ("sana", {"out_channels": 8}, {}),
        ("sana", {"interpolation_scale": 2, "timestep_scale": 0.5, "qk_norm": "rms_norm_across_heads"}, {}),
        ("sana", {}, {**tiny_models.FLOW_SCHEDULER, "prediction_type": None, "use_flow_sigmas": None}),
        ("pixart-sigma", {"out_channels": 4}, {}),
        ("pixart-sigma", {}, {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
    ],
)
def test_the_settings_of_parts_are_the_folders(tmp_path, family, transformer, scheduler):
    folder = SAVE[family](tmp_path, transformer=transformer, scheduler=scheduler)
    model = *load(folder), open_pipeline(folder)
    assert_like_the_pipeline(model, make_request(model[0], 0))


def test_large_images_of_sana_are_decoded_in_tiles_as_by_the_pipeline(models):
    folder = models["sana"][0].folder
    spec, executor, pipe = *load(folder, vae_tiling=True), open_pipeline(folder)
    pipe.vae.enable_tiling()
    request = make_request(spec, 0, width=544, height=32)  # tiles are 512 px wide
    assert_like_the_pipeline((spec, executor, pipe), request)
    assert not np.array_equal(*(generate(each, [request])["r0", 0] for each in (executor, models["sana"][1])))


def test_an_adapter_of_sana_changes_its_image_alone_and_as_by_peft(models, tmp_path):
    spec, bare, pipe = models["sana"]
    # Not of the convolutions of single channels, which no adapter can change.
    endings = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "conv_inverted",
        "conv_point",
        "linear",
        "proj_out",
        "proj",
        "linear_1",
    )
    save_diffusers_lora(tmp_path / "all.safetensors", bare.model.lora_parts, *endings, rank=2)
    config = EngineConfig(dtype="float32", slots=8, threads=1, loras=(str(tmp_path),))
    executor = DiffusionExecutor(bare.model, config)
    lora = Lora("all", 0.7, digest_of(tmp_path / "all.safetensors"))
    requests = [make_request(spec, k, loras=(lora,) * (k % 2)) for k in range(4)]
    together = generate(executor, requests, arrivals=[0, 2, 1, 0])
    for number, request in enumerate(requests):
        image = together[request.request_id, 0]
        assert difference(image, generate(executor, [request])[request.request_id, 0]) <= 1
        without = generate(bare, [make_request(spec, number)])[request.request_id, 0]
        assert (difference(image, without) > 5) if number % 2 else difference(image, without) <= 1
    pipe.load_lora_weights(tmp_path, weight_name="all.safetensors", adapter_name="own")
    pipe.set_adapters(["own"], [0.7])
    try:
        theirs = {k: generate_with_pipeline(pipe, requests[k]) for k in (1, 3)}
    finally:
        pipe.unload_lora_weights()
    for number, image in theirs.items():
        assert difference(together[f"r{number}", 0], image) <= PARITY_TOLERANCE


def test_pixart_sigma_takes_no_adapters(models):
    spec, executor, _ = models["pixart-sigma"]
    assert not spec.takes_loras
    with pytest.raises(InvalidField, match="has no parts that LoRAs can change"):  # if no front end has refused it
        executor.prepare(make_request(spec, 0, loras=(Lora("ink", digest="0" * 12),)))


@pytest.mark.parametrize(("family", "scheduler"), [("sana", "flow-euler"), ("pixart-sigma", "ddim")])
def test_the_preview_of_the_last_call_is_the_image_of_its_latents(models, family, scheduler):
    """At the last call, the prediction of the image is the final sample; DDIM's is one step of training before it."""
    spec, executor, _ = models[family]
    table = executor.prepare(make_request(spec, 0, scheduler=scheduler)).table
    coefficients, last = table.coefficients[-1], executor.model.clean_weights(table.timesteps[-1:])[:, 0]
    np.testing.assert_allclose(coefficients[coefficients != 0], last, rtol=1e-5, atol=0.02 * (family != "sana"))
    assert executor.model.preview_colours.shape == (5, 3)


def test_bounds_and_defaults(model):
    spec, executor, _ = model
    sides = (spec.default_width_px, spec.default_height_px, spec.min_side_px, spec.max_side_px, spec.multiple_px)
    defaults = spec.default_scheduler, spec.default_steps, spec.default_guidance, spec.takes_start_images
    assert (*sides, *defaults) == {
        "sana": (64, 64, 64, 128, 32, "flow-dpm++2m", 20, 4.5, False),
        "pixart-sigma": (32, 32, 32, 64, 8, "dpm++2m", 20, 4.5, False),
    }[spec.family]
    assert list(spec.schedulers) == SCHEDULERS[spec.family]
    assert executor.model.latent_shape(96, 64) == (4, 16, 24)


@pytest.mark.parametrize(
    ("family", "file", "change", "words"),
    [
        ("sana", "transformer/config.json", {"in_channels": 8}, "in_channels is 8; supported is 4"),
        ("sana", "transformer/config.json", {"out_channels": 6}, "out_channels is 6; supported is 4"),
        ("sana", "transformer/config.json", {"caption_channels": 32}, "caption_channels is 32; supported is 24"),
        ("sana", "transformer/config.json", {"cross_attention_dim": 24}, "cross_attention_dim is 24; supported is 32"),
        ("sana", "transformer/config.json", {"guidance_embeds": True}, "guidance_embeds"),
        (
            "sana",
            "text_encoder/config.json",
            {"vocab_size": 9},
            "token ids up to 35, but the text encoder has 9 tokens",
        ),
        ("sana", "vae/config.json", {"latent_channels": 8}, "in_channels is 4; supported is 8"),
        ("sana", "scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "use_dynamic_shifting is true"),
        ("sana", "scheduler/scheduler_config.json", {"prediction_type": "epsilon"}, "one of the flow family"),
        ("sana", "model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "supported: AutoencoderDC"),
        ("sana", "model_index.json", {"_class_name": "SanaSprintPipeline"}, "'SanaSprintPipeline', which no model"),
        ("pixart-sigma", "transformer/config.json", {"in_channels": 8}, "in_channels is 8; supported is 4"),
        ("pixart-sigma", "transformer/config.json", {"out_channels": 6}, "out_channels is 6; supported is 4"),
        (
            "pixart-sigma",
            "transformer/config.json",
            {"caption_channels": None},
            "caption_channels is 0; supported is 40",
        ),
        ("pixart-sigma", "transformer/config.json", {"use_additional_conditions": True}, "as PixArt-α's does"),
        (
            "pixart-sigma",
            "transformer/config.json",
            {"use_additional_conditions": None, "sample_size": 128},
            "as PixArt-α's does",
        ),
        (
            "pixart-sigma",
            "transformer/config.json",
            {"attention_head_dim": 8, "cross_attention_dim": 16},
            r"pos_embed.proj.weight is \[32, 4, 2, 2\], but config.json has num_attention_heads",
        ),
        ("pixart-sigma", "scheduler/scheduler_config.json", {"clip_sample": True}, "clip_sample is true"),
        (
            "pixart-sigma",
            "scheduler/scheduler_config.json",
            tiny_models.FLOW_SCHEDULER,
            "a scheduler of the flow family",
        ),
        ("pixart-sigma", "model_index.json", {"_class_name": "PixArtAlphaPipeline"}, "'PixArtAlphaPipeline', which no"),
    ],
)
def test_a_folder_that_is_not_supported_is_rejected(models, tmp_path, family, file, change, words):
    folder = shutil.copytree(models[family][0].folder, tmp_path / "m")
    tree = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(tree | change))
    with pytest.raises(ModelError, match=words):
        open_model(str(folder))


def test_the_class_that_published_folders_of_pixart_sigma_name_is_read(models, tmp_path):
    folder = shutil.copytree(models["pixart-sigma"][0].folder, tmp_path / "m")
    for name, change in (
        ("model_index.json", {"transformer": ["diffusers", "Transformer2DModel"]}),
        (
            "transformer/config.json",
            {"_class_name": "Transformer2DModel", "num_vector_embeds": None, "use_linear_projection": False},
        ),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    spec, executor = load(folder)
    request = make_request(spec, 0)
    assert difference(*(generate(each, [request])["r0", 0] for each in (executor, models["pixart-sigma"][1]))) == 0
