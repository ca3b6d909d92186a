"""The promises of all families with a transformer: images as by diffusers' own pipelines, and as each alone."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch

import tiny_models
from flow_pipelines import generate_with_pipeline, make_request, open_pipeline, remember_prompts
from generating import (
    PARITY_TOLERANCE,
    assert_adapter_changes_its_image_alone,
    assert_rows_as_alone,
    difference,
    generate,
    load,
)
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.models.families import FAMILIES
from noria.protocol.diffusion import DiffusionModelSpec

PROMPTS = [" A Red circle ", "a blue square above a green star, drawn with a soft pencil on grey paper", ""]
LONG_PROMPT = "<|im_end|> é 水车 Many words </s>[/INST][IMG] " * 99
RAGGED_SIZES = ((64, 64), (32, 48), (64, 48), (48, 64))
FLUX_SIZES = ((48, 48), (40, 56), (96, 24), (56, 40))  # 36, 35, 36 and 35 tokens
# They stand for one call and two a step, with noise and with a history; `sampling/test_parity.py` has all.
KINDS_OF_PIXART = ("dpm++2m", "pndm", "heun", "dpm++2m-sde", "unipc")


@dataclass(frozen=True)
class Case:
    """A family with random weights, and what its tests ask for."""

    save: Callable[..., Any]
    sizes: tuple[tuple[int, int], ...] = ((32, 24), (48, 24))
    num_sizes: int = 1  # sizes of the images of a call
    guidance: tuple[float, ...] = (1.0, 3.5, 7.0)
    from_images: tuple[Any, ...] = ()  # pipelines that begin with an image, without and with a mask


FROM_FLUX = diffusers.FluxImg2ImgPipeline, diffusers.FluxInpaintPipeline
FROM_SD3 = diffusers.StableDiffusion3Img2ImgPipeline, diffusers.StableDiffusion3InpaintPipeline
FROM_CHROMA = diffusers.ChromaImg2ImgPipeline, diffusers.ChromaInpaintPipeline
FROM_Z_IMAGE = diffusers.ZImageImg2ImgPipeline, diffusers.ZImageInpaintPipeline
FROM_QWEN = diffusers.QwenImageImg2ImgPipeline, diffusers.QwenImageInpaintPipeline
SCHNELL = {"transformer": {"guidance_embeds": False}, "scheduler": {"use_dynamic_shifting": False, "shift": 1.0}}
HEEDED = (12.0, 8.0, 1.0, 0.5)  # random models heed texts little
CASES = {
    "flux-dev": Case(tiny_models.save_flux, FLUX_SIZES, 4, (0.0, 3.5, 7.0), FROM_FLUX),
    "sd3": Case(tiny_models.save_stable_diffusion_3, guidance=(0.0, 3.5, 7.0), from_images=FROM_SD3),
    "chroma": Case(tiny_models.save_chroma, from_images=FROM_CHROMA),
    "flux-2-klein": Case(tiny_models.save_flux_2_klein, FLUX_SIZES, 4),
    "flux-2-dev": Case(tiny_models.save_flux_2_dev, FLUX_SIZES, 4),
    "z-image": Case(
        tiny_models.save_z_image, ((64, 64), (32, 48), (64, 40), (40, 64)), 4, (0.0, 0.5, 4.0), FROM_Z_IMAGE
    ),
    "qwen-image": Case(tiny_models.save_qwen_image, RAGGED_SIZES, 4, HEEDED, FROM_QWEN),
    "qwen-image-2.1": Case(tiny_models.save_qwen_image_21, ((64, 64), (64, 96), (128, 64), (96, 64)), 4, (8.0, 1.0)),
    "krea-2": Case(tiny_models.save_krea2, RAGGED_SIZES, 1, HEEDED),
    "lumina-2": Case(tiny_models.save_lumina2, RAGGED_SIZES, 1, HEEDED),
    "sana": Case(tiny_models.save_sana, ((64, 64), (96, 64)), 1, (6.0, 1.0, 3.5)),
    "pixart-sigma": Case(tiny_models.save_pixart_sigma, ((64, 32), (96, 32)), 1, (6.0, 1.0, 3.5)),
}
RAGGED = ("z-image", "qwen-image", "krea-2", "lumina-2")
# As by the pipelines, all prompts of these have as many tokens.
OF_ONE_LENGTH = ("flux-dev", "sd3", "chroma", "flux-2-klein", "flux-2-dev")


@dataclass(frozen=True)
class Model:
    """A folder that is loaded twice: by Noria and by diffusers."""

    name: str
    case: Case
    spec: DiffusionModelSpec
    executor: DiffusionExecutor
    pipe: Any

    @classmethod
    def open(cls, name, folder, device="cpu", **settings):
        return cls(
            name, CASES[name], *load(folder, device, **settings), remember_prompts(open_pipeline(folder).to(device))
        )

    @property
    def denoiser(self):
        return self.executor.model

    @property
    def schedulers(self):
        return KINDS_OF_PIXART if self.spec.family == "pixart-sigma" else self.spec.schedulers

    @functools.cached_property
    def requests(self):
        """Six images, of all schedulers."""
        names = self.schedulers
        return [self.request(k, scheduler=names[k % len(names)], inference_steps=3 + k % 3) for k in range(6)]

    @functools.cached_property
    def images_alone(self):
        """The images of the first three requests, each alone."""
        return {request.request_id: self.image(request) for request in self.requests[:3]}

    def request(self, number, **fields):
        width, height = self.case.sizes[number % len(self.case.sizes)]
        settings = {
            "prompt": PROMPTS[number % 3],
            "negative_prompt": [None, "a black cross", ""][number % 3],
            "width": width,
            "height": height,
            "inference_steps": 3 + number % 5,
            "guidance_scale": self.case.guidance[number % len(self.case.guidance)],
            "scheduler": self.schedulers[0],
        }
        return make_request(number, **settings | fields)

    def image(self, request, frames=None):
        return generate(self.executor, [request], frames=frames)[request.request_id, 0]

    def assert_as_by_the_pipeline(self, request):
        ours = self.image(request)
        assert difference(ours, generate_with_pipeline(self.pipe, request, self.spec.path)) <= PARITY_TOLERANCE, request
        assert ours.std() > 10, "the image is flat"


def models(names, on_gpu=()):
    """The parameters of `model`: families on the CPU, and others on a GPU."""
    return [pytest.param((name, "cpu"), id=name) for name in names] + [
        pytest.param((name, "cuda:0"), id=f"{name} on a GPU", marks=pytest.mark.gpu) for name in on_gpu
    ]


def cases(*names, on_gpu=()):
    """The parameters for tests of some families."""
    return pytest.mark.parametrize("model", models(names, on_gpu), indirect=True)


@pytest.fixture(scope="module", params=models(CASES, on_gpu=RAGGED))
def model(request, folder_of):
    name, device = request.param
    family = CASES[name].save.__name__.removeprefix("save_").replace("_", "-")
    return Model.open(name, folder_of(family), device)


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(model, monkeypatch):
    """The batch has images of all schedulers, and of all sizes of the family."""
    sizes, real = [], model.denoiser.predict

    def predict(latents_R, *rest):
        sizes.append({tuple(row.shape) for row in latents_R})
        return real(latents_R, *rest)

    monkeypatch.setattr(model.denoiser, "predict", predict)
    together = generate(model.executor, model.requests, arrivals=[(5 * k) % 3 for k in range(6)])
    assert max(map(len, sizes)) == model.case.num_sizes
    assert {request.payload.scheduler for request in model.requests} == {*model.schedulers} <= {*model.spec.schedulers}
    for request in model.requests:
        image = together[request.request_id, 0]
        theirs = generate_with_pipeline(model.pipe, request, model.spec.path)
        assert difference(image, theirs) <= PARITY_TOLERANCE, request
        assert image.std() > 10, "the image is flat"
    assert all(difference(together[key, 0], alone) <= 1 for key, alone in model.images_alone.items())


def test_rows_of_a_call_equal_the_rows_alone(model):
    """Texts of several lengths are padded in the call, and not when they are alone."""
    denoiser, generator = model.denoiser, torch.Generator().manual_seed(0)
    times = torch.tensor([1000.0, 640.0, 333.0, 1.0], device=denoiser.device)
    with torch.inference_mode():
        texts = denoiser.text_encode([*PROMPTS, "many words " * 60])
        lengths = {len(next(iter(text.tokens.values()))) for text in texts}
        assert len(lengths) == (1 if model.name in OF_ONE_LENGTH else len(texts))
        for sizes in [model.case.sizes[:1] * 4] + [model.case.sizes] * (model.case.num_sizes > 1):
            shapes = [denoiser.latent_shape(*size) for size in sizes]
            latents = [torch.randn(shape, generator=generator).to(denoiser.device) for shape in shapes]
            rows = latents if len({*sizes}) > 1 else torch.stack(latents)
            assert_rows_as_alone(denoiser, rows, times, texts, 1e-4 if model.name == "chroma" else 1e-3)


def encoded_by_the_pipeline(model, prompt):
    """The tokens of a prompt in diffusers' pipeline."""
    match model.spec.family:
        case "chroma" | "z-image":
            padded, mask = model.pipe.encode_prompt(prompt, do_classifier_free_guidance=False)[0], None
        case "flux-2-klein" | "flux-2-dev":
            padded, mask = model.pipe.encode_prompt(prompt)[0], None
        case family:
            length = 256 if family == "lumina-2" else 512
            padded, mask, *_ = model.pipe.encode_prompt(prompt, max_sequence_length=length)
    return padded[0] if mask is None else padded[0][mask[0].bool()] if mask.ndim == 2 else padded[mask.bool()]


@cases("chroma", "flux-2-klein", "flux-2-dev", *RAGGED, on_gpu=RAGGED)
def test_prompts_are_encoded_and_cut_as_by_the_pipeline(model):
    prefix = model.denoiser.guidance.prompt_prefix
    with torch.inference_mode():
        together = model.denoiser.text_encode([prefix + prompt for prompt in (*PROMPTS, LONG_PROMPT)])
        for prompt, ours in zip((*PROMPTS, LONG_PROMPT), together, strict=True):
            theirs, (tokens, *_) = encoded_by_the_pipeline(model, prompt), ours.tokens.values()
            assert tokens.shape == theirs.shape
            assert (tokens - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@cases("chroma")
def test_the_mask_of_a_prompt_shows_the_first_of_its_padding(model):
    with torch.inference_mode():
        for prompt in (*PROMPTS, LONG_PROMPT):
            _, _, mask, *_ = model.pipe.encode_prompt(prompt, do_classifier_free_guidance=False)
            assert torch.equal(model.denoiser.text_encode([prompt])[0].tokens["attention_mask"], mask[0])


@cases("flux-dev", "sd3", "chroma", "z-image", "qwen-image", on_gpu=["z-image"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_start_images_and_masks_give_the_images_of_the_pipelines(model, has_mask, monkeypatch):
    options, pipe = {}, remember_prompts(model.case.from_images[has_mask](**model.pipe.components))
    pipe.set_progress_bar_config(disable=True)
    if has_mask and model.spec.family == "stable-diffusion-3":  # this pipeline forgets the shift that all others add
        decode, shift = pipe.vae.decode, pipe.vae.config.shift_factor
        monkeypatch.setattr(pipe.vae, "decode", lambda latents, **options: decode(latents + shift, **options))
    if model.spec.family == "chroma":
        options["max_sequence_length"] = 512  # that for masks has 256 by default
        pipe.transformer.register_to_config(guidance_embeds=False)  # that for masks reads it, and fails without
    # Those that the pipelines can begin with: the others have no `scale_noise`.
    names = [name for name in model.spec.schedulers if name in ("flow-euler", "flow-heun")]
    requests = [
        model.request(k, scheduler=names[k % len(names)], inference_steps=steps, strength=strength, has_mask=has_mask)
        for k, (steps, strength) in enumerate([(4, 0.5), (5, 0.75), (2, 1.0)])
    ]
    frames, shown = {}, {}
    for request in requests:
        width, height, seed = request.payload.width, request.payload.height, request.payload.seed
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        mask = np.zeros((height, width), np.uint8)
        mask[8:24, 16:40] = 255
        frames[request.request_id] = memoryview(pixels.tobytes() + mask.tobytes() * has_mask)
        shown[request.request_id] = {"image": PIL.Image.fromarray(pixels), "strength": request.payload.strength}
        if has_mask:
            shown[request.request_id]["mask_image"] = PIL.Image.fromarray(mask)
    images = generate(model.executor, requests, [k % 3 for k in range(len(requests))], frames)
    for request in requests:
        theirs = generate_with_pipeline(pipe, request, model.spec.path, **options, **shown[request.request_id])
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_padded_rows_and_another_attention_change_no_image(model):
    has_another = "_native_math" in FAMILIES[model.spec.family].attention  # else it calls no dispatcher of diffusers
    settings = {"attention": "_native_math"} if has_another else {}
    other = load(model.spec.folder, str(model.denoiser.device), buckets=(4, 8), **settings)[1]
    images = generate(other, model.requests[:3])
    assert all(difference(images[key, 0], alone) <= 1 for key, alone in model.images_alone.items())


@cases("flux-dev", "sd3", "qwen-image", on_gpu=RAGGED[1:])  # `test_lora_parity.py` has the others
def test_an_adapter_of_all_layers_changes_its_image_alone(model, tmp_path):
    assert_adapter_changes_its_image_alone(model.executor, model.request, tmp_path)


@cases(*RAGGED[1:], "sana", "pixart-sigma", on_gpu=RAGGED[1:])
def test_prompts_guidance_and_the_words_before_a_prompt_change_the_image(model, monkeypatch):
    """Else the comparisons with the pipeline could not fail for them."""
    image = model.image(model.request(1, guidance_scale=6.0))
    changes = {"prompt": "a"}, {"negative_prompt": PROMPTS[1]}, {"guidance_scale": 0.0}
    images = [model.image(model.request(1, **{"guidance_scale": 6.0} | change)) for change in changes]
    if model.denoiser.guidance.prompt_prefix:
        monkeypatch.setattr(model.denoiser, "guidance", replace(model.denoiser.guidance, prompt_prefix=""))
        images.append(model.image(model.request(1, guidance_scale=6.0)))
    assert min(difference(image, other) for other in images) > PARITY_TOLERANCE


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # warning of diffusers' Krea 2
@cases(*RAGGED[1:], "sana", on_gpu=RAGGED[1:])
def test_images_in_bfloat16_lose_what_those_of_the_pipeline_lose(model):
    """Rounding errors grow in random models, by more on a GPU than on a CPU."""
    rounded = load(model.spec.folder, model.denoiser.device, dtype="bfloat16")[1]
    draws_in_float32 = model.spec.family == "sana"
    assert rounded.model.noise_dtype is (torch.float32 if draws_in_float32 else torch.bfloat16)
    rounded_pipe = open_pipeline(model.spec.folder).to(model.denoiser.device, torch.bfloat16)
    losses = of_pipeline = 0.0
    for request in model.requests[:3]:
        image, ours = model.images_alone[request.request_id].astype(float), generate(rounded, [request])
        losses += np.abs(image - ours[request.request_id, 0]).mean()
        of_pipeline += np.abs(image - generate_with_pipeline(rounded_pipe, request)).mean()
    assert losses <= 1.5 * of_pipeline + 4


def test_the_preview_of_the_last_call_is_the_image_of_its_latents(model):
    """At the last call, the prediction of the image is the final sample; DDIM's is one step of training before it."""
    name = "ddim" if model.spec.family == "pixart-sigma" else "flow-euler"
    table = model.executor.prepare(model.request(0, scheduler=name)).table
    coefficients, last = table.coefficients[-1], model.denoiser.clean_weights(table.timesteps[-1:])[:, 0]
    np.testing.assert_allclose(coefficients[coefficients != 0], last, rtol=1e-5, atol=0.02 * (name == "ddim"))
    if name == "flow-euler":  # at noise levels 1 and 0.25
        weights = model.denoiser.clean_weights(np.array([1000.0, 250.0], np.float32))
        assert weights.tolist() == [[1.0, 1.0], [-1.0, -0.25]]
    channels = model.denoiser.latent_shape(64, 64)[0]
    assert model.denoiser.preview_colours.shape == (channels + 1, 3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flux-dev", SCHNELL),
        ("sd3", {"scheduler": {"use_dynamic_shifting": True, "max_shift": 1.2}}),
        ("chroma", {"scheduler": {"use_dynamic_shifting": False, "use_beta_sigmas": True}}),
        ("qwen-image", {"scheduler": {"use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": None}}),
        (
            "lumina-2",
            {"scheduler": {"use_dynamic_shifting": True}, "text_encoder": {"attn_logit_softcapping": 50.0}},
        ),
        ("z-image", {"scheduler": {"shift": 6.0, "use_beta_sigmas": True}}),
        ("z-image", {"scheduler": {"use_dynamic_shifting": True, "shift_terminal": 0.1}}),
        (
            "sana",
            {
                "transformer": {
                    "out_channels": 8,
                    "interpolation_scale": 2,
                    "timestep_scale": 0.5,
                    "qk_norm": "rms_norm_across_heads",
                }
            },
        ),
        ("sana", {"scheduler": {**tiny_models.FLOW_SCHEDULER, "prediction_type": None, "use_flow_sigmas": None}}),
        (
            "pixart-sigma",
            {
                "transformer": {"out_channels": 4},
                "scheduler": {"prediction_type": "v_prediction", "timestep_spacing": "trailing"},
            },
        ),
    ],
)
def test_the_settings_of_parts_are_the_folders(tmp_path, name, changes):
    model = Model.open(name, CASES[name].save(tmp_path, **changes))
    model.assert_as_by_the_pipeline(model.request(1, **{"guidance_scale": 0.0} if changes is SCHNELL else {}))


@cases("qwen-image", "sana")
def test_large_images_are_decoded_in_tiles_as_by_the_pipeline(model):
    tiled = Model.open(model.name, model.spec.folder, vae_tiling=True)
    tiled.pipe.vae.enable_tiling()
    # Tiles are 256 px wide, those of Sana 512 px.
    request = model.request(1, width=544 if model.spec.family == "sana" else 264, height=32)
    tiled.assert_as_by_the_pipeline(request)
    assert not np.array_equal(tiled.image(request), model.image(request))


@cases("qwen-image")
def test_weights_in_several_files_are_read(model, tmp_path):
    folder = shutil.copytree(model.spec.folder, tmp_path / "m")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    model.pipe.transformer.save_pretrained(folder / "transformer", max_shard_size="40KB")
    assert len(list((folder / "transformer").glob("*-of-*.safetensors"))) > 1
    spec, executor = load(folder)
    assert spec.num_parameters == model.spec.num_parameters
    request = model.request(0, inference_steps=2)
    assert np.array_equal(generate(executor, [request])["r0", 0], model.image(request))


@cases("flux-dev", "qwen-image", "z-image")
def test_schedulers_of_another_family_are_rejected(model):
    for choice in scheduler_names.SCHEDULERS:
        if choice.family != "flow":
            with pytest.raises(InvalidField, match="but this is a flow model"):
                model.executor.prepare(model.request(0, scheduler=choice.name))
