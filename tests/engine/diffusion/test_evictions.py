"""Images whose slots others take: they go on in other slots, and are the same in every bit."""

import msgspec
import numpy as np
import pytest
import torch

import tiny_models
from generating import evicted_image, generate, load, loop_of, resumed, run
from lora_files import save_diffusers_lora
from noria.engine.diffusion import executor as executor_module
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.image_state import BegunImage
from noria.engine.loop import RequestEnded, RequestHandedOver, ResultReady
from noria.models.adapters.lora_folders import digest_of
from noria.protocol.diffusion import Control, Lora
from noria.scheduling.types import FinishReason
from noria.testing.requests import make_image_request

# One bucket: so an image is the same in every bit with others in its calls and without.
SETTINGS = {"slots": 2, "buckets": (4,)}
NUM_STEPS = 5


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load(tiny_folder, **SETTINGS)[1]


def make_request(name="r", **fields):
    settings = {"prompt": "a red circle", "seed": 5, "width": 32, "height": 32, "inference_steps": NUM_STEPS}
    return make_image_request(name, **{"guidance_scale": 3.0} | settings | fields)


def frame_of(*shapes):
    """Random pixels of start images, masks and control images."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, shape, np.uint8) if len(shape) == 3 else half_mask(shape) for shape in shapes]
    return memoryview(b"".join(part.tobytes() for part in parts))


def half_mask(shape):
    mask = np.zeros(shape, np.uint8)
    mask[shape[0] // 2 :] = 255
    return mask


def assert_same(executor, request, call, frame=None):
    undisturbed = generate(executor, [request], frames={request.request_id: frame})[request.request_id, 0]
    assert np.array_equal(evicted_image(executor, request, call, frame), undisturbed)
    assert executor._evicted == executor._masked_images._images == executor._masked_images._inputs == {}


@pytest.mark.parametrize(
    ("scheduler", "call"),
    [("dpm++2m-sde", 3), ("heun", 4), ("lcm", 1), ("lms", 4), ("pndm", 4)],  # UniPC: below, in another engine
)
def test_an_image_that_was_evicted_is_that_of_an_undisturbed_run_bit_by_bit(tiny, scheduler, call):
    assert_same(tiny, make_request(scheduler=scheduler), call)


def test_so_is_one_without_guidance(tiny):
    assert_same(tiny, make_request(guidance_scale=1.0), 3)


def test_so_is_one_with_a_lora(tiny_folder, tmp_path):
    _, executor = load(tiny_folder, **SETTINGS, loras=(str(tmp_path),))
    file = save_diffusers_lora(tmp_path / "ink.safetensors", executor.model.lora_parts, rank=2)
    assert_same(executor, make_request(loras=(Lora("ink", 0.7, digest_of(file)),)), 3)


@pytest.mark.parametrize("has_mask", [False, True])
def test_so_is_one_with_a_start_image(tiny, has_mask):
    frame = frame_of((32, 32, 3), *[(32, 32)] * has_mask)
    assert_same(tiny, make_request(strength=0.9, has_mask=has_mask, scheduler="euler-a"), 2, frame)


def test_so_is_one_of_a_model_for_inpainting(tmp_path):
    unet = tiny_models.INPAINTING_UNET
    folder = tiny_models.save_stable_diffusion(tmp_path, unet=unet, pipeline="StableDiffusionInpaintPipeline")
    _, executor = load(folder, **SETTINGS)
    assert_same(executor, make_request(strength=1.0, has_mask=True), 2, frame_of((32, 32, 3), (32, 32)))


def test_so_is_one_that_a_controlnet_steers(tiny_folder, tmp_path):
    controlnet = tiny_models.save_controlnet(tmp_path / "edges", tiny_folder)
    _, executor = load(tiny_folder, **SETTINGS, controlnets=(str(controlnet),))
    assert_same(executor, make_request(controls=(Control("edges"),)), 2, frame_of((32, 32, 3)))


def evicted(executor, request, call):
    """A loop in which a request is evicted at `call`, and its events; the other slot has an image with more steps."""
    loop, events = loop_of(executor, num_slots=2)
    loop.submit(executor.prepare(make_request("long", seed=8, inference_steps=3 * NUM_STEPS)))
    loop.submit(executor.prepare(msgspec.structs.replace(request, priority="low")))
    for _ in range(call):
        loop.run_iteration()
    loop.submit(executor.prepare(make_request("urgent", seed=9, priority="high")))
    return loop, events


def end(loop):
    """Cancel all but `r`."""
    for name in ("long", "urgent"):
        loop.cancel(name)


def pixels_of(events):
    """The pixels of `r`."""
    (ready,) = [each for each in events if isinstance(each, ResultReady) and each.prepared.request.request_id == "r"]
    return np.frombuffer(ready.result.pixels.rgb(), np.uint8)


def test_an_evicted_image_goes_on_in_another_engine(tiny):
    request = make_request(scheduler="unipc")
    loop, events = evicted(tiny, request, 4)
    loop.run_iteration()
    assert list(tiny._evicted) == [("r", 0)]
    loop.hand_over("r")
    assert not tiny._evicted
    end(loop)
    (handed_over,) = [event for event in events if isinstance(event, RequestHandedOver)]
    target, events = loop_of(DiffusionExecutor(tiny.model, tiny.config))
    target.submit(*resumed(target._executor, request, handed_over))
    run(target)
    assert np.array_equal(pixels_of(events), generate(tiny, [request])["r", 0].ravel())


def test_the_state_of_a_cancelled_image_is_dropped(tiny):
    loop, _ = evicted(tiny, make_request(), 2)
    loop.run_iteration()
    assert tiny._evicted
    loop.cancel("r")
    assert not tiny._evicted
    end(loop)


@pytest.mark.parametrize(("phase", "place", "name"), [
    ("evictions", executor_module, "save_image"), ("joins", BegunImage, "write")
])  # fmt: skip
def test_running_out_of_memory_changes_no_image(tiny, phase, place, name, monkeypatch):
    """Neither when an image is evicted, nor when it returns."""
    request = make_request(scheduler="pndm")
    undisturbed = generate(tiny, [request])["r", 0]
    function, calls = getattr(place, name), []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*arguments)

    monkeypatch.setattr(place, name, fail_once)
    loop, events = evicted(tiny, request, 3)
    oom_phases = []
    while (iteration := loop.run_iteration()) is not None:
        oom_phases.append(iteration.outcome.oom_phase)
    assert [each for each in oom_phases if each] == [phase]
    assert len(calls) == (1 if phase == "evictions" else 2)
    ended = {event.event.attempt_id: event.event.finish_reason for event in events if isinstance(event, RequestEnded)}
    assert ended == dict.fromkeys(["long", "r", "urgent"], FinishReason.FINISHED)
    assert np.array_equal(pixels_of(events), undisturbed.ravel())
