"""The diffusion executor compared with diffusers' pipeline, and with itself alone and in mixed batches."""

import collections
import functools
import math
import time

import msgspec
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from hypothesis import example, given, settings
from hypothesis import strategies as st

import start_images
from generating import (
    NATURAL_TOLERANCE,
    PARITY_TOLERANCE,
    assert_as_alone,
    difference,
    generate,
    load,
    loop_of,
    resumed,
    run,
)
from lora_files import save_diffusers_lora
from noria.engine.diffusion import step_batch
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.image_conditioner import PromptEmbeddingCache
from noria.engine.diffusion.loading import warm_up
from noria.engine.diffusion.results import DecodedImage
from noria.engine.loop import PreviewReady, RequestHandedOver, ResultReady, StepLoop
from noria.errors import InvalidField, ModelError
from noria.images import scheduler_names
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.conditioning import Conditioning
from noria.protocol.diffusion import Lora
from noria.sampling.guidance import Guidance
from noria.sampling.previews import downscale
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import FinishReason
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def tiny(tiny_folder, request):
    return load(tiny_folder, request.param)


def make_request(spec, number, **fields):
    defaults = dict(  # noqa: C408 - reads as the call that it becomes
        request_id=f"r{number}",
        prompt=["a red circle", "a blue square above a green star", "", "a large ring at the top left"][number % 4],
        negative_prompt=["", "a black cross"][number % 2],
        seed=1000 + number,
        width=spec.default_width_px,
        height=spec.default_height_px,
        inference_steps=4,
        guidance_scale=4.0,
    )
    return make_image_request(**(defaults | fields))


@pytest.fixture(scope="module")
def pipeline(tiny_folder):
    return open_pipeline(StableDiffusionPipeline, tiny_folder, safety_checker=None)


def generate_with_pipeline(pipe, request):
    set_scheduler(pipe, request, clip_sample=False, steps_offset=1)
    return run_pipeline(pipe, request)


DIFFUSION_SCHEDULERS = [choice.name for choice in scheduler_names.SCHEDULERS if choice.family == "diffusion"]


def test_each_scheduler_gives_the_image_of_the_pipeline_in_a_batch_of_all(tiny, pipeline):
    spec, executor = tiny
    requests = [
        make_request(spec, k, scheduler=name, inference_steps=6, guidance_scale=[5.0, 1.0][k % 2])
        for k, name in enumerate(DIFFUSION_SCHEDULERS)
    ]
    images = generate(executor, requests)
    pipe = pipeline.to(executor.model.device)
    for request in requests:
        theirs = generate_with_pipeline(pipe, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def mixed_requests(spec):
    names = ["ddim", "euler", "euler-a", "dpm++2m-karras", "pndm", "heun", "unipc", "lms"]
    return [
        make_request(spec, k, scheduler=names[k % 8], inference_steps=3 + k // 3, guidance_scale=1.0 + 11 * (k % 5) / 4)
        for k in range(10)
    ]


def varied_requests(lora):
    """Requests for all calls or a share of them, whose other settings differ, too."""
    names = ["ddim", "euler-karras", "dpm++2m", "unipc", "euler-a", "pndm"]  # the last two make all calls
    return [
        start_images.make_request(
            k,
            scheduler=names[k % 6],
            inference_steps=6 + k % 3,
            calls=1.0 if k % 6 > 3 else [0.5, 0.33, 1.0, 0.7, 0.4][k % 5],
            guidance_scale=1.0 + 11 * (k % 5) / 4,
            loras=(lora,) * (k % 3 == 0),
            strength=[None, 0.8, None, 0.7][k % 4],
            has_mask=k % 8 in (1, 7),
        )
        for k in range(12)
    ]


@pytest.fixture(scope="module", params=DEVICES)
def varied(tiny_folder, tmp_path_factory, request):
    """Two executors of one model whose calls have one number of rows, requests, and a function for each image alone."""
    folder = tmp_path_factory.mktemp("loras")
    _, first = load(tiny_folder, request.param, buckets=(8,), loras=(str(folder),))
    file = save_diffusers_lora(folder / "ink.safetensors", first.model.lora_parts, rank=2)
    requests = varied_requests(Lora("ink", 0.7, digest_of(file)))
    alone = functools.cache(lambda k: start_images.generate_all(first, [requests[k]])[f"r{k}", 0])
    for each in requests:
        num_calls = each.payload.num_steps + (each.payload.scheduler == "pndm")
        assert first.prepare(each, start_images.frame(each)).num_calls == num_calls
    return (first, DiffusionExecutor(first.model, first.config)), requests, alone


def generate_disturbed(executors, requests, num_slots):
    """The image of each request, by its id; `requests` are each with its arrival and when it moves, in iterations."""
    images, handed_over, iteration, ran = {}, [], 0, []

    def on_event(event):
        if isinstance(event, RequestHandedOver):
            handed_over.append(event)
        elif isinstance(event, ResultReady):
            payload = event.prepared.request.payload
            pixels = np.frombuffer(event.result.pixels.rgb(), np.uint8)
            images[event.prepared.request.request_id] = pixels.reshape(payload.height, payload.width, 3)

    loops = [StepLoop(StepScheduler(num_slots), executor, on_event, lambda: 0.0) for executor in executors]
    source, target = loops
    while iteration <= 14 or any(ran):
        for request, arrival, moves_at in requests:
            frame = start_images.frame(request)
            if iteration == arrival:
                source.submit(executors[0].prepare(request, frame))
            elif iteration == moves_at:
                source.hand_over(request.attempt_id)
                for event in handed_over:
                    target.submit(*resumed(executors[1], request, event, frame))
                handed_over.clear()
        ran = [loop.run_iteration() for loop in loops]
        iteration += 1
    return images


@given(
    st.lists(
        st.tuples(
            st.integers(0, 11), st.integers(0, 5), st.none() | st.integers(1, 14), st.sampled_from(["low", "high"])
        ),
        min_size=3,
        max_size=6,
        unique_by=lambda each: each[0],
    ),
    st.integers(1, 4),
)
@example(chosen=[(0, 0, None, "low"), (1, 0, 1, "low"), (3, 0, None, "low")], num_slots=2)  # 1, then all have the LoRA
@settings(max_examples=4)
def test_an_image_is_that_alone_whatever_else_runs_is_evicted_and_moves(varied, chosen, num_slots):
    executors, requests, alone = varied
    disturbed = [
        (msgspec.structs.replace(requests[number], priority=priority), arrival, moves_at)
        for number, arrival, moves_at, priority in chosen
    ]
    expected = {f"r{number}": alone(number) for number, *_ in chosen}  # first, so that nothing wrong is in a cache
    images = generate_disturbed(executors, disturbed, num_slots)
    assert images.keys() == expected.keys()
    for name, image in expected.items():
        assert np.array_equal(images[name], image), name


def test_with_one_bucket_guidance_combines_one_number_of_images(tiny, monkeypatch):
    """A GPU sums the norms of another number of images in another order."""
    spec, executor = tiny
    real, combined = Guidance.combine, []

    def combine(self, cond_BCHW, uncond_BCHW, scale_B):
        combined.append((len(cond_BCHW), len(uncond_BCHW), len(scale_B)))
        return real(self, cond_BCHW, uncond_BCHW, scale_B)

    monkeypatch.setattr(Guidance, "combine", combine)
    config = msgspec.structs.replace(executor.config, buckets=(8,))
    requests = [make_request(spec, number) for number in range(3)]
    assert_as_alone(DiffusionExecutor(executor.model, config), requests, [0, 2, 3], tolerance=0)
    assert {*combined} == {(8, 8, 8)}


def test_an_image_alone_equals_the_image_in_a_mixed_staggered_batch(tiny):
    spec, executor = tiny
    assert_as_alone(executor, mixed_requests(spec), [(7 * k) % 11 for k in range(10)])


def test_a_model_gets_the_same_rows_of_every_tensor_it_is_conditioned_on(tiny, monkeypatch):
    spec, executor = tiny
    model, rows, checksum = executor.model, [], lambda text: text.double().sum(dim=(-2, -1))
    real_text_encode, real_predict = model.text_encode, model.predict

    def text_encode(prompts):
        encoded = [each.tokens for each in real_text_encode(prompts)]
        return [Conditioning(each, {"checksum": checksum(each["encoder_hidden_states"])}) for each in encoded]

    def predict(latents_RCHW, timesteps_R, conditioning, guidance_R):
        expected = checksum(conditioning.tokens["encoder_hidden_states"])
        torch.testing.assert_close(conditioning.vectors["checksum"], expected)
        rows.append(len(latents_RCHW))
        return real_predict(latents_RCHW, timesteps_R, conditioning, guidance_R)

    for name, value in {"text_encode": text_encode, "predict": predict}.items():
        monkeypatch.setattr(model, name, value)
    requests = [make_request(spec, number, guidance_scale=float(number)) for number in range(5)]
    generate(DiffusionExecutor(model, executor.config), requests, arrivals=[0, 0, 1, 3, 9])
    assert len(set(rows)) > 2


def test_image_k_of_a_request_is_the_image_of_seed_plus_k(tiny):
    spec, executor = tiny
    many = generate(executor, [make_request(spec, 1, n=3, scheduler="euler-a")])
    for k in range(3):
        one = generate(executor, [make_request(spec, 1, seed=1001 + k, scheduler="euler-a")])["r1", 0]
        assert difference(many["r1", k], one) <= NATURAL_TOLERANCE


def test_images_of_several_sizes_run_together(tiny):
    spec, executor = tiny
    requests = [make_request(spec, 1), make_request(spec, 2, width=48), make_request(spec, 3, height=64)]
    images = assert_as_alone(executor, requests)
    assert [images[each.request_id, 0].shape for each in requests] == [(32, 32, 3), (32, 48, 3), (64, 32, 3)]


@pytest.fixture(scope="module")
def bundled(bundled_folder):
    return *load(bundled_folder), open_pipeline(StableDiffusionPipeline, bundled_folder, safety_checker=None)


@pytest.mark.parametrize("name", ["euler-a", "unipc"])  # the tiny model has all
def test_the_bundled_model_gives_the_image_of_its_pipeline(bundled, name):
    spec, executor, pipe = bundled
    request = make_request(spec, 1, prompt="a red circle above a blue square", scheduler=name, inference_steps=6)
    ours = generate(executor, [request])[request.request_id, 0]
    assert difference(ours, generate_with_pipeline(pipe, request)) <= PARITY_TOLERANCE
    assert ours.std() > 10, "the image is flat"


def test_latents_that_overflow_fail_their_request_alone(tiny):
    spec, executor = tiny
    from noria.errors import GenerationFailed

    failures = []

    def on_event(event):
        if isinstance(event, ResultReady):
            try:
                event.result.pixels.rgb()
            except GenerationFailed as error:
                failures.append((event.prepared.request.request_id, str(error)))

    loop = StepLoop(StepScheduler(8), executor, on_event, lambda: 0.0)
    for number in (1, 2):
        loop.submit(executor.prepare(make_request(spec, number, inference_steps=3)))
    loop.run_iteration()
    with torch.inference_mode():
        executor._latents.of(executor._requests["r1"].latent_shape)[0] = math.nan
    run(loop)
    assert [name for name, _ in failures] == ["r1"]
    assert "not finite" in failures[0][1]
    later = generate(executor, [make_request(spec, 5)])  # joins in the slot that held the NaN
    assert difference(later["r5", 0], generate(executor, [make_request(spec, 5)])["r5", 0]) == 0


def test_a_model_that_raises_fails_the_request_and_not_the_engine(tiny, monkeypatch):
    spec, executor = tiny
    loop, ends = loop_of(executor)
    loop.submit(executor.prepare(make_request(spec, 1)))

    def broken(*_):
        raise RuntimeError("a tensor of another shape")

    with monkeypatch.context() as patch:
        patch.setattr(executor.model, "predict", broken)
        loop.run_iteration()
    assert (ends[-1].event.finish_reason, "another shape" in ends[-1].event.message) == (FinishReason.FAILED, True)
    assert not executor._requests
    generate(executor, [make_request(spec, 2)])


@pytest.mark.parametrize("attention", ["plain", "sliced"])
def test_every_kind_of_attention_gives_the_same_image(tiny, tiny_folder, attention):
    spec, executor = tiny
    other = load(
        tiny_folder, str(executor.model.device), attention=attention, channels_last=False, inference_mode=False
    )[1]
    request = make_request(spec, 1)
    assert difference(generate(executor, [request])["r1", 0], generate(other, [request])["r1", 0]) <= NATURAL_TOLERANCE


class _Panic(BaseException):
    """An error such as `tokenizers` raises where Rust panics."""


@pytest.mark.parametrize("error", [IndexError, _Panic])
def test_an_error_of_the_tokenizer_fails_only_the_joining_request(tiny, monkeypatch, error):
    spec, executor = tiny
    ends = {}
    loop = StepLoop(StepScheduler(8), executor, lambda e: ends.update({e.prepared.request.request_id: e}), lambda: 0.0)
    loop.submit(executor.prepare(make_request(spec, 1)))
    loop.run_iteration()

    def index_error(_):
        raise error("index out of range in self")

    with monkeypatch.context() as patch:
        patch.setattr(executor.conditioner._embeddings, "_text_encode", index_error)
        loop.submit(executor.prepare(make_request(spec, 2, prompt="never seen before")))
        loop.run_iteration()
    run(loop)
    assert (ends["r2"].event.finish_reason, "out of range" in ends["r2"].event.message) == (FinishReason.FAILED, True)
    assert ends["r1"].event.finish_reason is FinishReason.FINISHED


def test_a_model_that_cannot_generate_raises_at_warm_up(tiny, monkeypatch):
    spec, executor = tiny

    def broken(*_):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(executor.model, "predict", broken)
    with pytest.raises(ModelError, match="no kernel image"):
        warm_up(executor, spec, executor.config)


def test_weights_without_all_parameters_are_rejected(tiny_folder, tmp_path):
    import shutil

    import safetensors.torch

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["decoder.conv_norm_out.weight"]
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(ModelError, match=r"vae do not match its configuration: 1 parameters.*decoder\.conv_norm_out"):
        load(folder)


@pytest.mark.parametrize(("n", "data", "field"), [(16 + 256 + 1, None, "n"), (1, b"", "data")])
def test_a_request_that_can_never_be_served_is_rejected(bundled, n, data, field):
    spec, executor, _ = bundled
    with pytest.raises(InvalidField) as rejected:
        executor.prepare(make_request(spec, 0, n=n), data)
    assert rejected.value.field == field


def previews_and_images(spec, executor, requests):
    """The previews [(call, [h, w, 3])] of each image, by its request's id, and its pixels [H, W, 3]."""
    previews, images = collections.defaultdict(list), {}

    def on_event(event):
        request_id = event.prepared.request.request_id
        match event:
            case PreviewReady(preview=preview):
                rgb = np.frombuffer(preview.pixels.rgb(), np.uint8).reshape(preview.height_px, preview.width_px, 3)
                previews[request_id].append((preview.call, rgb))
            case ResultReady(result=DecodedImage(pixels=pixels)):
                images[request_id] = np.frombuffer(pixels.rgb(), np.uint8).reshape(spec.default_height_px, -1, 3)

    loop = StepLoop(StepScheduler(8), executor, on_event, lambda: 0.0)
    for request in requests:
        loop.submit(executor.prepare(request))
    run(loop)
    return previews, images


def test_a_late_preview_resembles_the_image_with_every_kind_of_sampler(bundled):
    spec, executor, _ = bundled
    fields = {"partial_images": 3, "inference_steps": 16, "guidance_scale": 3.0, "prompt": "a red circle", "seed": 1001}
    names = ["ddim", "euler", "dpm++2m", "heun", "lcm", "unipc"]
    requests = [make_request(spec, 2 * k + 1, scheduler=name, **fields) for k, name in enumerate(names)]
    previews, images = previews_and_images(spec, executor, requests)
    scale = executor.model.latent_scale
    for request in requests:
        of_image, image = previews[request.request_id], images[request.request_id]
        calls = executor.prepare(request).num_calls
        assert [call for call, _ in of_image] == [calls * k // 4 for k in (1, 2, 3)]
        blocks = image.reshape(image.shape[0] // scale, scale, -1, scale, 3).mean(axis=(1, 3))
        error = np.abs(of_image[-1][1].astype(float) - blocks).mean() / 255
        # The last of three previews, after three quarters of the calls. A linear map of this model's latents misses a
        # block's mean color by about 3 %.
        assert error < 0.06, request
        grey = np.abs(np.full_like(blocks, blocks.mean()) - blocks).mean() / 255
        assert grey > 2 * error, request  # a plain grey would be worse


def test_a_thumbnail_is_the_preview_of_the_same_call_and_changes_no_image(bundled):
    spec, executor, _ = bundled
    requests = [make_request(spec, number, partial_images=2, inference_steps=6) for number in range(2)]
    undisturbed = generate(executor, requests)
    previews, thumbnails, images = {}, {}, {}

    def on_event(event):
        request_id = event.prepared.request.request_id
        match event:
            case PreviewReady(preview=preview):
                previews[request_id, preview.call] = (preview.width_px, preview.height_px, bytes(preview.pixels.rgb()))
            case ResultReady(result=DecodedImage(pixels=pixels)):
                images[request_id] = np.frombuffer(pixels.rgb(), np.uint8)

    loop = StepLoop(StepScheduler(8), executor, on_event, lambda: 0.0, lambda _plan: True)
    for each in requests:
        loop.submit(executor.prepare(each))
    while (iteration := loop.run_iteration()) is not None:
        for thumbnail in iteration.thumbnails:
            key = thumbnail.image.attempt_id, thumbnail.call
            thumbnails[key] = (thumbnail.width_px, thumbnail.height_px, bytes(thumbnail.pixels.rgb()))
    assert set(thumbnails) == {(each.request_id, call) for each in requests for call in range(6)}
    assert len(previews) == 4
    assert previews == {key: thumbnails[key] for key in previews}
    for (request_id, _), pixels in undisturbed.items():
        assert np.array_equal(pixels.reshape(-1), images[request_id])


def test_a_thumbnail_of_a_large_image_is_small(bundled):
    spec, executor, _ = bundled
    side_px = 72 * executor.model.latent_scale
    loop = StepLoop(StepScheduler(8), executor, lambda _: None, lambda: 0.0, lambda _plan: True)
    loop.submit(executor.prepare(make_request(spec, 0, inference_steps=1, width=side_px, height=side_px // 9)))
    (thumbnail,) = loop.run_iteration().thumbnails
    assert (thumbnail.width_px, thumbnail.height_px) == (36, 4)
    assert len(thumbnail.pixels.rgb()) == 36 * 4 * 3


def test_downscaling_averages_blocks():
    latents = torch.arange(2 * 130 * 64, dtype=torch.float32).reshape(1, 2, 130, 64)
    small = downscale(latents, 64)
    assert small.shape == (1, 2, 44, 22)
    assert small[0, 1, 0, 0] == latents[0, 1, :3, :3].mean()
    assert small[0, 0, 43, 21] == latents[0, 0, 129:, 63:].mean()  # the remainder
    assert downscale(latents, 130) is latents


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class LimitedMemory:
    """Wraps a model's method and raises what torch raises on a full device for more than `rows` rows."""

    def __init__(self, call, rows, error=FULL):
        self.call, self.rows, self.error = call, rows, error

    def __call__(self, first, *rest):
        if len(first) > self.rows:
            raise self.error
        return self.call(first, *rest)


@pytest.mark.parametrize(
    ("method", "rows"), [("predict", 4), ("predict", 2), ("decode", 1), ("text_encode", 2)], ids=str
)
def test_running_out_of_memory_changes_no_image(tiny, monkeypatch, method, rows):
    spec, executor = tiny
    requests = [make_request(spec, k, scheduler=name) for k, name in enumerate(["euler-a", "ddpm", "lcm", "dpm++2m"])]
    undisturbed = generate(executor, requests)
    with monkeypatch.context() as patch:
        patch.setattr(executor.model, method, LimitedMemory(getattr(executor.model, method), rows))
        patch.setattr(executor.conditioner, "_embeddings", PromptEmbeddingCache(executor.model.text_encode, 0, None))
        constrained = generate(executor, requests)
    for image, pixels in undisturbed.items():
        assert difference(constrained[image], pixels) <= NATURAL_TOLERANCE


def test_a_preview_is_sent_once_although_its_step_was_repeated(bundled, monkeypatch):
    spec, executor, _ = bundled
    real, calls = step_batch.next_samples, []

    def next_samples(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*arguments)

    monkeypatch.setattr(step_batch, "next_samples", next_samples)
    loop, events = loop_of(executor)
    for number in range(2):
        loop.submit(executor.prepare(make_request(spec, number, partial_images=3, inference_steps=8)))
    run(loop)
    previews = [
        (event.preview.image.attempt_id, event.preview.call) for event in events if isinstance(event, PreviewReady)
    ]
    assert sorted(previews) == [(name, call) for name in ("r0", "r1") for call in (2, 4, 6)]


class HostEvent:
    """A CUDA event of a device that executes at once."""

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        assert self.at

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def test_work_that_the_loop_does_not_wait_for_is_timed_by_the_device(tiny, monkeypatch):
    spec, executor = tiny
    monkeypatch.setattr(executor, "is_synchronous", False)
    if executor.model.device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    events = []
    loop = StepLoop(StepScheduler(8), executor, events.append, time.monotonic)
    loop.submit(executor.prepare(make_request(spec, 1, inference_steps=3)))
    device_timings = []
    while (iteration := loop.run_iteration()) is not None:
        device_timings.append(iteration.outcome.phase_timings)
    assert not any(timings.is_known for timings in device_timings)
    assert [timings.seconds("joins") > 0 for timings in device_timings] == [True, False, False]
    assert [timings.seconds("steps") > 0 for timings in device_timings] == [True, True, True]
    assert [timings.seconds("decodes") > 0 for timings in device_timings] == [False, False, True]
    request_timings = events[-1].event.timings
    assert (request_timings.join_timings, request_timings.decode_timings) == (device_timings[0], device_timings[-1])
