"""The refiner as the second stage of SDXL: as diffusers' two pipelines, in a mixed batch as alone."""

import json
import shutil

import diffusers
import msgspec
import numpy as np
import PIL.Image
import pytest
import torch

import tiny_models
from generating import (
    LATENTS_TOLERANCE,
    PARITY_TOLERANCE,
    assert_latents_as_alone,
    difference,
    final_latents,
    generate,
    latents_and_images,
    load,
    loop_of,
    moved_image,
    relative,
    run,
)
from lora_files import save_diffusers_lora
from noria.engine.diffusion.sizing.weight_bytes import weights_of, weights_to_load
from noria.engine.diffusion.warmup.calibration import cost_key, measure_costs
from noria.engine.loop import PreviewReady
from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.conditioning import collate
from noria.protocol.diffusion import Lora, Refinement
from noria.scheduling.costs import CostModel
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler

PARITY_OF_LATENTS = 2e-5  # relative, as `LATENTS_TOLERANCE`, also for tables that are rounded to float32
NAMES = [each.name for each in scheduler_names.choices_of_family("diffusion") if each.takes_refiner]
START_PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)


def load_with(folder, refiner, **settings):
    return load(folder, **{"loras": (), "refiners": (str(refiner),)} | settings)


class Pipelines:
    """The pipelines of diffusers for a model and its refiner, with the VAE of the model."""

    def __init__(self, folder, refiner):
        self.folders = folder, refiner
        self.base = open_pipeline(diffusers.StableDiffusionXLPipeline, folder)
        self.base_with_image = diffusers.StableDiffusionXLImg2ImgPipeline(**self.base.components)
        self.base_with_image.set_progress_bar_config(disable=True)
        self.refiner = open_pipeline(diffusers.StableDiffusionXLImg2ImgPipeline, refiner, vae=self.base.vae)

    def generate(self, request):
        """The latents and the image of both pipelines with one generator; without a refiner of the first one."""
        payload, base, of_base = request.payload, self.base, {}
        if payload.strength is not None:
            base, of_base = self.base_with_image, {"image": PIL.Image.fromarray(START_PIXELS)}
            of_base |= {"strength": payload.strength, "width": None, "height": None}
        for pipe, folder in zip((base, self.refiner), self.folders, strict=True):
            set_scheduler(pipe, request, folder, clip_sample=False)
        both = {"output_type": "latent", "generator": torch.Generator("cpu").manual_seed(payload.seed)}
        end = None if payload.refiner is None else payload.refiner.start
        latents = run_pipeline(base, request, denoising_end=end, **of_base, **both)
        if end is not None:
            own = {"width": None, "height": None, "denoising_start": end}
            latents = run_pipeline(self.refiner, request, image=latents, **own, **both)
        with torch.no_grad():
            decoded = self.base.vae.decode(latents / self.base.vae.config.scaling_factor).sample
        (image,) = self.base.image_processor.postprocess(decoded, output_type="np")
        return latents[0], (image * 255).round().astype(np.uint8)


@pytest.fixture(scope="module")
def served(tiny_xl_folder, tiny_refiner_folder):
    return load_with(tiny_xl_folder, tiny_refiner_folder)


@pytest.fixture(scope="module")
def pipelines(tiny_xl_folder, tiny_refiner_folder):
    return Pipelines(tiny_xl_folder, tiny_refiner_folder)


def make_request(number, start, **fields):
    settings = {
        "prompt": ["a red circle", "a blue square above a green star", "a large ring"][number % 3],
        "negative_prompt": [None, "", "a black cross"][number % 3],
        "seed": 600 + number,
        "width": 32,
        "height": 32,
        "inference_steps": 8,
        "guidance_scale": [1.0, 5.0][number % 2],
        "refiner": None if start is None else Refinement(start),
    }
    return make_image_request(f"r{number}", **settings | fields)


def frames_of(requests):
    return {each.request_id: memoryview(START_PIXELS.tobytes()) for each in requests if each.payload.strength}


def mixed():
    """Images with and without a refiner, with switches at several steps, of two sizes, one with a start image."""
    schedulers = ["euler", "dpm++2m-karras", "euler-a", "heun", "unipc", "pndm", "ddim", "lcm"]
    return [
        make_request(
            k,
            [0.8, None, 0.5, 0.7][k % 4],
            scheduler=schedulers[k],
            inference_steps=11 if k == 6 else 5 + k % 3,
            strength=0.75 if k == 6 else None,
            width=48 if k == 4 else 32,
            n=1,
        )
        for k in range(8)
    ]


# All take long; these stand for one call and two a step, with noise and with a history.
FAST = ("heun", "dpm++2m-sde")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in NAMES])
def test_each_scheduler_gives_the_images_of_both_pipelines(served, pipelines, name, monkeypatch):
    _, executor = served
    starts = [(6, 0.8, {}), (5, 0.5, {"height": 48}), (8, 0.37, {})]
    if scheduler_names.find(name).takes_start_image:
        starts.append((8, 0.7, {"strength": 0.75}))
    requests = [
        make_request(number, start, scheduler=name, inference_steps=steps, **fields)
        for number, (steps, start, fields) in enumerate(starts)
    ]
    latents, images = latents_and_images(executor, requests, monkeypatch, frames=frames_of(requests))
    for request in requests:
        their_latents, theirs = pipelines.generate(request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request
        assert relative(latents[request.request_id], their_latents) <= PARITY_OF_LATENTS, request


def test_late_joiners_with_and_without_a_refiner_give_the_images_of_the_pipelines(served, pipelines, monkeypatch):
    _, executor = served
    requests = mixed()
    arrivals, frames = [(5 * k) % 11 for k in range(8)], frames_of(requests)
    latents, together = latents_and_images(executor, requests, monkeypatch, arrivals, frames)
    bare = [
        msgspec.structs.replace(each, payload=msgspec.structs.replace(each.payload, refiner=None)) for each in requests
    ]
    unrefined = final_latents(executor, bare, monkeypatch, frames=frames)
    for request in requests:
        name = request.request_id
        their_latents, theirs = pipelines.generate(request)
        assert difference(together[name, 0], theirs) <= PARITY_TOLERANCE, request
        assert relative(latents[name], their_latents) <= PARITY_OF_LATENTS, request
        if request.payload.refiner is not None:
            assert relative(unrefined[name], latents[name]) > 1e-3, request


def test_prompts_that_change_or_are_joined_do_so_in_both_stages(served, monkeypatch):
    _, executor = served
    texts = [
        "a red circle",
        "[a red circle:a blue square:6]",
        "a red circle AND a star:0",
        "[a red circle:a blue square:5]",  # in a step of the refiner
        "[a blue square:a red circle:1]",
    ]
    settings = {"prompt_syntax": "a1111", "guidance_scale": 20.0, "negative_prompt": "a black cross"}
    settings |= {"inference_steps": 6, "seed": 1, "scheduler": "euler"}
    requests = [make_request(k, 0.5, prompt=text, **settings) for k, text in enumerate(texts)]
    latents = final_latents(executor, requests, monkeypatch)
    errors = [relative(latents[f"r{k}"], latents["r0"]) for k in range(5)]
    assert max(errors[:3]) <= 1e-4  # float32, with a guidance that multiplies its rounding
    assert min(errors[3:]) > 1e-3


@pytest.mark.parametrize(
    ("index", "scheduler"), [({"force_zeros_for_empty_prompt": True}, {}), ({}, {"prediction_type": "v_prediction"})]
)
def test_the_refiner_has_settings_of_its_own(tiny_xl_folder, tmp_path, index, scheduler, monkeypatch):
    folder = tiny_models.save_xl_refiner(tmp_path / "other", scheduler=scheduler, **index)
    _, executor = load_with(tiny_xl_folder, folder)
    request = make_request(0, 0.5, scheduler="ddim", guidance_scale=6.0, negative_prompt=None)
    their_latents, theirs = Pipelines(tiny_xl_folder, folder).generate(request)
    latents, images = latents_and_images(executor, [request], monkeypatch)
    assert difference(images["r0", 0], theirs) <= PARITY_TOLERANCE
    assert relative(latents["r0"], their_latents) <= PARITY_OF_LATENTS


def test_rows_of_the_refiner_equal_the_rows_alone(served):
    refiner = served[1].model.refiner
    with torch.inference_mode():
        texts = refiner.text_encode(["a red circle", "a ring", "", None])
        texts[3] = refiner.as_negative(texts[3])
        latents, times = torch.randn(4, 4, 8, 8), torch.tensor([199.0, 140.0, 33.0, 1.0])
        together = refiner.predict(latents, times, collate(texts), None)
        for row, text in enumerate(texts):
            alone = refiner.predict(latents[row : row + 1], times[row : row + 1], collate([text]), None)
            assert relative(together[row : row + 1], alone) <= LATENTS_TOLERANCE
        positive = refiner.predict(latents[:1], times[:1], collate([texts[0]]), None)
        negative = refiner.predict(latents[:1], times[:1], collate([refiner.as_negative(texts[0])]), None)
        assert relative(positive, negative) > 1e-3  # by the aesthetic score


def count_rows(executor, monkeypatch):
    """The rows of each call from now on, by denoiser."""
    calls = []

    def counting(name, predict):
        return lambda rows, *others: calls.append((name, len(rows))) or predict(rows, *others)

    for name, part in (("base", executor.model), ("refiner", executor.model.refiner)):
        monkeypatch.setattr(part, "predict", counting(name, part.predict))
    return calls


def test_images_of_one_stage_share_its_calls(served, monkeypatch):
    calls = count_rows(served[1], monkeypatch)
    requests = [make_request(k, start, scheduler="ddim", inference_steps=4, guidance_scale=1.0) for k, start in
                enumerate([0.5, 0.5, None])]  # fmt: skip
    generate(served[1], requests)
    assert sorted(calls) == [("base", 1)] * 2 + [("base", 3)] * 2 + [("refiner", 2)] * 2


def test_loras_change_the_model_and_not_its_refiner(tiny_xl_folder, tiny_refiner_folder, tmp_path, monkeypatch):
    _, executor = load_with(tiny_xl_folder, tiny_refiner_folder, loras=(str(tmp_path),))
    save_diffusers_lora(tmp_path / "ink.safetensors", executor.model.lora_parts, rank=2, seed=2)
    adapted = {"loras": (Lora("ink", 0.7, digest_of(tmp_path / "ink.safetensors")),)}
    requests = [make_request(1, 0.6, **adapted), make_request(4, 0.6), make_request(7, None, **adapted)]
    assert_latents_as_alone(executor, requests, monkeypatch)
    hooked = [name for name, module in executor.model.refiner._denoiser._unet.named_modules() if module._forward_hooks]
    assert not hooked


def test_a_text_encoder_that_is_the_models_second_one_is_loaded_once(tiny_xl_folder, tiny_refiner_folder, tmp_path):
    same = shutil.copytree(tiny_refiner_folder, tmp_path / "same")
    shutil.rmtree(same / "text_encoder_2")
    shutil.copytree(tiny_xl_folder / "text_encoder_2", same / "text_encoder_2")
    other = shutil.copytree(same, tmp_path / "other")  # equal but for a setting
    config_file = other / "text_encoder_2" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"layer_norm_eps": 2e-5}))
    loras = tmp_path / "loras"
    loras.mkdir()
    spec, executor = load_with(tiny_xl_folder, same, loras=(str(loras),))
    parts = executor.model.lora_parts
    assert executor.model.refiner._text_encoder[1] is parts["text_encoder_2"]
    assert "refiner's text_encoder_2" not in weights_of(spec, executor.config).here
    _, apart = load_with(tiny_xl_folder, other)
    assert apart.model.refiner._text_encoder[1] is not apart.model.lora_parts["text_encoder_2"]
    assert "refiner's text_encoder_2" in weights_of(spec, apart.config).here
    save_diffusers_lora(loras / "ink.safetensors", {"text_encoder_2": parts["text_encoder_2"]}, rank=2, seed=2)
    adapted = make_request(1, 0.6, loras=(Lora("ink", 0.7, digest_of(loras / "ink.safetensors")),))
    generate(executor, [adapted])
    (prompt,) = executor.conditioner._refiner_embeddings.get([adapted.payload.prompt]).values()
    (bare,) = executor.model.refiner.text_encode([adapted.payload.prompt])
    assert all(torch.equal(prompt.tokens[name], bare.tokens[name]) for name in bare.tokens)


def test_previews_of_the_refiners_calls_show_what_it_predicts(tiny_xl_folder, tmp_path):
    folder = tiny_models.save_xl_refiner(tmp_path / "v", scheduler={"prediction_type": "v_prediction"})
    _, executor = load_with(tiny_xl_folder, folder)
    request = make_request(0, 0.3, inference_steps=8, partial_images=6, scheduler="ddim")
    weights = {}

    def recording(name, part):
        def clean_weights(timesteps):
            weights[name] = timesteps.tolist()
            return type(part).clean_weights(part, timesteps)

        return clean_weights

    executor.model.clean_weights = recording("base", executor.model)
    executor.model.refiner.clean_weights = recording("refiner", executor.model.refiner)
    loop, seen = loop_of(executor)
    loop.submit(executor.prepare(request))
    run(loop)
    previews = [event for event in seen if isinstance(event, PreviewReady)]
    assert len(previews) == 6
    assert weights["base"][0] >= 700 > weights["refiner"][0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"refiner": Refinement(0.8, digest="0" * 12)}, "'0{12}' on disk, but .* Restart"),
        ({"strength": 0.5, "has_mask": True}, "with a mask cannot be refined"),
        ({"refiner": Refinement(0.999)}, "below timestep 1 of 1000, but the last of 8 .* is at 1.* smaller"),
        ({"refiner": Refinement(0.01)}, "leaves no step to the model, which begins at timestep 876"),
        ({"scheduler": "ipndm"}, "leaves no step to the model"),  # rejected by name before
    ],
)
def test_what_cannot_be_refined_is_rejected(served, fields, words):
    request = make_request(0, 0.8, **fields)
    data = bytes(32 * 32 * 4) if request.payload.has_mask else None
    with pytest.raises(InvalidField, match=words):
        served[1].prepare(request, None if data is None else memoryview(data))


def test_without_a_refiner_none_is_used(tiny_xl_folder, tiny_refiner_folder):
    _, executor = load_with(tiny_xl_folder, tiny_refiner_folder, refiners=())
    with pytest.raises(InvalidField, match=r"has no refiner loaded: .* engine\.refiners"):
        executor.prepare(make_request(0, 0.8))
    assert executor.is_compiled(make_request(0, 0.8))  # it is rejected at once


def test_costs_of_both_stages_are_measured(served, tiny_refiner_folder, tiny_xl_folder):
    spec, executor = served
    costs = CostModel()
    measure_costs(executor, spec, executor.config, costs)
    assert {key.stage for key in costs.steps} == {0, 1}
    _, bare = load_with(tiny_xl_folder, tiny_refiner_folder, refiners=())
    assert "refiner" in cost_key(spec, executor.config, "cpu")
    assert "refiner" not in cost_key(spec, bare.config, "cpu")


def test_models_of_a_process_share_a_refiner(served, tiny_refiner_folder):
    spec, executor = served
    _, other = load_with(spec.folder, tiny_refiner_folder)
    assert other.model.refiner._denoiser._unet is executor.model.refiner._denoiser._unet
    assert not [part for part in weights_to_load(spec, other.config, "cpu").here if "refiner" in part]
    assert [part for part in weights_to_load(spec, other.config, "cuda:0").here if "refiner" in part]


@pytest.mark.parametrize("call", [3, 6])  # before the refiner begins, and after
def test_an_image_that_moves_stays_the_same(served, call):
    _, executor = served
    request = make_request(1, 0.5, scheduler="dpm++2m")
    undisturbed = generate(executor, [request])["r1", 0]
    assert difference(moved_image(executor, request, call), undisturbed) <= 1
