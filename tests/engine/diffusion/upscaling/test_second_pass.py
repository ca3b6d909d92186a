"""A second pass in another size, in the running batch: as diffusers' two pipelines, and as alone."""

import diffusers
import msgspec
import numpy as np
import PIL.Image
import pytest
import torch

import tiny_models
from generating import (
    NATURAL_TOLERANCE,
    PARITY_TOLERANCE,
    assert_as_alone,
    difference,
    evicted_image,
    generate,
    load,
    moved_image,
)
from ip_adapter_files import ENCODER
from noria.engine.diffusion.input_images.controls import call_scales
from noria.engine.diffusion.upscaling.second_pass import enlarge
from noria.errors import InvalidField
from noria.images.start_image import ImageFiles, RequestImages
from noria.protocol.diffusion import Control, IpAdapter, PixelUpscaler, SecondPass
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler
from uploads import file_of, photo

SECOND = SecondPass(width=64, height=48, inference_steps=6, strength=0.7)


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load(tiny_folder)


@pytest.fixture(scope="module")
def pipelines(tiny):
    """diffusers' pipelines for a text and for a start image."""
    classes = diffusers.StableDiffusionPipeline, diffusers.StableDiffusionImg2ImgPipeline
    return [open_pipeline(each, tiny[0].folder) for each in classes]


def make_request(number, second=SECOND, **fields):
    settings = {"prompt": ["a red circle", "a blue square"][number % 2], "guidance_scale": [1.0, 5.0][number % 2]}
    defaults = {"seed": 700 + number, "width": 32, "height": 24, "inference_steps": 5, "second_pass": second}
    return make_image_request(f"r{number}", **settings | defaults | fields)


def generate_with_pipelines(pipelines, request, of_first=None, of_second=None):
    """The image of both pipelines, each with options of its own."""
    second = request.payload.second_pass
    of_text, of_image = pipelines
    for pipe in pipelines:
        set_scheduler(pipe, request, clip_sample=False, steps_offset=1)
    latents = run_pipeline(of_text, request, output_type="latent", **(of_first or {}))
    larger = torch.nn.functional.interpolate(latents, (second.height // 4, second.width // 4), mode="bilinear")
    own = {"strength": second.strength, "num_inference_steps": second.inference_steps, "width": None, "height": None}
    return run_pipeline(of_image, request, image=larger, **own | (of_second or {}))


@pytest.mark.parametrize("name", ["ddim", "euler-a", "dpm++2m", "heun"])
def test_it_gives_the_images_of_both_pipelines(tiny, pipelines, name):
    for number in range(2):
        request = make_request(number, scheduler=name)
        ours = generate(tiny[1], [request])[request.request_id, 0]
        assert ours.shape == (48, 64, 3)
        assert difference(ours, generate_with_pipelines(pipelines, request)) <= PARITY_TOLERANCE, request


def test_controlnets_and_ip_adapters_are_in_both_passes(tiny_folder, tmp_path):
    """A control's image has the second size in the second pass, and its start and end are parts of each."""
    net = tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)
    adapters = tiny_models.save_ip_adapters(tmp_path / "models", tiny_folder, ["plain"])
    spec, executor = load(tiny_folder, loras=(), controlnets=(str(net),), ip_adapters=(str(adapters),))
    loaded = executor.model.ip_adapters.by_name["plain"]
    shown = {"ip_adapter": IpAdapter("plain", 0.8, loaded.digest, image_px=ENCODER["image_size"])}
    steered = {"controls": (Control("edges", 0.9, 0.0, 0.7),)}
    names = ["euler-a", "dpm++2m", "heun", "ddim"]
    requests = [
        make_request(k, scheduler=names[k], **fields) for k, fields in enumerate([{}, shown, steered, shown | steered])
    ]
    picture, edges = photo((61, 45)), photo((96, 72), seed=3)
    frames = {each.request_id: frame_of(each, picture, edges) for each in requests}
    together = generate(executor, requests, [2, 0, 1, 3], frames)
    classes = diffusers.StableDiffusionControlNetPipeline, diffusers.StableDiffusionControlNetImg2ImgPipeline
    controlnet = diffusers.ControlNetModel.from_pretrained(net)
    pipes = [open_pipeline(each, spec.folder, controlnet=controlnet) for each in classes]
    for pipe in pipes:
        pipe.load_ip_adapter(str(tmp_path), subfolder="models", weight_name="plain.safetensors")
    for request in requests[1:]:
        payload = request.payload
        (control,) = payload.controls or (Control("edges", 0.0),)
        for pipe in pipes:
            pipe.set_ip_adapter_scale(0.0 if payload.ip_adapter is None else payload.ip_adapter.scale)
        both = {
            "ip_adapter_image": picture,
            "controlnet_conditioning_scale": control.scale,
            "control_guidance_end": control.end,
        }
        second = {"control_image": edges, "width": SECOND.width, "height": SECOND.height}
        theirs = generate_with_pipelines(pipes, request, both | {"image": edges}, both | second)
        assert difference(together[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request
    moved = moved_image(executor, requests[3], 7, frames["r3"])
    assert difference(moved, together["r3", 0]) <= NATURAL_TOLERANCE
    by_pixels = msgspec.structs.replace(SECOND, pixel_upscaler=PixelUpscaler("Lanczos"))
    prepared = executor.prepare(make_request(0, by_pixels, **steered), frames["r2"])
    scales, second = prepared.controls[0].scales, prepared.second_stage_from
    assert (len(scales), second) == (prepared.num_calls, 5 + prepared.upscaling.num_calls)
    for of_pass in (scales[:5], scales[second:]):
        assert np.array_equal(of_pass, call_scales(steered["controls"][0], len(of_pass)))


def frame_of(request, picture, edges):
    """The data of a request, as a front end makes it; None if it has no image."""
    payload = request.payload
    if not payload.has_images:
        return None
    files = ImageFiles(
        controls=(file_of(edges),) * len(payload.controls), ip_adapter=file_of(picture) if payload.ip_adapter else None
    )
    sizes = payload.width, payload.height, None, None, ENCODER["image_size"], payload.result_px
    return memoryview(RequestImages(files).pixels(*sizes))


def test_of_the_bundled_model_it_shows_what_the_first_pass_shows(bundled_folder):
    spec, executor = load(bundled_folder)
    side_px = spec.default_width_px
    second = SecondPass(side_px * 5 // 4, side_px * 5 // 4, inference_steps=12, strength=0.3)
    texts = ["a red circle above a blue square", "a green star"]
    requests = [
        make_request(k, each, prompt=texts[k // 2], seed=7, guidance_scale=5.0, width=side_px, height=side_px,
                     inference_steps=12, scheduler="dpm++2m")
        for k, each in enumerate((second, None, None))
    ]  # fmt: skip

    images = generate(executor, requests)
    larger = PIL.Image.fromarray(images["r0", 0])
    assert larger.size == (second.width, second.height)
    smaller = np.asarray(larger.resize((side_px, side_px)), int)
    to_first, to_other = (np.abs(smaller - images[name, 0]).mean() for name in ("r1", "r2"))
    assert to_first < 0.5 * to_other


def mixed_requests():
    """Images with and without a second pass, some of which are of the size of another's second pass."""
    names = ["euler", "euler-a", "pndm", "heun", "unipc", "ddim"]
    sizes = [{}, {"width": 64, "height": 48}]
    return [
        make_request(k, None if k in (1, 3) else SECOND, scheduler=names[k], n=1 + (k == 2), **sizes[k in (3, 5)])
        for k in range(6)
    ]


def test_images_in_a_batch_with_others_in_any_pass_are_those_alone(tiny):
    assert_as_alone(tiny[1], mixed_requests(), [(5 * k) % 7 for k in range(6)])


@pytest.mark.parametrize("call", [3, 5, 7])
def test_an_image_that_moves_or_is_evicted_in_either_pass_stays_the_same(tiny, call):
    """The second pass begins with call 5."""
    request = make_request(1, scheduler="euler-a")
    undisturbed = generate(tiny[1], [request])["r1", 0]
    assert difference(moved_image(tiny[1], request, call), undisturbed) <= NATURAL_TOLERANCE
    assert difference(evicted_image(tiny[1], request, call), undisturbed) <= NATURAL_TOLERANCE


@pytest.mark.parametrize("upscaler", ["bilinear", "bilinear antialiased", "bicubic", "nearest", "nearest-exact"])
def test_latents_of_other_proportions_are_cut_on_both_sides(upscaler):
    latents = torch.arange(8.0).expand(4, 6, 8)
    assert torch.equal(enlarge(latents, (6, 8), upscaler), latents)
    wide = enlarge(latents, (12, 8), upscaler)
    assert wide.shape == (4, 12, 8)
    assert torch.allclose(wide.mean(), latents.mean())
    assert 1.5 < wide.min() < wide.max() < 5.5


def test_a_request_with_a_start_image_has_no_second_pass(tiny):
    with pytest.raises(InvalidField, match="second_pass: start images and reference images have none"):
        tiny[1].prepare(make_request(1, strength=0.5), memoryview(bytes(3 * 32 * 24)))


def test_running_out_of_memory_at_its_beginning_changes_no_image(tiny, monkeypatch):
    executor, request = tiny[1], make_request(1, scheduler="euler-a")
    undisturbed = generate(executor, [request])["r1", 0]
    failures = iter([True])
    original = type(executor._noise).second_passes

    def second_passes(self, steps, *others):
        for each in original(self, steps, *others):
            yield each
            if next(failures, False):
                raise torch.OutOfMemoryError("out of memory")

    # Beside it, so that it can be planned again in a smaller batch.
    monkeypatch.setattr(type(executor._noise), "second_passes", second_passes)
    images = generate(executor, [request, make_request(3, None, scheduler="euler-a")])
    assert next(failures, None) is None
    assert difference(images["r1", 0], undisturbed) <= NATURAL_TOLERANCE
