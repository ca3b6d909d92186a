"""ControlNets by row: as in diffusers' pipelines, in a mixed batch as alone, and not at all where there is none."""

import functools
import gc
import itertools

import diffusers
import msgspec
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

import start_images
import tiny_models
from generating import (
    LATENTS_TOLERANCE,
    PARITY_TOLERANCE,
    assert_as_alone,
    assert_latents_as_alone,
    difference,
    final_latents,
    generate,
    load,
    loop_of,
    relative,
)
from lora_files import save_diffusers_lora
from noria.engine.diffusion.input_images.controls import ControlImage, call_scales
from noria.engine.diffusion.input_images.start_latents import StartFrameReader
from noria.errors import ConfigError, ControlNetNotFound, InvalidField, ModelError, QueueFull
from noria.images import scheduler_names
from noria.models.adapters.lora_folders import digest_of
from noria.protocol.diffusion import Control, Lora
from pipelines import open_pipeline, run_pipeline, set_scheduler
from start_images import mask_of, start_pixels

NAMES = [each.name for each in scheduler_names.choices_of_family("diffusion")]
PIPELINES = {
    ("stable-diffusion", "text"): diffusers.StableDiffusionControlNetPipeline,
    ("stable-diffusion", "image"): diffusers.StableDiffusionControlNetImg2ImgPipeline,
    ("stable-diffusion", "mask"): diffusers.StableDiffusionControlNetInpaintPipeline,
    ("stable-diffusion-xl", "text"): diffusers.StableDiffusionXLControlNetPipeline,
    ("stable-diffusion-xl", "image"): diffusers.StableDiffusionXLControlNetImg2ImgPipeline,
    ("stable-diffusion-xl", "mask"): diffusers.StableDiffusionXLControlNetInpaintPipeline,
}


def load_with(folder, *controlnets, **settings):
    settings = {"loras": (), "slots": 16} | settings
    return load(folder, controlnets=tuple(map(str, controlnets)), **settings)


@pytest.fixture(scope="module", params=["tiny_folder", "tiny_xl_folder"])
def served(request, tmp_path_factory):
    folder, parent = request.getfixturevalue(request.param), tmp_path_factory.mktemp("controlnets")
    controlnets = [
        tiny_models.save_controlnet(parent / name, folder, seed=k) for k, name in enumerate(["edges", "depth"])
    ]
    return *load_with(folder, *controlnets), parent


def make_request(number, *controls, **fields):
    settings = {"negative_prompt": [None, "", "a black cross"][number % 3], "controls": controls}
    return start_images.make_request(number, **settings | fields)


def control_pixels(request):
    payload = request.payload
    return [start_pixels(payload.width, payload.height, 900 + payload.seed + k) for k in range(len(payload.controls))]


def frame(request):
    """The data of a request; None if it has no image."""
    data = b"".join([start_images.frame(request) or b"", *(each.tobytes() for each in control_pixels(request))])
    return memoryview(data) if data else None


generate_all = functools.partial(generate, frames=frame)


@functools.cache  # keeps three for a model: loading one takes three times as long as an image
def pipeline(spec, parent, kind, *names):
    nets = [diffusers.ControlNetModel.from_pretrained(parent / name) for name in names]
    return open_pipeline(PIPELINES[spec.family, kind], spec.folder, controlnet=nets if len(nets) > 1 else nets[0])


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
        values |= {
            "image": PIL.Image.fromarray(start_pixels(payload.width, payload.height)),
            "strength": payload.strength,
        }
    if kind == "mask":
        values |= {"mask_image": PIL.Image.fromarray(mask_of(request))}
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
    assert_as_alone(executor, requests, frames=frame)


@pytest.mark.parametrize("family", ["", "_xl"])
def test_a_controlnet_of_a_model_for_inpainting_sees_the_latents_alone(family, tmp_path):
    pipeline = f"StableDiffusion{family[1:].upper()}InpaintPipeline"
    save = getattr(tiny_models, f"save_stable_diffusion{family}")
    folder = save(tmp_path / "model", unet=tiny_models.INPAINTING_UNET, pipeline=pipeline)
    spec, executor = load_with(folder, tiny_models.save_controlnet(tmp_path / "edges", folder, in_channels=4))
    controls = [[Control("edges", 0.8)], [], [Control("edges", 1.5, 0.2, 0.7)]]
    requests = [
        make_request(k, *each, strength=[0.6, 0.8, 1.0][k], has_mask=True, scheduler="euler-a")
        for k, each in enumerate(controls)
    ]
    images = generate_all(executor, requests, [0, 2, 1])
    for request in (requests[0], requests[2]):
        theirs = generate_with_pipeline(spec, tmp_path, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def mixed():
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
            inference_steps=3 + k % 3,
            strength=[None, None, 0.7][k % 3],
            has_mask=k == 2,
            n=1 + (k == 6),
        )
        for k in range(8)
    ]


def test_images_with_and_without_controls_are_in_one_batch_as_each_alone(served, monkeypatch):
    spec, executor, _ = served
    requests, arrivals = mixed(), [(7 * k) % 5 for k in range(8)]
    together = assert_latents_as_alone(executor, requests, monkeypatch, arrivals, frame)
    plain = [
        msgspec.structs.replace(each, payload=msgspec.structs.replace(each.payload, controls=())) for each in requests
    ]
    without = final_latents(load_with(spec.folder)[1], plain, monkeypatch, arrivals, frame)
    for request in requests:
        change = relative(together[request.request_id], without[request.request_id])
        assert change > 1e-3 if request.payload.controls else change <= LATENTS_TOLERANCE, request


def test_loras_and_controls_share_a_batch(tiny_folder, tmp_path, monkeypatch):
    edges = tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)
    (tmp_path / "loras").mkdir()
    _, executor = load_with(tiny_folder, edges, loras=(str(tmp_path / "loras"),))
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
    together = assert_latents_as_alone(executor, requests, monkeypatch, frames=frame)
    for one, other in itertools.combinations(together.values(), 2):
        assert relative(one, other) > 1e-3


def test_with_padded_rows_they_are_equal_in_every_bit(tiny_folder, tmp_path):
    controlnets = [tiny_models.save_controlnet(tmp_path / name, tiny_folder) for name in ("edges", "depth")]
    _, executor = load_with(tiny_folder, *controlnets, buckets=(16,))  # 8 slots, guided
    assert_as_alone(executor, mixed()[:6], [(7 * k) % 4 for k in range(6)], frame, tolerance=0)


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
    loop, events = loop_of(executor, num_slots=16)
    loop.submit(executor.prepare(request, frame(request)))
    images = list(executor._preparer._start_frames._alive)
    assert [each.waiting_bytes for each in images] == [32 * 48 * 3] * 2
    loop.run_iteration()
    assert [each.waiting_bytes for each in images] == [0, 0]
    loop.cancel("r1")
    for held in (images, events):
        held.clear()
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


def test_the_pixels_that_wait_are_bounded():
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
    _, executor = load_with(tiny_z_image_folder, tiny_models.save_controlnet(tmp_path / "edges", tiny_folder))
    request = make_request(1, Control("edges"), scheduler="flow-euler")
    with pytest.raises(ControlNetNotFound, match="it has none; the operator sets"):
        executor.prepare(request, frame(request))


def test_compiled_models_have_none(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"does not work with engine\.compile"):
        load_with(tiny_folder, tiny_models.save_controlnet(tmp_path / "edges", tiny_folder), compile=True)


def test_models_of_a_process_share_a_controlnet(served, tmp_path):
    spec, executor, parent = served
    _, other = load_with(spec.folder, parent / "edges")
    assert other.model.controlnets._parts["edges"] is executor.model.controlnets._parts["edges"]


def test_a_controlnet_whose_weights_lack_a_parameter_is_rejected(tiny_folder, tmp_path):
    folder = tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["controlnet_mid_block.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"1 parameters are missing .* controlnet_mid_block.weight"):
        load_with(tiny_folder, folder)


def test_pixels_are_scaled_as_diffusers_does(served):
    pixels = start_pixels(48, 32, 5)
    theirs = diffusers.image_processor.VaeImageProcessor(do_convert_rgb=True, do_normalize=False)
    expected = theirs.preprocess(PIL.Image.fromarray(pixels), height=32, width=48)[0]
    assert torch.equal(ControlImage(pixels).on_device(served[1].model), expected)
