"""The reference server: five FastAPI endpoints over diffusers' own pipeline.

A process: `python -m noria_bench.targets.reference.reference_server JOB`. Each endpoint reads the JSON of Noria's
`/t2i` (it ignores unknown fields) and answers in the same form:

    POST /t2i/stream-async, response-async   `async def`, like the service that it awaits, which calls the pipeline and
                                             blocks
    POST /t2i/stream-sync, response-sync     `def`: FastAPI runs them in its thread pool; the pipeline is locked
                                             (`serialized_pipeline`)
    POST /t2i/batched                        `async def`; the service microbatches (`batch_worker`)

The asynchronous ones are what the article describes ("defining the endpoint+service as async functions") and tutorials
show: a service that never yields to the event loop. While an image is generated and compressed nothing else runs: no
request is read, not even /readyz, and only data that the kernel already has is sent; a stream yields between its
pieces, and continues when the loop returns to it. So their Server-Timing cannot include the time before a request was
read (docs/benchmarks/targets.md). The synchronous and the batched endpoints compress while the next image is generated.

The pipeline has all of Noria's engine settings: device, dtype, threads, attention, memory format, inference mode, PNG
encoder. Differences to the article: requests are also grouped by scheduler, of which the article's server had only one,
and one request may have several images. Nothing is ever rejected, and requests of disconnected clients run to their
end.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, Response

from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.targets.catalog import TargetSettings
from noria_bench.targets.pipeline_generator import (
    ImageGenerator,
    ImageResponse,
    PipelineGenerator,
    T2IBody,
    batch_key_of,
    read_job,
)
from noria_bench.targets.reference.batch_worker import BatchWorker
from noria_bench.targets.reference.response_modes import RESPONSE_MODES, plain
from noria_bench.targets.reference.serialized_pipeline import SerializedPipeline


async def _now() -> float:
    """Asynchronous, so that FastAPI calls it on the event loop before a `def` endpoint waits for a thread."""
    return time.monotonic()


ArrivalTime = Annotated[float, Depends(_now)]


def build_app(generator: ImageGenerator, spec: DiffusionModelSpec, settings: TargetSettings) -> FastAPI:
    """The application over a loaded `generator`."""
    pipeline = SerializedPipeline(generator)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.worker = BatchWorker(pipeline, settings.timeout_s, settings.max_images)
        running = asyncio.create_task(app.state.worker.run())
        yield
        running.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/readyz")
    async def readyz() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/t2i/batched")
    async def batched(body: T2IBody) -> Response:
        result = await app.state.worker.generate(batch_key_of(body, spec), body)
        return plain(await asyncio.to_thread(result.to_response))

    _add_unbatched(app, pipeline, spec, RESPONSE_MODES[settings.stream])
    return app


def _add_unbatched(
    app: FastAPI,
    pipeline: SerializedPipeline,
    spec: DiffusionModelSpec,
    stream_response: Callable[[ImageResponse], Response],
) -> None:
    """Add the four endpoints with one request per call."""

    def generate(body: T2IBody, arrived_s: float) -> ImageResponse:
        (result,) = pipeline.generate(batch_key_of(body, spec), [body], [arrived_s])
        return result.to_response()

    async def generate_async(body: T2IBody, arrived_s: float) -> ImageResponse:
        # Awaits nothing, as in the article.
        return generate(body, arrived_s)

    @app.post("/t2i/stream-async")
    async def stream_async(body: T2IBody, arrived_s: ArrivalTime) -> Response:
        return stream_response(await generate_async(body, arrived_s))

    @app.post("/t2i/response-async")
    async def response_async(body: T2IBody, arrived_s: ArrivalTime) -> Response:
        return plain(await generate_async(body, arrived_s))

    @app.post("/t2i/stream-sync")
    def stream_sync(body: T2IBody, arrived_s: ArrivalTime) -> Response:
        return stream_response(generate(body, arrived_s))

    @app.post("/t2i/response-sync")
    def response_sync(body: T2IBody, arrived_s: ArrivalTime) -> Response:
        return plain(generate(body, arrived_s))


def serve(app: FastAPI, port: int) -> None:
    """Serve on loopback until SIGTERM, with uvicorn's fastest settings."""
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
        # Requests in flight at the end of a bench do not matter.
        timeout_graceful_shutdown=1,
    )


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    serve(build_app(PipelineGenerator(job), job.spec, job.settings), job.port)


if __name__ == "__main__":
    main()
