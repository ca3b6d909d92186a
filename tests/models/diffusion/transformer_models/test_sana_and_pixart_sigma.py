"""Sana and PixArt-Σ in what only they do; `test_each_family.py` has the rest."""

import json
import shutil
from functools import partial

import pytest
import torch

import tiny_models
from flow_pipelines import generate_with_pipeline, make_request, open_pipeline
from generating import PARITY_TOLERANCE, assert_adapter_changes_its_image_alone, difference, generate, load
from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.protocol.diffusion import Lora

SAVE = {"sana": tiny_models.save_sana, "pixart-sigma": tiny_models.save_pixart_sigma}
SCHEDULERS = {
    "sana": [choice.name for choice in scheduler_names.choices_of_family("flow")],
    "pixart-sigma": [choice.name for choice in scheduler_names.choices_of_family("diffusion")],
}


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


def request_of(spec, number, **fields):
    size = {"width": spec.default_width_px, "height": spec.default_height_px}
    return make_request(number, **size | {"scheduler": spec.default_scheduler} | fields)


def test_prompts_are_encoded_and_cut_as_by_the_pipeline(model):
    spec, executor, pipe = model
    prompts = [" A Red circle ", "", "É many Words " * 99]
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


def test_an_adapter_of_sana_changes_its_image_alone_and_as_by_peft(models, tmp_path):
    spec, executor, pipe = models["sana"]
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
    images = assert_adapter_changes_its_image_alone(executor, partial(request_of, spec), tmp_path, *endings)
    pipe.load_lora_weights(tmp_path, weight_name="all.safetensors", adapter_name="own")
    pipe.set_adapters(["own"], [0.7])
    try:
        theirs = {k: generate_with_pipeline(pipe, request_of(spec, k)) for k in (1, 3)}
    finally:
        pipe.unload_lora_weights()
    for number, image in theirs.items():
        assert difference(images[f"r{number}", 0], image) <= PARITY_TOLERANCE


def test_pixart_sigma_takes_no_adapters(models):
    spec, executor, _ = models["pixart-sigma"]
    assert not spec.takes_loras
    with pytest.raises(InvalidField, match="has no parts that LoRAs can change"):  # if no front end has refused it
        executor.prepare(request_of(spec, 0, loras=(Lora("ink", digest="0" * 12),)))


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
    request = request_of(spec, 0)
    assert difference(*(generate(each, [request])["r0", 0] for each in (executor, models["pixart-sigma"][1]))) == 0
