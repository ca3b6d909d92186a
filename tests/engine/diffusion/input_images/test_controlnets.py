"""ControlNets by row: as in diffusers' pipelines, in a mixed batch as alone, and not at all where there is none."""

import functools
import gc

import diffusers
import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from generating import difference, final_latents, generate, relative
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.input_images.controls import ControlImage, call_scales
from noria.engine.diffusion.input_images.start_latents import StartFrameReader
from noria.engine.loop import StepLoop
from noria.errors import ConfigError, ControlNetNotFound, InvalidField, ModelError, QueueFull
from noria.images import scheduler_names
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.models.families import FAMILIES
from noria.protocol.diffusion import Control, Lora
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request
from pipelines import run_pipeline, set_scheduler

# As in `test_start_images.py`: two steps of uint8 against the pipelines; as in `test_loras.py`: relative, of latents.
PARITY_TOLERANCE, LATENTS_TOLERANCE = 2, 1e-5
NAMES = [each.name for each in scheduler_names.choices_of_family("diffusion")]
PIPELINES = {
    ("stable-diffusion", "text"): diffusers.StableDiffusionControlNetPipeline,
    ("stable-diffusion", "image"): diffusers.StableDiffusionControlNetImg2ImgPipeline,
    ("stable-diffusion", "mask"): diffusers.StableDiffusionControlNetInpaintPipeline,
    ("stable-diffusion-xl", "text"): diffusers.StableDiffusionXLControlNetPipeline,
    ("stable-diffusion-xl", "image"): diffusers.StableDiffusionXLControlNetImg2ImgPipeline,
    ("stable-diffusion-xl", "mask"): diffusers.StableDiffusionXLControlNetInpaintPipeline,
}
WIDTH, HEIGHT = 48, 32


def load(folder, controlnets, **settings):
    torch.set_num_threads(1)
    spec = open_model(str(folder))
    settings = {"loras": ()} | settings
    config = EngineConfig(dtype="float32", slots=16, threads=1, controlnets=tuple(map(str, controlnets)), **settings)
    return spec, DiffusionExecutor(FAMILIES[spec.family].load(spec, config, "cpu"), config)


@pytest.fixture(scope="module", params=["tiny_folder", "tiny_xl_folder"])
def served(request, tmp_path_factory):
    folder, parent = request.getfixturevalue(request.param), tmp_path_factory.mktemp("controlnets")
    controlnets = [
        tiny_models.save_controlnet(parent / name, folder, seed=k) for k, name in enumerate(["edges", "depth"])
    ]
    return *load(folder, controlnets), parent


def noise_pixels(seed, width=WIDTH, height=HEIGHT):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def start_mask():
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[HEIGHT // 4 + 1 :, 3 : WIDTH - 5] = 255
    return mask


def make_request(number, *controls, **fields):
    settings = {
        "prompt": ["a red circle", "a blue square above a green star", "a large ring"][number % 3],
        "negative_prompt": [None, "", "a black cross"][number % 3],
        "seed": 500 + number,
        "width": WIDTH,
        "height": HEIGHT,
        "inference_steps": 5,
        "guidance_scale": [1.0, 5.0][number % 2],
        "controls": controls,
    }
    return make_image_request(f"r{number}", **settings | fields)


def control_pixels(request):
    payload = request.payload
    return [noise_pixels(900 + payload.seed + k, payload.width, payload.height) for k in range(len(payload.controls))]


def frame(request):
    """The data of a request; None if it has no image."""
    payload = request.payload
    parts = [] if payload.strength is None else [noise_pixels(1), *([start_mask()] if payload.has_mask else [])]
    data = b"".join(each.tobytes() for each in [*parts, *control_pixels(request)])
    return memoryview(data) if data else None


def generate_all(executor, requests, arrivals=None):
    return generate(executor, requests, arrivals, {each.request_id: frame(each) for each in requests})


@functools.cache  # keeps three for a model: loading one takes three times as long as an image
def pipeline(spec, parent, kind, *names):
    nets = [diffusers.ControlNetModel.from_pretrained(parent / name) for name in names]
    pipe = PIPELINES[spec.family, kind].from_pretrained(
        spec.folder, controlnet=nets if len(nets) > 1 else nets[0], dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate_with_pipeline(spec, parent, request):
    """The image of diffusers' pipeline, with one ControlNet or several."""
    payload = request.payload
    kind = "text" if payload.strength is None else "mask" if payload.has_mask else "image"
    controls = [PIL.Image.fromarray(pixels) for pixels in control_pixels(request)]
    values = {
        "controlnet_conditioning_scale": [each.scale for each in payload.controls],
        "control_guidance_start": [each.start for each in payload.controls],
        "control_guidance_end": [each.end for each in payload.controls],
        ("image" if kind == "text" else "control_image"): controls,
    }
    if len(payload.controls) == 1:
        values = {name: value[0] for name, value in values.items()}
    if kind != "text":
        values |= {"image": PIL.Image.fromarray(noise_pixels(1)), "strength": payload.strength}
    if kind == "mask":
        values |= {"mask_image": PIL.Image.fromarray(start_mask())}
    pipe = pipeline(spec, parent, kind, *(each.name for each in payload.controls))
    is_xl = spec.family == "stable-diffusion-xl"  # whose pipeline leaves steps_offset as the folder has it
    set_scheduler(pipe, request, spec.folder, clip_sample=False, **({} if is_xl else {"steps_offset": 1}))
    return run_pipeline(pipe, request, **values)


# All take 30 s; these stand for one call and two a step, with noise and with a history.
FAST = ("heun", "dpm++2m-sde")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in NAMES])
def test_each_scheduler_gives_the_images_of_the_pipelines(served, name):
    spec, executor, parent = served
    starts = [{}, {"strength": 0.75}, {"strength": 0.6, "has_mask": True}]
    if not scheduler_names.find(name).takes_start_image:
        starts = starts[:1]
    nets = [[Control("edges", 0.8)], [Control("depth", 1.5, 0.2, 0.7), Control("edges", 0.5)], [Control("edges")]]
    requests = [
        make_request(k + 1, *controls, scheduler=name, **start)
        for k, (start, controls) in enumerate(zip(starts, nets, strict=False))
    ]
    images = generate_all(executor, requests)
    for request in requests:
        theirs = generate_with_pipeline(spec, parent, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_prompts_of_lengths_without_a_small_common_multiple_are_steered_as_alone(served):
    _, executor, _ = served
    prompts = [" BREAK ".join(["a red circle", *["a star"] * k]) for k in (12, 10, 12)]  # 312 and 264 tokens: 3,432
    requests = [
        make_request(k, *[Control("edges", 0.8)] * (k != 2), prompt=prompt, prompt_syntax="a1111")
        for k, prompt in enumerate(prompts)
    ]
    together = generate_all(executor, requests)
    for request in requests:
        image = generate_all(executor, [request])[request.request_id, 0]
        assert difference(together[request.request_id, 0], image) <= 1


@pytest.mark.parametrize("family", ["", "_xl"])
def test_a_controlnet_of_a_model_for_inpainting_sees_the_latents_alone(family, tmp_path):
    pipeline = f"StableDiffusion{family[1:].upper()}InpaintPipeline"
    save = getattr(tiny_models, f"save_stable_diffusion{family}")
    folder = save(tmp_path / "model", unet=tiny_models.INPAINTING_UNET, pipeline=pipeline)
    spec, executor = load(folder, [tiny_models.save_controlnet(tmp_path / "edges", folder, in_channels=4)])
    controls = [[Control("edges", 0.8)], [], [Control("edges", 1.5, 0.2, 0.7)]]
    requests = [
        make_request(k, *each, strength=[0.6, 0.8, 1.0][k], has_mask=True, scheduler="euler-a")
        for k, each in enumerate(controls)
    ]
    images = generate_all(executor, requests, [0, 2, 1])
    for request in (requests[0], requests[2]):
        theirs = generate_with_pipeline(spec, tmp_path, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def sixteen():
    """Images with one ControlNet, with two, for some of their steps, with start images and masks, and with none."""
    choices = [
        (),
        (Control("edges"),),
        (Control("depth", 0.7), Control("edges", 0.4)),
        (Control("depth", 2.0, 0.5, 1.0),),
        (Control("edges", 0.9), Control("edges", 0.3, 0.0, 0.4)),  # one ControlNet with two images
    ]
    schedulers = ["ddim", "euler-a", "dpm++2m-karras", "pndm", "heun", "unipc"]
    return [
        make_request(
            k,
            *choices[k % 5],
            scheduler=schedulers[k % 6],
            inference_steps=4 + k % 4,
            strength=[None, None, 0.7][k % 3],
            has_mask=k in (2, 11),
            n=1 + (k == 6),
        )
        for k in range(16)
    ]


def latents_of(executor, requests, monkeypatch, arrivals=None):
    frames = {each.request_id: frame(each) for each in requests}
    return final_latents(executor, requests, monkeypatch, arrivals, frames)


def test_sixteen_images_with_and_without_controls_are_in_one_batch_as_each_alone(served, monkeypatch):
    spec, executor, _ = served
    requests = sixteen()
    together = latents_of(executor, requests, monkeypatch, [(7 * k) % 5 for k in range(16)])
    _, bare = load(spec.folder, ())
    for request in requests:
        alone = latents_of(executor, [request], monkeypatch)[request.request_id]
        assert relative(together[request.request_id], alone) <= LATENTS_TOLERANCE, request
        plain = msgspec.structs.replace(request, payload=msgspec.structs.replace(request.payload, controls=()))
        without = latents_of(bare, [plain], monkeypatch)[request.request_id]
        if request.payload.controls:
            assert relative(together[request.request_id], without) > 1e-3, request
        else:
            assert relative(together[request.request_id], without) <= LATENTS_TOLERANCE, request


def test_loras_and_controls_share_a_batch(tiny_folder, tmp_path, monkeypatch):
    edges = tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)
    (tmp_path / "loras").mkdir()
    _, executor = load(tiny_folder, [edges], loras=(str(tmp_path / "loras"),))
    file = tmp_path / "loras" / "ink.safetensors"
    save_diffusers_lora(file, executor.model.lora_parts, rank=2, seed=2)
    adapted, steered = {"loras": (Lora("ink", 0.7, digest_of(file)),)}, (Control("edges"),)
    same = {"prompt": "a ring", "negative_prompt": "", "seed": 5, "guidance_scale": 4.0, "scheduler": "euler"}
    requests = [
        make_request(0, *steered, **same, **adapted),
        make_request(1, *steered, **same),
        make_request(2, **same, **adapted),
        make_request(3, **same),
    ]
    together = latents_of(executor, requests, monkeypatch)
    for k, request in enumerate(requests):
        alone = latents_of(executor, [request], monkeypatch)[request.request_id]
        assert relative(together[request.request_id], alone) <= LATENTS_TOLERANCE, request
        for other in requests[:k]:
            assert relative(together[other.request_id], alone) > 1e-3, (request, other)


def test_with_padded_rows_they_are_equal_in_every_bit(tiny_folder, tmp_path):
    controlnets = [tiny_models.save_controlnet(tmp_path / name, tiny_folder) for name in ("edges", "depth")]
    _, executor = load(tiny_folder, controlnets, buckets=(32,))
    requests = sixteen()[:8]
    together = generate_all(executor, requests, [(7 * k) % 4 for k in range(8)])
    for request in requests:
        for (_, index), pixels in generate_all(executor, [request]).items():
            assert np.array_equal(pixels, together[request.request_id, index]), request


def test_only_rows_with_a_control_are_computed_and_only_in_its_steps(served, monkeypatch):
    _, executor, _ = served
    calls = []
    for name, part in executor.model.controlnets._parts.items():
        forward = part.forward
        monkeypatch.setattr(
            part,
            "forward",
            lambda rows, *a, _f=forward, _n=name, **k: calls.append((_n, len(rows))) or _f(rows, *a, **k),
        )
    requests = [
        make_request(1, Control("edges"), inference_steps=4, scheduler="ddim"),
        make_request(
            2, Control("edges", 1.0, 0.5), Control("depth", 1.0, 0.0, 0.25), inference_steps=4, scheduler="ddim"
        ),
        make_request(3, scheduler="ddim", inference_steps=6),
        make_request(4, Control("depth", 0.0), scheduler="ddim"),
    ]
    generate_all(executor, requests)
    assert calls == [("depth", 1), ("edges", 2), ("edges", 2), ("edges", 3), ("edges", 3)]
    calls.clear()
    generate_all(executor, requests[2:3])
    assert not calls


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0.2, 0.9), (0.5, 0.5), (0.3, 0.31), (0, 0.05), (1, 1)])
@pytest.mark.parametrize("num_calls", [1, 2, 5, 7, 50])
def test_a_control_steers_the_steps_that_diffusers_keeps(start, end, num_calls):
    kept = [1.0 - float(i / num_calls < start or (i + 1) / num_calls > end) for i in range(num_calls)]
    assert call_scales(Control("a", 0.5, start, end), num_calls).tolist() == [0.5 * each for each in kept]


def test_the_images_of_controls_are_kept_on_the_device_until_the_request_ends(served):
    _, executor, _ = served
    request = make_request(1, Control("edges"), Control("depth"), n=20)
    loop = StepLoop(StepScheduler(16), executor, lambda _: None, lambda: 0.0)
    loop.submit(executor.prepare(request, frame(request)))
    images = list(executor._preparer._start_frames._alive)
    assert [each.waiting_bytes for each in images] == [HEIGHT * WIDTH * 3] * 2
    loop.run_iteration()
    assert [each.waiting_bytes for each in images] == [0, 0]
    loop.cancel("r1")
    images.clear()
    gc.collect()
    assert not executor._preparer._start_frames._alive


@pytest.mark.parametrize(
    ("changes", "data", "error", "words"),
    [
        (
            {"controls": (Control("edges"),)},
            None,
            InvalidField,
            "0 bytes, and not the 4608 of images of controls: 1 of 48 × 32",
        ),
        ({"controls": (Control("edges"),) * 2}, bytes(4608), InvalidField, "not the 9216 of images of controls: 2"),
        (
            {"controls": (Control("edges"),), "strength": 0.5, "has_mask": True},
            bytes(6144),
            InvalidField,
            "the 10752 of a start image and a mask and images of controls: 1",
        ),
        (
            {"controls": (Control("other"),)},
            bytes(4608),
            ControlNetNotFound,
            "'other' loaded; allowed are 'depth', 'edges'",
        ),
        (
            {"controls": (Control("edges", digest="0" * 12),)},
            bytes(4608),
            InvalidField,
            "'0{12}' on disk, but .* Restart",
        ),
    ],
)
def test_controls_that_do_not_fit_are_rejected(served, changes, data, error, words):
    request = make_request(1, **changes)
    with pytest.raises(error, match=words):
        served[1].prepare(request, None if data is None else memoryview(data))


def test_the_pixels_that_wait_are_bounded(served):
    request = make_request(1, Control("edges"), strength=0.5)
    reader = StartFrameReader(max_waiting_bytes=20_000)
    held = [reader.read(request.payload, frame(request), (4, 8, 12)) for _ in range(2)]
    with pytest.raises(QueueFull, match="18432 bytes of 20000"):
        reader.read(request.payload, frame(request), (4, 8, 12))
    held.pop()
    assert reader.read(request.payload, frame(request), (4, 8, 12))[1]


def test_a_control_costs_half_of_the_rows_that_it_steers(served):
    _, executor, _ = served
    two = (Control("edges"), Control("depth"))
    requests = [make_request(k, *controls) for k, controls in enumerate([(), (), two[:1], two[:1], two, two])]
    prepared = [executor.prepare(request, frame(request)) for request in requests]
    assert [each.num_rows for each in prepared] == [1, 2, 2, 3, 2, 4]


def test_a_family_without_a_unet_has_no_controlnets(tiny_z_image_folder, tiny_folder, tmp_path):
    _, executor = load(tiny_z_image_folder, [tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)])
    request = make_request(1, Control("edges"), scheduler="flow-euler")
    with pytest.raises(ControlNetNotFound, match="it has none; the operator sets"):
        executor.prepare(request, frame(request))


def test_compiled_models_have_none(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"does not work with engine\.compile"):
        load(tiny_folder, [tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)], compile=True)


def test_models_of_a_process_share_a_controlnet(served, tmp_path):
    spec, executor, parent = served
    _, other = load(spec.folder, [parent / "edges"])
    assert other.model.controlnets._parts["edges"] is executor.model.controlnets._parts["edges"]


def test_a_controlnet_whose_weights_lack_a_parameter_is_rejected(tiny_folder, tmp_path):
    folder = tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["controlnet_mid_block.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"1 parameters are missing .* controlnet_mid_block.weight"):
        load(tiny_folder, [folder])


def test_pixels_are_scaled_as_diffusers_does(served):
    pixels = noise_pixels(5)
    theirs = diffusers.image_processor.VaeImageProcessor(do_convert_rgb=True, do_normalize=False)
    expected = theirs.preprocess(PIL.Image.fromarray(pixels), height=HEIGHT, width=WIDTH)[0]
    assert torch.equal(ControlImage(pixels).on_device(served[1].model), expected)
