"""The seed's server: five endpoints in FastAPI over diffusers' own pipeline. A process: `python -m noria_bench.targets.reference.reference_server JOB`.

Each endpoint reads the JSON of Noria's `/t2i` (what it has no use for is ignored), and answers likewise:

    POST /t2i/stream-async, response-async   `async def`, as is the service that it awaits, which calls the pipeline and blocks
    POST /t2i/stream-sync, response-sync     `def`: FastAPI runs them in its thread pool; the pipeline is locked (`turns.py`)
    POST /t2i/batched                        `async def`; the service microbatches (`seed_worker.py`)

The asynchronous ones are what the article describes ("defining the endpoint+service as async functions") and tutorials show: a service that
never gives the event loop back. While an image is drawn and compressed nothing else runs: no request is read, not even /readyz, and of
earlier answers goes out only what the kernel already has; a stream gives the loop back between its pieces, and is sent on when it gets it
again. So their Server-Timing cannot tell what a request waited before it was read (docs/benchmarks/targets.md).
The synchronous and the batched ones compress while the next image is drawn.

The pipeline is given everything that Noria's engine has: device, dtype, threads, attention, memory format, inference mode, PNG encoder.
Differences to the article: requests are grouped by scheduler too, which the article's server had only one of, and one request may ask
for several images. Nothing is ever refused, and a client that leaves is drawn for all the same.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, Response

from noria.protocol.model_spec import ModelSpec
from noria_bench.targets.pipeline_generator import (
    ImageGenerator,
    ImageResponse,
    PipelineGenerator,
    T2IBody,
    TargetSettings,
    batch_key_of,
    read_job,
)
from noria_bench.targets.reference.batch_worker import BatchWorker
from noria_bench.targets.reference.response_modes import RESPONSE_MODES, plain
from noria_bench.targets.reference.serialized_pipeline import SerializedPipeline


async def _now() -> float:
    """Asynchronous, so that FastAPI calls it on the event loop, before a `def` endpoint waits for a thread."""
    return time.monotonic()


ArrivalTime = Annotated[float, Depends(_now)]


def build_app(generator: ImageGenerator, spec: ModelSpec, settings: TargetSettings) -> FastAPI:
    """The application; `drawer` is ready."""
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
        result = await app.state.worker.draw(batch_key_of(body, spec), body)
        return plain(await asyncio.to_thread(result.reply))

    _add_unbatched(app, pipeline, spec, RESPONSE_MODES[settings.stream])
    return app


def _add_unbatched(
    app: FastAPI, pipeline: SerializedPipeline, spec: ModelSpec, stream_response: Callable[[ImageResponse], Response]
) -> None:
    """The four endpoints of one request a call."""

    def generate(body: T2IBody, arrived_s: float) -> ImageResponse:
        (result,) = pipeline.generate(batch_key_of(body, spec), [body], [arrived_s])
        return result.to_response()

    async def generate_async(body: T2IBody, arrived_s: float) -> ImageResponse:
        return generate(body, arrived_s)  # awaits nothing, as in the article

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
    """Serve on loopback until SIGTERM, as quickly as uvicorn can."""
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,  # who is still waiting when the bench is done is not missed
    )


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    serve(build_app(PipelineGenerator(job), job.spec, job.settings), job.port)


if __name__ == "__main__":
    main()
