"""Qwen-Image 2.1 with references and opacity; `test_each_family.py` has the rest."""

import json
import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from flow_pipelines import generate_with_pipeline, make_request, open_pipeline
from generating import PARITY_TOLERANCE, difference, generate, load
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.errors import ModelError
from noria.images import reference_size
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.loras.lora_file import read_lora
from noria.protocol.diffusion import Lora
from qwen_pipelines import request_with_references, shown_images

PROMPTS = ["a red circle", "a blue square above a green star, drawn with a soft pencil on grey paper", ""]
SIZES = [(64, 64), (64, 96), (128, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_qwen_image_21(tmp_path_factory.mktemp("qwen") / "qwen-image-2.1")


@pytest.fixture(scope="module")
def model(folder):
    """Spec, executor, and diffusers' pipeline."""
    return *load(folder), open_pipeline(folder)


def settings_of(number):
    width, height = SIZES[number % 3]
    return {
        "prompt": PROMPTS[number % 3],
        "negative_prompt": [None, "a black cross", ""][number // 2 % 3],
        "width": width,
        "height": height,
        "inference_steps": 2 + number % 3,
        "guidance_scale": [8.0, 1.0][number // 3 % 2],
        "scheduler": ("flow-euler", "flow-unipc")[number % 2],
    }


def request_of(number, **fields):
    return make_request(number, **settings_of(number) | fields)


def pipeline_image(model, request):
    spec, _, pipe = model
    options = {}
    if request.payload.reference_images:
        images = shown_images(int(request.request_id[1:]), len(request.payload.reference_images))
        options = {"image": images, "output_resolution": 64}
    return generate_with_pipeline(pipe, request, spec.path, **options)


@pytest.fixture
def _small_references(monkeypatch):
    """Images are shown in 64² instead of 1024² pixels."""
    monkeypatch.setattr(reference_size, "_VISION_AREA_PX", 64**2)


@pytest.mark.usefixtures("_small_references")
def test_references_give_the_images_of_the_pipeline_beside_images_without_any(model):
    spec, executor, _ = model
    numbers = [1, 0, 2, 3]  # images of each request
    made = [
        request_with_references(spec, number, num_images, **settings_of(number))
        for number, num_images in enumerate(numbers)
    ]
    requests, frames = [request for request, _ in made], {each.request_id: frame for each, frame in made if frame}
    together = generate(executor, requests, [0, 2, 1, 0], frames)
    for number, request in enumerate(requests):
        image = together[request.request_id, 0]
        assert difference(image, pipeline_image(model, request)) <= PARITY_TOLERANCE, request
        assert difference(image, generate(executor, [request], frames=frames)[request.request_id, 0]) <= 1, request
        without = generate(executor, [request_of(number)])[request.request_id, 0]
        assert (difference(image, without) > 5) == bool(numbers[number])


def test_prompts_are_encoded_as_by_the_pipeline_and_longer_ones_are_cut(model):
    with torch.inference_mode():
        texts = [*PROMPTS, "<|im_end|> é 水车 < " * 9, "\n a"]
        for text, ours in zip(texts, model[1].model.text_encode(texts), strict=True):
            theirs, mask, _ = model[2].encode_prompt(text)
            tokens = ours.tokens["encoder_hidden_states"]
            assert mask is None
            assert tokens.shape == theirs[0].shape
            assert (tokens - theirs[0]).abs().max() <= 1e-5 * theirs.abs().max()
        (longest,) = model[1].model.text_encode(["a" * 2000])
    before, after = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    lengths = [len(model[1].model._tokenizer(each).input_ids) for each in (before, after)]
    assert longest.num_cut == 2000 + lengths[0] - 1024
    assert len(longest.tokens["encoder_hidden_states"]) == 1024 + lengths[1]


def test_the_sigmas_of_a_folder_are_those_of_its_number_of_steps(folder, tmp_path):
    copy, sigmas = shutil.copytree(folder, tmp_path / "m"), [1.0, 0.8, 0.3]
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": sigmas}))
    spec, executor = load(copy)
    assert spec.default_steps == 3
    request = request_of(0, inference_steps=3)
    ours = generate(executor, [request])["r0", 0]
    assert difference(ours, pipeline_image((spec, executor, open_pipeline(copy)), request)) <= PARITY_TOLERANCE
    assert executor.model.schedule(64, 64, 4).sigmas == (1.0, 0.75, 0.5, 0.25)


def test_adapters_are_those_of_their_rows_but_not_of_layers_that_all_rows_share(model, tmp_path):
    bare, file = model[1].model, tmp_path / "all.safetensors"
    save_diffusers_lora(file, bare.lora_parts, rank=2)
    with pytest.raises(ModelError, match="cannot have an adapter, since its calls merge the images of a batch"):
        read_lora(file, bare.lora_parts, torch.float32, 2**20)
    tensors = load_file(file)
    shared = tuple(f"transformer.{name}" for name in ("time_text_embed.", "modulation.", "norm_out."))
    save_file({name: each for name, each in tensors.items() if not name.startswith(shared)}, file)
    adapted = DiffusionExecutor(bare, EngineConfig(dtype="float32", slots=8, threads=1, loras=(str(tmp_path),)))
    lora = Lora("all", 0.7, digest_of(file))
    requests = [request_of(k, loras=(lora,) * (k % 2)) for k in range(4)]
    together = generate(adapted, requests, arrivals=[0, 2, 1, 0])
    for number, request in enumerate(requests):
        image = together[request.request_id, 0]
        assert difference(image, generate(adapted, [request])[request.request_id, 0]) <= 1
        without = generate(model[1], [request_of(number)])[request.request_id, 0]
        assert (difference(image, without) > 5) == bool(number % 2)


def test_an_image_that_is_encoded_is_opaque(model):
    denoiser, pixels = model[1].model, np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    with torch.inference_mode():
        ours = denoiser.encode(torch.from_numpy(pixels)[None]).mean_BCHW
        image = model[2].image_processor.preprocess(PIL.Image.fromarray(pixels).convert("RGBA"))
        theirs = model[2]._encode_vae_image(image[:, :, None], None)[:, :, 0]
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert denoiser.preview_colours.shape == (5, 3)
