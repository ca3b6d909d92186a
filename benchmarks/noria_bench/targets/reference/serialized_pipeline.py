"""A lock around the pipeline: one call at a time, with the queue time of each request.

A diffusers pipeline has one scheduler object, which counts its steps: two concurrent calls give wrong images, or fail.
"""

import threading
import time
from dataclasses import dataclass

from noria.frontend.engines.results import RawImage
from noria_bench.targets.pipeline_generator import BatchKey, ImageGenerator, ImageResponse, T2IBody, image_response


@dataclass(frozen=True)
class GenerationResult:
    """A request's images with the size and the times of its batch."""

    images: list[RawImage]
    batch_size: int  # images of the call
    queue_s: float  # from the request's arrival to the start of the call
    denoise_s: float  # the whole call: text encoder, steps and VAE

    def to_response(self) -> ImageResponse:
        """The response, with Server-Timing in Noria's form. Compresses, which takes tens of milliseconds."""
        response = image_response(self.images, self.batch_size)
        response.headers["Server-Timing"] = (
            f"queue;dur={self.queue_s * 1000:.1f}, denoise;dur={self.denoise_s * 1000:.1f}"
        )
        return response


class SerializedPipeline:
    """The pipeline that all endpoints of a server share."""

    def __init__(self, generator: ImageGenerator) -> None:
        self._generator = generator
        self._lock = threading.Lock()

    def generate(self, batch_key: BatchKey, bodies: list[T2IBody], arrived_s: list[float]) -> list[GenerationResult]:
        """The images of each body, which arrived at `arrived_s` of the monotonic clock. Blocks, first for the lock."""
        with self._lock:
            start_s = time.monotonic()
            generated = self._generator.generate(batch_key, bodies)
            denoise_s = time.monotonic() - start_s
        num_images = sum(body.n for body in bodies)
        return [
            GenerationResult(images, num_images, max(0.0, start_s - arrived), denoise_s)
            for images, arrived in zip(generated, arrived_s, strict=True)
        ]
