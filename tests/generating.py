"""Images from an executor's own loop, without a server."""

import msgspec
import numpy as np
import pytest
import torch

from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.loop import RequestEnded, RequestHandedOver, ResultReady, StepLoop
from noria.engine.resumption import read_resumption
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.models.diffusion.conditioning import collate
from noria.models.families import FAMILIES
from noria.protocol.diffusion import Lora
from noria.protocol.messages import Resume
from noria.sampling import previews
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import FinishReason, ItemId

# One step of uint8: kernels round differently at other batch sizes, so a value near a half may be rounded either way.
NATURAL_TOLERANCE = 1
# Against the pipelines, which also sum the terms of a step in another order, for at most 50 steps.
PARITY_TOLERANCE = 2
# Relative to the largest value, in float32: kernels round differently at other batch sizes, in 4 steps one on another.
LATENTS_TOLERANCE = 1e-5


def load(folder, device="cpu", **settings):
    """A folder's spec and executor, in float32 on one core, since other tests may use the others at the same time."""
    torch.set_num_threads(1)
    spec = open_model(str(folder))
    config = EngineConfig(**{"dtype": "float32", "slots": 8, "threads": 1} | settings)
    return spec, DiffusionExecutor(load_model(spec, config, device), config)


def load_model(spec, config, device="cpu"):
    """A model whose preview colours are fitted to few images, since to 24 takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(previews, "_NUM_EXAMPLES", 2)
        return FAMILIES[spec.family].load(spec, config, device)


def data_of(request, frames):
    """The data of a request; `frames` has it by request id, or makes it of a request."""
    return frames(request) if callable(frames) else (frames or {}).get(request.request_id)


def generate(executor, requests, arrivals=None, frames=None):
    """Images [height, width, 3] by (request id, index); request k is submitted before iteration `arrivals[k]`.

    `frames` are the requests' data, as `data_of` has it.
    """
    arrivals = arrivals or [0] * len(requests)
    images, ends = {}, {}

    def on_event(event):
        request = event.prepared.request
        if isinstance(event, ResultReady):
            pixels = np.frombuffer(event.result.pixels.rgb(), np.uint8)
            images[request.request_id, event.index] = pixels.reshape(*request.payload.result_px[::-1], 3)
        elif isinstance(event, RequestEnded):
            ends[request.request_id] = event.event

    loop = StepLoop(StepScheduler(8), executor, on_event, lambda: 0.0)
    waiting = sorted(zip(arrivals, requests, strict=True), key=lambda pair: pair[0])
    iteration = 0
    while waiting or loop.scheduler.num_running or loop.scheduler.num_waiting:
        while waiting and waiting[0][0] <= iteration:
            request = waiting.pop(0)[1]
            loop.submit(executor.prepare(request, data_of(request, frames)))
        loop.run_iteration()
        iteration += 1
    assert {end.finish_reason for end in ends.values()} == {FinishReason.FINISHED}, ends
    return images


def run(loop):
    """Run a loop until nothing is left to do."""
    while loop.run_iteration() is not None:
        pass


def assert_as_alone(executor, requests, arrivals=None, frames=None, *, tolerance=NATURAL_TOLERANCE):
    """Each image of a batch is as alone, within so many steps of uint8; return those of the batch, as `generate`."""
    together = generate(executor, requests, arrivals, frames)
    for request in requests:
        for image, alone in generate(executor, [request], frames=frames).items():
            assert difference(together[image], alone) <= tolerance, request
    return together


def assert_latents_as_alone(executor, requests, monkeypatch, arrivals=None, frames=None, tolerance=LATENTS_TOLERANCE):
    """Each image's latents of a batch are as alone; return those of the batch, as `final_latents`."""
    together = final_latents(executor, requests, monkeypatch, arrivals, frames)
    for request in requests:
        alone = final_latents(executor, [request], monkeypatch, frames=frames)[request.request_id]
        assert relative(together[request.request_id], alone) <= tolerance, request
    return together


def difference(a, b):
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def assert_rows_as_alone(denoiser, latents, times, texts, min_change=1e-3):
    """Each row of a call is as alone, and changes with the text of another row."""
    scales = torch.arange(len(texts), device=times.device) * 3.0 if denoiser.guidance.embedded else None
    together = denoiser.predict(latents, times, collate(texts), scales)
    for k in range(len(texts)):
        row, time, scale = latents[k][None], times[k : k + 1], None if scales is None else scales[k : k + 1]
        alone = denoiser.predict(row, time, collate(texts[k : k + 1]), scale)[0]
        assert together[k].shape == alone.shape
        assert (together[k] - alone).abs().max() <= 1e-5 * alone.abs().max()
        other = denoiser.predict(row, time, collate([texts[k - 1]]), scale)[0]
        assert (other - alone).abs().max() > min_change * alone.abs().max()


def assert_adapter_changes_its_image_alone(bare, make_request, folder, *endings):
    """An adapter of all layers that end so, written into `folder`, changes the images that name it, beside others.

    Returns the images of a batch, of which the second and the fourth name it.
    """
    save_diffusers_lora(folder / "all.safetensors", bare.model.lora_parts, *endings, rank=2)
    config = EngineConfig(dtype="float32", slots=8, threads=1, loras=(str(folder),))
    executor = DiffusionExecutor(bare.model, config)
    lora = Lora("all", 0.7, digest_of(folder / "all.safetensors"))
    requests = [make_request(k, loras=(lora,) * (k % 2)) for k in range(4)]
    together = assert_as_alone(executor, requests, [0, 2, 1, 0])
    bare_images = generate(bare, [make_request(k) for k in range(4)])
    for number, image in enumerate(bare_images):
        changed = difference(together[image], bare_images[image])
        assert changed > 5 if number % 2 else changed <= NATURAL_TOLERANCE
    return together


def final_latents(executor, requests, monkeypatch, arrivals=None, frames=None):
    """The latents of each request's image, from a batch of all."""
    return latents_and_images(executor, requests, monkeypatch, arrivals, frames)[0]


def latents_and_images(executor, requests, monkeypatch, arrivals=None, frames=None):
    """The latents of each request's last image, by its id, and all images, as `generate`, from one batch."""
    model_decode, found, executor_decode = executor.model.decode, {}, type(executor)._decode
    decoding = []  # assignments of the call that runs

    def decode(latents):
        for latent, assignment in zip(latents, decoding[-1], strict=False):
            found[assignment.image.attempt_id] = latent.clone()
        return model_decode(latents)

    def decode_images(self, assignments):
        decoding.append(assignments)
        executor_decode(self, assignments)

    with monkeypatch.context() as patch:
        patch.setattr(executor.model, "decode", decode)
        patch.setattr(type(executor), "_decode", decode_images)
        return found, generate(executor, requests, arrivals, frames)


def relative(left, right):
    return float((left - right).abs().max() / right.abs().max())


def moved_image(source, request, call, frame=None, company=(), goes_on_at=None):
    """The image [height, width, 3] of a request that moves to another executor at `call`; `company` runs there.

    `goes_on_at` is the first call there, by default the same.
    """
    source_loop, events = loop_of(source)
    source_loop.submit(source.prepare(request, frame))
    for _ in range(call):
        source_loop.run_iteration()
    source_loop.hand_over(request.attempt_id)
    (handed_over,) = [event for event in events if isinstance(event, RequestHandedOver)]
    assert source_loop.run_iteration() is None  # it has nothing left
    target = type(source)(source.model, source.config)
    target_loop, events = loop_of(target)
    for other in company:
        target_loop.submit(target.prepare(other))
        target_loop.run_iteration()
    steps = []
    target_loop.submit(*resumed(target, request, handed_over, frame))
    while (iteration := target_loop.run_iteration()) is not None:
        steps += [step.call for step in iteration.plan.steps if step.image.attempt_id == request.attempt_id]
    num_calls = handed_over.prepared.num_calls
    assert steps == list(range(call if goes_on_at is None else goes_on_at, num_calls))
    (ready,) = [each for each in events if isinstance(each, ResultReady) and each.prepared.request == request]
    return np.frombuffer(ready.result.pixels.rgb(), np.uint8).reshape(*request.payload.result_px[::-1], 3)


def evicted_image(executor, request, call, frame=None):
    """The image [height, width, 3] of a request that is evicted at `call` and returns into another slot.

    Two others like it, of another seed, are there: one from the beginning, and one that takes the slot.
    """
    loop, events = loop_of(executor, num_slots=2)

    def submit(name, priority, **changes):
        payload = msgspec.structs.replace(request.payload, **changes)
        ids = {"request_id": name, "attempt_id": name}
        copy = msgspec.structs.replace(request, priority=priority, payload=payload, **ids)
        loop.submit(executor.prepare(copy, frame))

    seed, steps = request.payload.seed + 1, request.payload.inference_steps
    submit("first", "normal", seed=seed)
    submit("evicted", "low")
    for _ in range(call):
        loop.run_iteration()
    scheduler = "flow-unipc" if request.payload.scheduler.startswith("flow-") else "pndm"
    submit("urgent", "high", seed=seed, inference_steps=3 * steps, scheduler=scheduler, refiner=None)
    plans = []
    while not any(isinstance(each, RequestEnded) and each.event.attempt_id == "evicted" for each in events):
        plans.append(loop.run_iteration().plan)
    for name in ("first", "urgent"):
        loop.cancel(name)
    (evicted,) = plans[0].evictions
    (returned,) = [each for plan in plans for each in plan.returns]
    assert evicted.image == returned.image == ItemId("evicted", 0)
    assert (evicted.progress.call, evicted.slot, returned.slot) == (call, 1, 0)
    assert next(step.call for plan in plans for step in plan.steps if step.image == returned.image) == call
    (ready,) = [
        each for each in events if isinstance(each, ResultReady) and each.prepared.request.request_id == "evicted"
    ]
    return np.frombuffer(ready.result.pixels.rgb(), np.uint8).reshape(*request.payload.result_px[::-1], 3)


def loop_of(executor, num_slots=8):
    """An engine loop and its events."""
    events = []
    return StepLoop(StepScheduler(num_slots), executor, events.append, lambda: 0.0), events


def resumed(target, request, handed_over, frame=None):
    """The arguments with which a loop of `target` submits what another one has handed over."""
    states = [state for state, _ in handed_over.states]
    data = b"".join([*(data for _, data in handed_over.states), frame or b""])
    resumption, rest = read_resumption(Resume(request, tuple(states)), memoryview(data))
    return target.resume(target.prepare(request, rest), resumption.states), None, resumption
