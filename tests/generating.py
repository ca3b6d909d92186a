"""Images from an executor's own loop, without a server."""

import numpy as np

from noria.engine.loop import EngineLoop, RequestEnded, ResultReady
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import FinishReason


def generate(executor, requests, arrivals=None, frames=None):
    """Images [height, width, 3] by (request id, index); request k is submitted before iteration `arrivals[k]`.

    `frames` are the requests' data, by request id.
    """
    arrivals, frames = arrivals or [0] * len(requests), frames or {}
    images, ends = {}, {}

    def on_event(event):
        request = event.prepared.request
        if isinstance(event, ResultReady):
            pixels = np.frombuffer(event.result.pixels.rgb(), np.uint8)
            images[request.request_id, event.index] = pixels.reshape(request.payload.height, request.payload.width, 3)
        elif isinstance(event, RequestEnded):
            ends[request.request_id] = event.event

    loop = EngineLoop(StepScheduler(8), executor, on_event, lambda: 0.0)
    waiting = sorted(zip(arrivals, requests, strict=True), key=lambda pair: pair[0])
    iteration = 0
    while waiting or loop.scheduler.num_running or loop.scheduler.num_waiting:
        while waiting and waiting[0][0] <= iteration:
            request = waiting.pop(0)[1]
            loop.submit(executor.prepare(request, frames.get(request.request_id)))
        loop.run_iteration()
        iteration += 1
    assert {end.finish_reason for end in ends.values()} == {FinishReason.FINISHED}, ends
    return images


def difference(a, b):
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def final_latents(executor, requests, monkeypatch, arrivals=None, frames=None):
    """The latents of each request's image, from a batch of all."""
    model_decode, found, executor_decode = executor.model.decode, {}, type(executor)._decode
    decoding = []  # of the call that runs

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
        generate(executor, requests, arrivals, frames)
    return found


def relative(left, right):
    return float((left - right).abs().max() / right.abs().max())
