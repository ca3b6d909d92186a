"""Start images and masks in the running batch, compared with diffusers' pipelines for them and with images alone."""

import gc
import time

import msgspec
import numpy as np
import pytest
import torch

import tiny_models
from generating import (
    NATURAL_TOLERANCE,
    PARITY_TOLERANCE,
    assert_as_alone,
    difference,
    generate,
    load,
    loop_of,
    run,
)
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.input_images.masked_images import MaskedImages
from noria.engine.diffusion.input_images.start_latents import StartLatents
from noria.engine.loop import RequestEnded, StepLoop
from noria.errors import InvalidField, QueueFull
from noria.protocol.diffusion import min_strength
from noria.sampling.noise import NoiseStream
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import ItemId
from pipelines import run_pipeline, set_scheduler
from start_images import (
    SCHEDULERS,
    frame,
    generate_all,
    generate_with_pipeline,
    make_request,
    open_pipelines,
    start_pixels,
)


@pytest.fixture(scope="module")
def served(request):
    spec, executor = load(request.getfixturevalue(request.param))
    return spec, executor, open_pipelines(spec)


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load(tiny_folder)


# All take more than a minute; these stand for one call and two a step, with noise and with a history.
FAST = ("pndm", "heun", "dpm++2m-sde")
CASES = [
    pytest.param(folder, name, marks=() if name in FAST else pytest.mark.slow)
    for folder in ("tiny_folder", "tiny_xl_folder")
    for name in (SCHEDULERS if folder == "tiny_folder" else FAST)
]


@pytest.mark.parametrize(("served", "name"), CASES, indirect=["served"])
def test_each_scheduler_gives_the_images_of_the_pipelines(served, name):
    _, executor, pipelines = served
    requests = [
        make_request(number, strength=strength, scheduler=name, has_mask=has_mask)
        for number, (strength, has_mask) in enumerate(
            [(0.3, False), (0.75, True), (1.0, False), (0.75, False), (1, True)]
        )
    ]
    images = generate_all(executor, requests)
    for request in requests:
        theirs = generate_with_pipeline(pipelines, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def mixed_requests():
    names = ["ddim", "euler-a", "dpm++2m-karras", "pndm", "heun", "unipc", "lcm", "kdpm2"]
    return [
        make_request(
            k,
            scheduler=names[k % 8],
            inference_steps=4 + k % 3,
            strength=[None, 0.5, 0.8, 1.0][k % 4],
            has_mask=k % 4 == 2 or k == 7,
            n=1 + (k == 2),
        )
        for k in range(8)
    ]


def test_an_image_alone_equals_the_image_in_a_batch_of_images_with_and_without_start_images(tiny):
    assert_as_alone(tiny[1], mixed_requests(), [(5 * k) % 9 for k in range(8)], frame)


def test_image_k_of_a_request_begins_with_the_draws_of_seed_plus_k(tiny):
    _, executor = tiny
    for has_mask in (False, True):
        many = generate_all(executor, [make_request(1, n=2, strength=0.6, has_mask=has_mask, scheduler="ddpm")])
        assert difference(many["r1", 0], many["r1", 1]) > 10
        for k in range(2):
            one = make_request(1, seed=501 + k, strength=0.6, has_mask=has_mask, scheduler="ddpm")
            assert difference(generate_all(executor, [one])["r1", 0], many["r1", k]) <= NATURAL_TOLERANCE


def test_a_vae_without_a_distribution_draws_nothing(bundled_folder):
    spec, executor = load(bundled_folder)
    size = {"width": spec.default_width_px, "height": spec.default_height_px}
    requests = [make_request(k, strength=0.6, has_mask=k == 1, scheduler="ddim", **size) for k in range(2)]
    ours = generate_all(executor, requests)
    for request in requests:
        theirs = generate_with_pipeline(open_pipelines(spec), request)
        assert difference(ours[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_latents_with_mean_and_deviation_are_encoded_as_they_are_decoded(tmp_path):
    statistics = {"latents_mean": [-1.6, 1.2, 0.4, -2.6], "latents_std": [8.4, 5.9, 5.3, 4.8]}
    spec, executor = load(tiny_models.save_stable_diffusion_xl(tmp_path, vae=statistics))
    request = make_request(1, strength=0.6, scheduler="euler")
    ours = generate_all(executor, [request])["r1", 0]
    assert difference(ours, generate_with_pipeline(open_pipelines(spec), request)) <= PARITY_TOLERANCE
    # diffusers' pipeline for masks leaves mean and deviation out when it encodes, and has other colours there.
    kept = make_request(2, strength=0.6, scheduler="euler", has_mask=True)
    pixels, nothing_repainted = start_pixels(48, 32), np.zeros((32, 48), np.uint8)
    data = memoryview(pixels.tobytes() + nothing_repainted.tobytes())
    with torch.inference_mode():
        encoded = executor.model.encode(torch.from_numpy(pixels)[None])
        draw = torch.randn(encoded.mean_BCHW.shape, generator=torch.Generator().manual_seed(502))
        (expected,) = executor.model.decode(encoded.mean_BCHW + encoded.deviation_BCHW * draw).numpy()
    assert difference(generate(executor, [kept], None, {"r2": data})["r2", 0], expected) <= NATURAL_TOLERANCE


def test_a_repainted_part_begins_with_noise_or_with_nothing_and_the_rest_as_the_image(tiny):
    _, executor = tiny
    first = {}
    for fill in (None, "noise", "nothing"):
        request = make_request(1, strength=0.5, has_mask=True, scheduler="ddim", mask_fill=fill)
        prepared = executor.prepare(request, frame(request))
        StartLatents.encode([prepared.start], executor.model, None)
        stream = NoiseStream(501, prepared.latent_shape, torch.float32)
        first[fill] = MaskedImages(executor.model).begin(ItemId("r1", 0), prepared, stream)
    stream = NoiseStream(501, prepared.latent_shape, torch.float32)
    stream.of_start_image(torch.float32)
    noise, repainted = stream.initial(), torch.from_numpy(prepared.start.repainted_MHW[0])
    of_image, of_noise = map(float, prepared.table.image_weights[0])
    for fill, weight in (("noise", of_image + of_noise), ("nothing", of_noise)):
        torch.testing.assert_close(first[fill][:, repainted], weight * noise[:, repainted])
        assert torch.equal(first[fill][:, ~repainted], first[None][:, ~repainted])


def test_latents_of_an_image_of_another_size_are_stretched(tiny):
    """They are sampled in their own size, as in A1111's img2img with a latent upscale."""
    spec, executor = tiny
    requests = [
        make_request(k, strength=0.6, scheduler="euler-a", start_px=size) for k, size in ((1, (32, 40)), (2, (64, 16)))
    ]
    frames = {
        request.request_id: memoryview(start_pixels(*request.payload.start_px, seed=k).tobytes())
        for k, request in enumerate(requests)
    }
    together = generate(executor, [*requests, make_request(3, strength=None)], frames=frames)
    of_image, _ = open_pipelines(spec)
    for k, request in enumerate(requests):
        payload, generator = request.payload, torch.Generator("cpu").manual_seed(request.payload.seed)
        set_scheduler(of_image, request, clip_sample=False, steps_offset=1)
        with torch.inference_mode():
            encoded = executor.model.encode(torch.from_numpy(start_pixels(*payload.start_px, seed=k))[None])
            drawn = torch.randn(encoded.mean_BCHW.shape, generator=generator)
            latents = encoded.mean_BCHW + encoded.deviation_BCHW * drawn
            larger = torch.nn.functional.interpolate(latents, (8, 12), mode="bilinear")
        own = {"width": None, "height": None, "generator": generator}
        theirs = run_pipeline(of_image, request, image=larger, strength=payload.strength, **own)
        assert difference(together[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_running_out_of_memory_changes_no_image(tiny, monkeypatch):
    _, executor = tiny
    requests = mixed_requests()
    undisturbed = generate_all(executor, requests)
    encode, predict, num_encoded = executor.model.encode, executor.model.predict, [0]

    def limited_encode(pixels_BHW3):
        if len(pixels_BHW3) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        num_encoded[0] += len(pixels_BHW3)
        return encode(pixels_BHW3)

    def limited_predict(latents_RCHW, *others):
        if len(latents_RCHW) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return predict(latents_RCHW, *others)

    with monkeypatch.context() as patch:
        patch.setattr(executor.model, "encode", limited_encode)
        patch.setattr(executor.model, "predict", limited_predict)
        constrained = generate_all(executor, requests)
    # Six requests have a start image, which is encoded once for all of their images.
    assert num_encoded == [6]
    for image, pixels in undisturbed.items():
        assert difference(constrained[image], pixels) <= NATURAL_TOLERANCE


def test_start_images_of_one_size_are_encoded_together_a_few_an_iteration(tiny, monkeypatch):
    _, executor = tiny
    encode, shapes = executor.model.encode, []
    monkeypatch.setattr(
        executor.model, "encode", lambda pixels: shapes.append(tuple(pixels.shape[:3])) or encode(pixels)
    )
    requests = [make_request(k, strength=0.5, width=64 if k == 6 else 48) for k in range(7)]
    loop = StepLoop(StepScheduler(8), executor, lambda _: None, time.monotonic)
    for request in requests:
        loop.submit(executor.prepare(request, frame(request)))
    iterations = [loop.run_iteration() for _ in range(4)]
    assert shapes == [(4, 32, 48), (2, 32, 48), (1, 32, 64)]
    assert [len(each.plan.joins) for each in iterations] == [4, 2, 1, 0]
    timings = [each.outcome.phase_timings for each in iterations]
    assert [each.seconds("encodes") > 0 for each in timings] == [True, True, True, False]
    costs = loop.scheduler.costs
    assert {key.width_px: set(curve.points) for key, curve in costs.image_encodes.items()} == {48: {2, 4}, 64: {1}}


def test_a_start_image_that_cannot_be_encoded_fails_no_image_beside_it(tiny, monkeypatch):
    _, executor = tiny
    monkeypatch.setattr(executor.model, "encode", lambda _: 1 / 0)
    loop, ends = loop_of(executor)
    for request in (make_request(1, strength=0.5, n=2), make_request(2, strength=None)):
        loop.submit(executor.prepare(request, frame(request)))
    run(loop)
    reasons = {each.prepared.request.request_id: each.event for each in ends if isinstance(each, RequestEnded)}
    assert {name: each.finish_reason.value for name, each in reasons.items()} == {"r1": "failed", "r2": "finished"}
    assert "division by zero" in reasons["r1"].message


def test_nothing_is_kept_of_what_has_ended(tiny):
    _, executor = tiny
    of_other_tests = set(executor._preparer._start_frames._alive)  # which logged exceptions may hold
    request = make_request(1, strength=0.8, has_mask=True, n=9)
    loop, events = loop_of(executor)
    loop.submit(executor.prepare(request, frame(request)))
    (start,) = set(executor._preparer._start_frames._alive) - of_other_tests
    assert start.waiting_bytes == 48 * 32 * 3
    loop.run_iteration()
    assert start.waiting_bytes == 0
    assert len(executor._masked_images._images) == 8
    while loop.scheduler.num_waiting:
        loop.run_iteration()
    assert len(executor._masked_images._images) == 1
    loop.cancel("r1")
    assert not executor._masked_images._images
    del start
    events.clear()
    gc.collect()
    assert set(executor._preparer._start_frames._alive) <= of_other_tests


@pytest.mark.parametrize(
    ("changes", "data", "field", "words"),
    [
        ({"strength": 0.5}, None, "image", "has 0 bytes, and not the 4608 of a start image of 48 × 32 pixels"),
        ({"strength": 0.5}, bytes(4607), "image", "has 4607 bytes"),
        ({"strength": 0.5, "has_mask": True}, bytes(4608), "image", "not the 6144 of a start image and a mask"),
        ({"strength": 0.5}, bytes(6144), "image", "has 6144 bytes"),
        ({"strength": None}, bytes(4608), "data", "4608 bytes, and not the 0 of no image"),
        ({"strength": None, "has_mask": True}, None, "mask", "needs a start image"),
        ({"strength": 0.0}, bytes(4608), "strength", "above 0"),
        ({"strength": 1.5}, bytes(4608), "strength", "at most 1, got 1.5"),
        ({"strength": float("nan")}, bytes(4608), "strength", "got nan"),
        ({"strength": 0.14}, bytes(4608), "strength", "none of 5 inference_steps; at least 0.2"),
        ({"strength": 0.5, "scheduler": "ipndm"}, bytes(4608), "scheduler", "'ipndm' cannot begin with an image"),
        ({"strength": 0.5, "scheduler": "ipndm"}, bytes(4608), "scheduler", "ddim, ddpm, pndm"),
    ],
)
def test_a_start_image_that_does_not_fit_the_settings_is_rejected(tiny, changes, data, field, words):
    request = make_request(1, **changes)
    with pytest.raises(InvalidField, match=words) as rejected:
        tiny[1].prepare(request, None if data is None else memoryview(data))
    assert rejected.value.field == field


def test_the_least_strength_leaves_a_step():
    for steps in range(1, 1001):
        least = make_request(1, inference_steps=steps, strength=min_strength(steps)).payload
        assert least.first_step == steps - 1
        assert least.num_steps == 1


def test_the_pixels_of_a_request_that_has_moved_are_not_rejected(tiny, monkeypatch):
    executor = DiffusionExecutor(tiny[1].model, tiny[1].config)  # which holds no pixels of other tests
    request = make_request(1, strength=0.5)
    monkeypatch.setattr(executor._preparer._start_frames, "_max_waiting_bytes", 1)
    held = executor.prepare(request, frame(request))
    with pytest.raises(QueueFull):
        executor.prepare(request, frame(request))
    assert executor.prepare(msgspec.structs.replace(request, was_moved=True), frame(request)).start is not None
    del held


def test_a_sampler_is_compiled_for_each_first_step(tiny):
    _, executor = tiny
    whole, half = (make_request(1, strength=strength, inference_steps=13) for strength in (None, 0.5))
    assert not executor.is_compiled(whole)
    assert executor.prepare(whole).num_calls == 13
    assert executor.is_compiled(whole)
    assert not executor.is_compiled(half)
    assert executor.prepare(half, frame(half)).num_calls == 6
    assert executor.is_compiled(half)
    for rejected_at_once in ({"strength": 0.5, "scheduler": "ipndm"}, {"strength": float("nan")}, {"strength": 0.01}):
        assert executor.is_compiled(make_request(1, **rejected_at_once))
