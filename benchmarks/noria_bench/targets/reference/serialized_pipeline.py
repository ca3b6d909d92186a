"""One call of the pipeline at a time, and how long each request waited for its own.

A diffusers pipeline has one scheduler object, which counts its steps: two threads in the pipeline at once draw wrong images, or fail.
So whoever wants it, from whatever thread, takes a lock.
"""

import threading
import time
from dataclasses import dataclass

from noria.frontend.engines.pool import RawImage
from noria_bench.targets.pipeline_generator import BatchKey, ImageGenerator, ImageResponse, T2IBody, image_response


@dataclass(frozen=True)
class GenerationResult:
    """A request's images, and how they came about."""

    images: list[RawImage]
    batch_size: int  # images of the call
    queue_s: float  # from the request's arrival to the call's begin
    denoise_s: float  # the whole call: text encoder, steps and VAE

    def to_response(self) -> ImageResponse:
        """The answer, with Noria's form of Server-Timing; compresses, so it takes tens of milliseconds."""
        response = image_response(self.images, self.batch_size)
        response.headers["Server-Timing"] = (
            f"queue;dur={self.queue_s * 1000:.1f}, denoise;dur={self.denoise_s * 1000:.1f}"
        )
        return response


class SerializedPipeline:
    """The only way to the pipeline, for all endpoints of a server."""

    def __init__(self, generator: ImageGenerator) -> None:
        self._generator = generator
        self._lock = threading.Lock()

    def generate(self, batch_key: BatchKey, bodies: list[T2IBody], arrived_s: list[float]) -> list[GenerationResult]:
        """The images of each body, which arrived at that second of the monotonic clock; blocks, first of all for its turn."""
        with self._lock:
            start_s = time.monotonic()
            generated = self._generator.generate(batch_key, bodies)
            denoise_s = time.monotonic() - start_s
        num_images = sum(body.n for body in bodies)
        return [
            GenerationResult(images, num_images, max(0.0, start_s - arrived), denoise_s)
            for images, arrived in zip(generated, arrived_s, strict=True)
        ]
