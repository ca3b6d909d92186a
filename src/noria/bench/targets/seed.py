"""The seed's server: FastAPI over diffusers' own pipeline, microbatched. A process: `python -m noria.bench.targets.seed JOB`.

`POST /t2i/batched` reads the JSON of Noria's `/t2i` (what it has no use for is ignored) and answers likewise. It is given everything
that Noria's engine has: device, dtype, threads, attention, memory format, inference mode, PNG encoder; images are compressed while
the next batch is drawn. Differences to the article: requests are grouped by scheduler too, which the article's server had only one
of, and one request may ask for several images. Nothing is ever refused, and a client that leaves is drawn for all the same.

One device thread draws. What it draws is a `Batch`; `microbatch.py` decides which and when.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel

from noria.bench.targets.microbatch import Microbatcher
from noria.config import EngineConfig
from noria.frontend.encoding import base64_texts, encode_images
from noria.frontend.engine_link import DrawnImage
from noria.observe.process import die_with_parent
from noria.spec import ModelSpec


class SeedJob(msgspec.Struct, frozen=True):
    """What the bench tells the server, as JSON in its first argument."""

    spec: ModelSpec
    config: EngineConfig
    port: int
    timeout_s: float = 0.5
    max_images: int = 8
    parent_pid: int | None = None


class T2IBody(BaseModel):
    """The body; what is left out is the model's default."""

    prompt: str
    negative_prompt: str = ""
    seed: int = 0
    width: int | None = None
    height: int | None = None
    inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None
    n: int = 1


@dataclass(frozen=True)
class Group:
    """The settings that requests must share to be drawn together."""

    width: int
    height: int
    inference_steps: int
    guidance_scale: float
    scheduler: str


class Drawer(Protocol):
    """What draws a batch: the pipeline, or a stand-in."""

    def draw(self, group: Group, bodies: list[T2IBody]) -> list[list[DrawnImage]]:
        """The images of each body, in order; blocks."""
        ...


class PipelineDrawer:
    """diffusers' StableDiffusionPipeline on one device."""

    def __init__(self, job: SeedJob) -> None:
        """Load and warm it up; torch's threads are set for the whole process."""
        import torch

        from noria.bench.baselines import Pipeline
        from noria.engine.loading import look_at_machine
        from noria.engine.resources import resolve, resolve_device

        machine = look_at_machine()
        device = resolve_device(job.config.devices[0], machine)
        settings = resolve(job.config, job.spec, device, machine)
        assert isinstance(settings.threads, int)
        torch.set_num_threads(settings.threads)
        self._pipeline = Pipeline(job.spec, settings, device)
        self.draw(group_of(T2IBody(prompt="", inference_steps=2), job.spec), [T2IBody(prompt="")] * job.max_images)

    def draw(self, group: Group, bodies: list[T2IBody]) -> list[list[DrawnImage]]:
        """One call of the pipeline; image k of a request is drawn from its seed + k."""
        import torch

        each = [(body, body.seed + k) for body in bodies for k in range(body.n)]
        self._pipeline.use_scheduler(group.scheduler)
        with torch.inference_mode():
            pictures = self._pipeline.pipe(
                prompt=[body.prompt for body, _ in each],
                negative_prompt=[body.negative_prompt for body, _ in each],
                width=group.width,
                height=group.height,
                num_inference_steps=group.inference_steps,
                guidance_scale=group.guidance_scale,
                generator=[torch.Generator("cpu").manual_seed(seed) for _, seed in each],
            ).images
        drawn = [
            DrawnImage(seed, picture.width, picture.height, memoryview(picture.tobytes()))
            for (_, seed), picture in zip(each, pictures, strict=True)
        ]
        ends = [sum(body.n for body in bodies[: k + 1]) for k in range(len(bodies))]
        return [drawn[end - body.n : end] for body, end in zip(bodies, ends, strict=True)]


def group_of(body: T2IBody, spec: ModelSpec) -> Group:
    """The group that a request waits in."""
    return Group(
        width=body.width or spec.default_width_px,
        height=body.height or spec.default_height_px,
        inference_steps=body.inference_steps or spec.default_steps,
        guidance_scale=spec.default_guidance if body.guidance_scale is None else body.guidance_scale,
        scheduler=body.scheduler or spec.default_scheduler,
    )


@dataclass(frozen=True)
class Waiting:
    """A request on the queue, and where its images and the size of its batch go."""

    group: Group
    body: T2IBody
    answer: asyncio.Future[tuple[list[DrawnImage], int]]


class Worker:
    """Feeds the device thread from the queue, one batch after the other."""

    def __init__(self, drawer: Drawer, timeout_s: float, max_images: int) -> None:
        self._drawer = drawer
        self._batcher: Microbatcher[Waiting] = Microbatcher(timeout_s, max_images, time.monotonic())
        self._arrived = asyncio.Event()
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def draw(self, group: Group, body: T2IBody) -> tuple[list[DrawnImage], int]:
        """The request's images, and how many were drawn together."""
        waiting = Waiting(group, body, asyncio.get_running_loop().create_future())
        self._batcher.put(group, waiting, body.n, time.monotonic())
        self._arrived.set()
        return await waiting.answer

    async def run(self) -> None:
        """For ever."""
        while True:
            self._arrived.clear()
            if batch := self._batcher.fetch(time.monotonic()):
                await self._draw(batch)
            else:
                await self._something_happens()

    async def _something_happens(self) -> None:
        tick_s = self._batcher.next_tick()
        patience_s = None if tick_s is None else max(0.0, tick_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), patience_s)

    async def _draw(self, batch: list[Waiting]) -> None:
        bodies = [waiting.body for waiting in batch]
        loop = asyncio.get_running_loop()
        try:
            drawn = await loop.run_in_executor(self._device, self._drawer.draw, batch[0].group, bodies)
        except Exception as error:  # the pipeline raises many kinds; the callers are told, the server goes on
            for waiting in batch:
                waiting.answer.set_exception(error)
            return
        num_images = sum(body.n for body in bodies)
        for waiting, images in zip(batch, drawn, strict=True):
            if not waiting.answer.done():  # its client has left
                waiting.answer.set_result((images, num_images))


def build_app(drawer: Drawer, spec: ModelSpec, timeout_s: float, max_images: int) -> FastAPI:
    """The application; `drawer` is ready."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.worker = Worker(drawer, timeout_s, max_images)
        running = asyncio.create_task(app.state.worker.run())
        yield
        running.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/readyz")
    async def readyz() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/t2i/batched")
    async def batched(body: T2IBody) -> Response:
        images, batch_size = await app.state.worker.draw(group_of(body, spec), body)
        files = await asyncio.to_thread(encode_images, images, "png")
        return answer(files, batch_size)

    return app


def answer(files: list[bytes], batch_size: int) -> Response:
    """One image as its file, several as JSON: a plain Response, which the article found to be the fastest."""
    headers = {"X-Batch-Size": str(batch_size)}
    if len(files) == 1:
        return Response(files[0], media_type="image/png", headers=headers)
    document: dict[str, Any] = {"images": [{"b64_json": text} for text in base64_texts(files)]}
    return Response(msgspec.json.encode(document), media_type="application/json", headers=headers)


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = msgspec.json.decode(sys.argv[1], type=SeedJob)
    die_with_parent(parent_pid=job.parent_pid)
    # What the supervisor gives its engines; read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    app = build_app(PipelineDrawer(job), job.spec, job.timeout_s, job.max_images)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=job.port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,  # who is still waiting when the bench is done is not missed
    )


if __name__ == "__main__":
    main()
