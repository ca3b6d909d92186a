"""One call of the pipeline at a time, and how long each request waited for its own.

A diffusers pipeline has one scheduler object, which counts its steps: two threads in the pipeline at once draw wrong images, or fail.
So whoever wants it, from whatever thread, takes a lock.
"""

import threading
import time
from dataclasses import dataclass

from noria.bench.targets.drawing import Drawer, Group, Reply, T2IBody, reply_with
from noria.frontend.engine_link import DrawnImage


@dataclass(frozen=True)
class Drawn:
    """A request's images, and how they came about."""

    images: list[DrawnImage]
    batch_size: int  # images of the call
    queue_s: float  # from the request's arrival to the call's begin
    denoise_s: float  # the whole call: text encoder, steps and VAE

    def reply(self) -> Reply:
        """The answer, with Noria's form of Server-Timing; compresses, so it takes tens of milliseconds."""
        reply = reply_with(self.images, self.batch_size)
        reply.headers["Server-Timing"] = f"queue;dur={self.queue_s * 1000:.1f}, denoise;dur={self.denoise_s * 1000:.1f}"
        return reply


class Turns:
    """The only way to the pipeline, for all endpoints of a server."""

    def __init__(self, drawer: Drawer) -> None:
        self._drawer = drawer
        self._turn = threading.Lock()

    def draw(self, group: Group, bodies: list[T2IBody], arrived_s: list[float]) -> list[Drawn]:
        """The images of each body, which arrived at that second of the monotonic clock; blocks, first of all for its turn."""
        with self._turn:
            began_s = time.monotonic()
            drawn = self._drawer.draw(group, bodies)
            denoise_s = time.monotonic() - began_s
        num_images = sum(body.n for body in bodies)
        return [
            Drawn(images, num_images, max(0.0, began_s - arrived), denoise_s)
            for images, arrived in zip(drawn, arrived_s, strict=True)
        ]
