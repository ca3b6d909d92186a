"""Parts that all servers but Noria share: diffusers' pipeline, the request body and the response.

The reference server's endpoints and the frameworks use it, so that only the serving differs. The pipeline has all of
Noria's engine settings: device, dtype, threads, attention, memory format, inference mode and PNG encoder.
"""

import base64
import io
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from PIL import Image
from pydantic import BaseModel

from noria.config import EngineConfig
from noria.frontend.engines.results import RawImage
from noria.frontend.services.images.image_writer import to_base64, write_images
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.process_signals import die_with_parent
from noria_bench.targets.catalog import TargetSettings


class TargetJob(msgspec.Struct, frozen=True):
    """The job of a server that a bench starts: JSON in its first argument."""

    spec: DiffusionModelSpec
    config: EngineConfig
    port: int
    settings: TargetSettings = TargetSettings()
    parent_pid: int | None = None


class LoraBody(BaseModel):
    """A LoRA by name."""

    name: str
    weight: float = 1.0


class T2IBody(BaseModel):
    """The request body; omitted settings are the model's defaults."""

    prompt: str
    negative_prompt: str = ""
    seed: int = 0
    width: int | None = None
    height: int | None = None
    inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None
    n: int = 1
    loras: list[LoraBody] = []
    image: str | None = None  # a start image in base64, of the width and height
    strength: float = 0.8


@dataclass(frozen=True)
class BatchKey:
    """The settings that the requests of one pipeline call share."""

    width: int
    height: int
    inference_steps: int
    guidance_scale: float
    scheduler: str
    loras: tuple[tuple[str, float], ...] = ()  # a pipeline has the same ones for all images of a call
    strength: float | None = None  # None: there are no start images


class ImageGenerator(Protocol):
    """Generates a batch: the pipeline, or a fake."""

    def generate(self, batch_key: BatchKey, bodies: list[T2IBody]) -> list[list[RawImage]]:
        """The images of each body, in order; blocks."""
        ...


class PipelineGenerator:
    """diffusers' StableDiffusionPipeline on one device, in one thread that loads it and generates, whichever thread
    calls.

    On a CPU, each thread that generates has its own OpenMP threads. With more of them than cores, as after a warm-up in
    another thread, libgomp lets idle ones sleep instead of spin, which costs a small model a third of the cores (ADR
    5).
    """

    def __init__(self, job: TargetJob) -> None:
        """Load the pipeline and warm it up; torch's threads are set for the whole process."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pipeline")
        self._pipeline = self._thread.submit(self._load, job).result()
        warm_up_key = batch_key_of(T2IBody(prompt="", inference_steps=2), job.spec)
        self.generate(warm_up_key, [T2IBody(prompt="")] * job.settings.max_images)

    def generate(self, batch_key: BatchKey, bodies: list[T2IBody]) -> list[list[RawImage]]:
        """Run one call of the pipeline; image k of a request has its seed + k."""
        return self._thread.submit(self._generate, batch_key, bodies).result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    @staticmethod
    def _load(job: TargetJob) -> Any:
        from noria_bench.targets.pipeline import load_pipeline

        return load_pipeline(job.spec, job.config)[0]

    def _generate(self, batch_key: BatchKey, bodies: list[T2IBody]) -> list[list[RawImage]]:
        import torch

        seeded_bodies = [(body, body.seed + k) for body in bodies for k in range(body.n)]
        self._pipeline.use_scheduler(batch_key.scheduler)
        self._pipeline.use_loras(dict(batch_key.loras))
        settings: dict[str, Any] = {
            "prompt": [body.prompt for body, _ in seeded_bodies],
            "negative_prompt": [body.negative_prompt for body, _ in seeded_bodies],
            "num_inference_steps": batch_key.inference_steps,
            "guidance_scale": batch_key.guidance_scale,
            "generator": [torch.Generator("cpu").manual_seed(seed) for _, seed in seeded_bodies],
        }
        starts = None
        if batch_key.strength is not None:
            starts = [read_start_image(body.image or "") for body, _ in seeded_bodies]
        size = batch_key.width, batch_key.height
        pil_images = self._pipeline.call(starts, batch_key.strength, size, **settings)
        generated = [
            RawImage(seed, pil_image.width, pil_image.height, memoryview(pil_image.tobytes()))
            for (_, seed), pil_image in zip(seeded_bodies, pil_images, strict=True)
        ]
        ends = [sum(body.n for body in bodies[: k + 1]) for k in range(len(bodies))]
        return [generated[end - body.n : end] for body, end in zip(bodies, ends, strict=True)]


def batch_key_of(body: T2IBody, spec: DiffusionModelSpec) -> BatchKey:
    """The batch key of a request."""
    return BatchKey(
        width=body.width or spec.default_width_px,
        height=body.height or spec.default_height_px,
        inference_steps=body.inference_steps or spec.default_steps,
        guidance_scale=spec.default_guidance if body.guidance_scale is None else body.guidance_scale,
        scheduler=body.scheduler or spec.default_scheduler,
        loras=tuple((lora.name, lora.weight) for lora in body.loras),
        strength=None if body.image is None else body.strength,
    )


def read_start_image(text: str) -> Image.Image:
    """Decode a start image in base64."""
    return Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")


def generate_mixed(
    generator: ImageGenerator, spec: DiffusionModelSpec, bodies: Sequence[T2IBody]
) -> list[tuple[list[RawImage], int]]:
    """Each body's images, and the size of its batch, for servers whose batches mix settings.

    Makes one call of the pipeline for each batch key, in the order of their first request.
    """
    groups: dict[BatchKey, list[int]] = {}
    for index, body in enumerate(bodies):
        groups.setdefault(batch_key_of(body, spec), []).append(index)
    results: dict[int, tuple[list[RawImage], int]] = {}
    for batch_key, indices in groups.items():
        batch = [bodies[index] for index in indices]
        num_images = sum(body.n for body in batch)
        for index, images in zip(indices, generator.generate(batch_key, batch), strict=True):
            results[index] = images, num_images
    return [results[index] for index in range(len(bodies))]


@dataclass(frozen=True)
class ImageResponse:
    """A response, independent of the web framework."""

    content: bytes
    media_type: str
    headers: dict[str, str]


def image_response(images: list[RawImage], batch_size: int) -> ImageResponse:
    """Return one image as its PNG file, several as JSON. Compresses, so it must not run on an event loop."""
    files, headers = write_images(images, "png"), {"X-Batch-Size": str(batch_size)}
    if len(files) == 1:
        return ImageResponse(files[0], "image/png", headers)
    document: dict[str, Any] = {"images": [{"b64_json": text} for text in to_base64(files)]}
    return ImageResponse(msgspec.json.encode(document), "application/json", headers)


def read_job() -> TargetJob:
    """The job from the command line of this process, which ends with its parent from now on."""
    job = msgspec.json.decode(sys.argv[1], type=TargetJob)
    die_with_parent(parent_pid=job.parent_pid)
    # As the supervisor sets it for engines; read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    return job
