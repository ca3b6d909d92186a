"""Qwen-Image, Krea 2 and Lumina 2, whose prompts are ragged, in the running batch, compared with diffusers' pipelines.

Of Qwen-Image a call has images of all sizes.
"""

import shutil
import warnings
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    QwenImageImg2ImgPipeline,
    QwenImageInpaintPipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
)

import tiny_models
from generating import assert_adapter_changes_its_image_alone, assert_rows_as_alone, difference, generate
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.models.catalog import open_model
from noria.models.families import FAMILIES
from noria.testing.requests import make_image_request

# Against the pipeline: other kernels at other batch sizes, and a step's terms summed in another order.
PARITY_TOLERANCE = 2
PROMPTS = ["a red circle", "a blue square above a green star, drawn with a soft pencil on grey paper", ""]
SIZES = [(64, 64), (32, 48), (64, 48), (48, 64)]
SAVE = {
    "qwen-image": tiny_models.save_qwen_image,
    "krea-2": tiny_models.save_krea2,
    "lumina-2": tiny_models.save_lumina2,
}


def load(folder, device="cpu", **settings):
    torch.set_num_threads(1)
    spec = open_model(str(folder))
    config = EngineConfig(**{"dtype": "float32", "slots": 8, "threads": 1} | settings)
    return spec, DiffusionExecutor(FAMILIES[spec.family].load(spec, config, device), config)


def open_pipeline(folder):
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


ON_GPU = [pytest.param((family, "cuda:0"), id=f"{family} on a GPU", marks=pytest.mark.gpu) for family in SAVE]


@pytest.fixture(scope="module", params=[*(pytest.param((family, "cpu"), id=family) for family in SAVE), *ON_GPU])
def model(request, tmp_path_factory):
    """A folder's spec and executor, and diffusers' pipeline."""
    family, device = request.param
    folder = SAVE[family](tmp_path_factory.mktemp("ragged") / family)
    return *load(folder, device), open_pipeline(folder).to(device)


@pytest.fixture(scope="module")
def qwen(tiny_qwen_image_folder):
    """A folder like Qwen-Image: its spec, executor and pipeline."""
    return *load(tiny_qwen_image_folder), open_pipeline(tiny_qwen_image_folder)


@pytest.fixture(scope="module")
def krea(tmp_path_factory):
    """A folder like Krea 2: its spec, executor and pipeline."""
    folder = tiny_models.save_krea2(tmp_path_factory.mktemp("qwen") / "krea")
    return *load(folder), open_pipeline(folder)


def make_request(number, **fields):
    width, height = SIZES[number % 4]
    settings = {
        "prompt": PROMPTS[number % 3],
        "negative_prompt": [None, "a black cross", ""][number % 3],
        "seed": 3000 + number,
        "width": width,
        "height": height,
        "inference_steps": 3 + number % 5,
        "guidance_scale": [12.0, 8.0, 1.0, 0.5][number % 4],  # random models heed texts little
        "scheduler": "flow-euler",
    }
    return make_image_request(f"r{number}", **settings | fields)


def generate_with_pipeline(pipe, family, request, **options):
    """The image of diffusers' own loop, [height, width, 3]."""
    payload, own = request.payload, pipe.scheduler
    if payload.scheduler == "flow-unipc":
        overrides = scheduler_names.find("flow-unipc").overrides | {"flow_shift": own.config["shift"]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # diffusers' deprecations of its own configuration keys
            pipe.scheduler = UniPCMultistepScheduler.from_config(own.config, **overrides)
    (image,) = pipe(
        prompt=payload.prompt,
        negative_prompt=payload.negative_prompt,
        width=payload.width,
        height=payload.height,
        num_inference_steps=payload.inference_steps,
        generator=torch.Generator("cpu").manual_seed(payload.seed),
        output_type="np",
        **{"true_cfg_scale" if family == "qwen-image" else "guidance_scale": payload.guidance_scale},
        **options,
    ).images
    pipe.scheduler = own
    return (image * 255).round().astype(np.uint8)


def assert_like_the_pipeline(model, request):
    spec, executor, pipe = model
    ours = generate(executor, [request])[request.request_id, 0]
    assert difference(ours, generate_with_pipeline(pipe, spec.family, request)) <= PARITY_TOLERANCE, request
    assert ours.std() > 10, "the image is flat"


@pytest.mark.parametrize("number", range(3))
def test_an_image_is_that_of_the_pipeline(model, number):
    assert_like_the_pipeline(model, make_request(number))


@pytest.mark.parametrize("steps", [2, 3, 6])
def test_unipc_gives_the_image_of_the_pipeline(model, steps):
    assert_like_the_pipeline(model, make_request(1, scheduler="flow-unipc", inference_steps=steps))


def test_late_joiners_of_a_batch_of_all_sizes_give_the_images_of_the_pipeline(model, monkeypatch):
    spec, executor, pipe = model
    sizes, real = [], executor.model.predict

    def predict(latents_R, *rest):
        sizes.append({tuple(row.shape) for row in latents_R})
        return real(latents_R, *rest)

    monkeypatch.setattr(executor.model, "predict", predict)
    names = "flow-euler", "flow-unipc"
    requests = [
        make_request(number, inference_steps=4 + number // 2, scheduler=names[number % 2]) for number in range(5)
    ]
    together = generate(executor, requests, arrivals=[0, 3, 1, 2, 2])
    assert max(map(len, sizes)) == (4 if spec.family == "qwen-image" else 1)
    for request in requests:
        image = together[request.request_id, 0]
        theirs = generate_with_pipeline(pipe, spec.family, request)
        assert difference(image, theirs) <= PARITY_TOLERANCE, request
        assert difference(image, generate(executor, [request])[request.request_id, 0]) <= 1, request


def test_rows_of_a_call_equal_the_rows_alone(model):
    denoiser = model[1].model
    generator = torch.Generator().manual_seed(0)
    times = torch.tensor([1000.0, 640.0, 333.0, 1.0], device=denoiser.device)
    with torch.inference_mode():
        texts = denoiser.text_encode([*PROMPTS, "many words " * 60])
        assert len({len(text.tokens["encoder_hidden_states"]) for text in texts}) == 4
        for sizes in [SIZES[:1] * 4] + [SIZES] * (denoiser.call_size(64 * 64) is not None):
            shapes = [denoiser.latent_shape(*size) for size in sizes]
            latents = [torch.randn(shape, generator=generator).to(denoiser.device) for shape in shapes]
            rows = latents if sizes is SIZES else torch.stack(latents)
            assert_rows_as_alone(denoiser, rows, times, texts)


def test_another_attention_gives_the_same_images(model):
    spec, executor, _ = model
    if "_native_math" not in FAMILIES[spec.family].attention:
        pytest.skip("this transformer does not call diffusers' dispatcher of attention")
    requests = [make_request(number, inference_steps=2) for number in range(4)]
    images = generate(executor, requests)
    others = generate(load(spec.folder, str(executor.model.device), attention="_native_math")[1], requests)
    assert max(difference(images[key], others[key]) for key in images) <= 1


def test_prompts_are_encoded_and_cut_as_by_the_pipeline(model):
    spec, executor, pipe = model
    prompts = [*PROMPTS, "<|im_end|> é 水车 " * 99]
    with torch.inference_mode():
        together = executor.model.text_encode([executor.model.guidance.prompt_prefix + prompt for prompt in prompts])
        for prompt, ours in zip(prompts, together, strict=True):
            length = 256 if spec.family == "lumina-2" else 512
            padded, mask, *_ = pipe.encode_prompt(prompt, max_sequence_length=length)
            theirs = padded[0] if mask is None else padded[mask.bool()]
            tokens = ours.tokens["encoder_hidden_states"]
            assert tokens.shape == theirs.shape
            assert (tokens - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_rows_padded_to_buckets_change_no_image(model):
    spec, executor, _ = model
    padded = load(spec.folder, executor.model.device, buckets=(4, 16))[1]
    requests = [make_request(number) for number in range(3)]
    without, images = generate(executor, requests), generate(padded, requests)
    assert all(difference(images[key], image) <= 1 for key, image in without.items())


def test_prompts_guidance_and_the_words_before_a_prompt_change_the_image(model, monkeypatch):
    """Else the comparisons with the pipeline could not fail for them."""
    executor = model[1]
    request = make_request(1)
    image = generate(executor, [request])["r1", 0]
    changes = {"prompt": "a"}, {"negative_prompt": PROMPTS[1]}, {"guidance_scale": 0.0}
    images = [generate(executor, [make_request(1, **change)])["r1", 0] for change in changes]
    if executor.model.guidance.prompt_prefix:
        monkeypatch.setattr(executor.model, "guidance", replace(executor.model.guidance, prompt_prefix=""))
        images.append(generate(executor, [request])["r1", 0])
    assert min(difference(image, other) for other in images) > PARITY_TOLERANCE


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # warning of diffusers' Krea 2
def test_images_in_bfloat16_lose_what_those_of_the_pipeline_lose(model):
    """Rounding errors grow in random models, by more on a GPU than on a CPU."""
    spec, executor, _ = model
    rounded = load(spec.folder, executor.model.device, dtype="bfloat16")[1]
    rounded_pipe = open_pipeline(spec.folder).to(executor.model.device, torch.bfloat16)
    requests = [make_request(number) for number in range(4)]
    images, of_rounded = generate(executor, requests), generate(rounded, requests)
    losses = [np.abs(image - of_rounded[key].astype(float)).mean() for key, image in images.items()]
    of_pipeline = [
        np.abs(image - generate_with_pipeline(rounded_pipe, spec.family, request).astype(float)).mean()
        for request, image in zip(requests, images.values(), strict=True)
    ]
    assert sum(losses) <= 1.5 * sum(of_pipeline) + 4, (losses, of_pipeline)


def test_without_a_negative_prompt_an_image_is_not_guided(qwen):
    spec, executor, pipe = qwen
    settings = {"prompt": "a square", "seed": 1, "width": 64, "height": 64, "inference_steps": 4}
    requests = [
        make_request(number, negative_prompt=negative, guidance_scale=scale, **settings)
        for number, (negative, scale) in enumerate([(None, 20.0), (None, 1.0), ("", 20.0), ("", 1.0)])
    ]
    assert [executor.prepare(request).num_rows for request in requests] == [1, 1, 2, 1]
    absent, absent_at_1, empty, empty_at_1 = generate(executor, requests).values()
    assert max(difference(absent, other) for other in (absent_at_1, empty_at_1)) <= 1
    assert difference(absent, empty) > 5
    assert difference(empty, generate_with_pipeline(pipe, spec.family, requests[2])) <= PARITY_TOLERANCE


@pytest.mark.parametrize("has_mask", [False, True])
def test_start_images_and_masks_of_all_sizes_give_the_images_of_their_pipelines(qwen, has_mask):
    spec, executor, pipe = qwen
    start_pipe = (QwenImageInpaintPipeline if has_mask else QwenImageImg2ImgPipeline)(**pipe.components)
    start_pipe.set_progress_bar_config(disable=True)
    requests = [
        make_request(number, inference_steps=steps, strength=strength, has_mask=has_mask)
        for number, (steps, strength) in enumerate([(4, 0.5), (5, 0.5), (4, 1.0)])
    ]
    frames, options = {}, {}
    for request in requests:
        width, height, seed = request.payload.width, request.payload.height, request.payload.seed
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        mask = np.where(np.arange(width) < width // 2, 255, 0).astype(np.uint8)[None].repeat(height, 0)
        frames[request.request_id] = memoryview(pixels.tobytes() + mask.tobytes() * has_mask)
        options[request.request_id] = {"image": PIL.Image.fromarray(pixels), "strength": request.payload.strength}
        if has_mask:
            options[request.request_id]["mask_image"] = PIL.Image.fromarray(mask)
    images = generate(executor, requests, [2, 0, 1], frames)
    for request in requests:
        theirs = generate_with_pipeline(start_pipe, spec.family, request, **options[request.request_id])
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_krea_2_begins_with_the_latents_of_a_start_image_as_the_others_do(krea):
    """Its pipeline takes latents and the last noise levels, but no image."""
    spec, executor, pipe = krea
    request = make_request(1, inference_steps=5, strength=0.6, width=64, height=64)
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
    theirs = generate_with_pipeline(pipe, spec.family, request, sigmas=levels, latents=packed)
    assert difference(ours, theirs) <= PARITY_TOLERANCE


def test_distilled_krea_2_has_a_constant_shift(tmp_path):
    folder = tiny_models.save_krea2(tmp_path, is_distilled=True)
    spec, executor = load(folder)
    assert (spec.default_steps, spec.default_guidance) == (8, 0.0)
    assert {executor.model.schedule(*size, 4).mu for size in SIZES} == {1.15}
    assert_like_the_pipeline((spec, executor, open_pipeline(folder)), make_request(3))


@pytest.mark.parametrize(
    ("family", "scheduler"),
    [
        ("qwen-image", {"use_dynamic_shifting": False, "shift": 3.0}),
        ("qwen-image", {"shift_terminal": None}),
        ("lumina-2", {"use_dynamic_shifting": True}),
    ],
)
def test_the_schedulers_own_settings_are_the_folders(tmp_path, family, scheduler):
    folder = SAVE[family](tmp_path, scheduler=scheduler)
    assert_like_the_pipeline((*load(folder), open_pipeline(folder)), make_request(1))


def test_large_images_are_decoded_in_tiles_as_by_the_pipeline(qwen):
    tiled, pipe, request = (
        load(qwen[0].folder, vae_tiling=True),
        open_pipeline(qwen[0].folder),
        make_request(1, width=264),
    )
    pipe.vae.enable_tiling()
    assert_like_the_pipeline((*tiled, pipe), request)
    assert not np.array_equal(*(generate(each, [request])["r1", 0] for each in (tiled[1], qwen[1])))


def test_sharded_weights_are_read(qwen, tmp_path):
    folder = shutil.copytree(qwen[0].folder, tmp_path / "m")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    QwenImageTransformer2DModel.from_pretrained(qwen[0].folder, subfolder="transformer").save_pretrained(
        folder / "transformer", max_shard_size="100KB"
    )
    assert len(list((folder / "transformer").glob("*-of-*.safetensors"))) > 1
    spec, executor = load(folder)
    assert spec.num_parameters == qwen[0].num_parameters
    request = make_request(1)
    assert difference(*(generate(each, [request])["r1", 0] for each in (executor, qwen[1]))) == 0


def test_an_adapter_of_all_layers_changes_its_image_alone_in_a_batch_of_all_sizes(model, tmp_path):
    assert_adapter_changes_its_image_alone(model[1], make_request, tmp_path)


def test_the_preview_of_the_last_call_is_the_image_of_its_latents(model):
    """At the last call, x - σ·v is the final sample."""
    executor = model[1]
    table = executor.prepare(make_request(0)).table
    coefficients, last = table.coefficients[-1], executor.model.clean_weights(table.timesteps[-1:])[:, 0]
    np.testing.assert_allclose(coefficients[coefficients != 0], last, rtol=1e-5)
    assert executor.model.preview_colours.shape == (5, 3)


def test_bounds_and_defaults(model):
    spec, executor, _ = model
    sides = (spec.default_width_px, spec.default_height_px, spec.min_side_px, spec.max_side_px, spec.multiple_px)
    defaults = spec.default_steps, spec.default_guidance
    assert (*sides, *defaults) == {
        "qwen-image": (512, 512, 32, 1024, 8, 50, 4.0),
        "krea-2": (512, 512, 32, 1024, 8, 28, 4.5),
        "lumina-2": (64, 64, 64, 64, 16, 30, 4.0),
    }[spec.family]
    assert (spec.default_scheduler, spec.schedulers) == ("flow-euler", ("flow-euler", "flow-unipc"))
    assert FAMILIES[spec.family].gpu_dtype == "bfloat16"
    scale = spec.multiple_px // 2
    assert executor.model.latent_shape(64, 48) == (4, 48 // scale, 64 // scale)


@pytest.mark.parametrize("name", [choice.name for choice in scheduler_names.SCHEDULERS if choice.family != "flow"])
def test_a_scheduler_of_another_family_is_rejected(qwen, name):
    with pytest.raises(InvalidField, match="but this is a flow model"):
        qwen[1].prepare(make_request(0, scheduler=name))
