"""The seed's server: FastAPI over diffusers' own pipeline, microbatched. A process: `python -m noria.bench.targets.seed JOB`.

`POST /t2i/batched` reads the JSON of Noria's `/t2i` (what it has no use for is ignored) and answers likewise. It is given everything
that Noria's engine has: device, dtype, threads, attention, memory format, inference mode, PNG encoder; images are compressed while
the next batch is drawn. Differences to the article: requests are grouped by scheduler too, which the article's server had only one
of, and one request may ask for several images. Nothing is ever refused, and a client that leaves is drawn for all the same.

One device thread draws. What it draws is a `Batch`; `microbatch.py` decides which and when.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, Response

from noria.bench.targets.drawing import (
    Drawer,
    Group,
    PipelineDrawer,
    T2IBody,
    TargetSettings,
    group_of,
    read_job,
    reply_with,
)
from noria.bench.targets.microbatch import Microbatcher
from noria.frontend.engine_link import DrawnImage
from noria.spec import ModelSpec


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


def build_app(drawer: Drawer, spec: ModelSpec, settings: TargetSettings) -> FastAPI:
    """The application; `drawer` is ready."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.worker = Worker(drawer, settings.timeout_s, settings.max_images)
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
        reply = await asyncio.to_thread(reply_with, images, batch_size)
        return Response(reply.content, media_type=reply.media_type, headers=reply.headers)

    return app


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    app = build_app(PipelineDrawer(job), job.spec, job.settings)
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
