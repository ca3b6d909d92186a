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
