"""The second reference's baseline: the model behind FastAPI, in some twenty lines, without batches.

A process: `python -m noria_bench.encoders.servers.fastapi_app JOB`.
"""

import contextlib
from collections.abc import AsyncIterator

import anyio.to_thread
import fastapi
import pydantic
import uvicorn

from noria_bench.encoders.servers.job import job_argument
from noria_bench.encoders.servers.text_encoder import open_encoder


class Body(pydantic.BaseModel):
    """The request body."""

    text: str


def main() -> None:
    """Serve until SIGTERM."""
    job = job_argument()
    encoder = open_encoder(job.fields)

    @contextlib.asynccontextmanager
    async def limit_threads(_: fastapi.FastAPI) -> AsyncIterator[None]:
        # Each thread of the pool computes a text, in the session's one thread.
        anyio.to_thread.current_default_thread_limiter().total_tokens = job.threads
        yield

    app = fastapi.FastAPI(lifespan=limit_threads)

    @app.get("/readyz")
    async def ready() -> None:
        pass

    @app.post("/embed")
    def embed(body: Body) -> dict[str, list[float]]:
        return {"embedding": encoder.embed(encoder.tokenize([body.text]))[0].tolist()}

    uvicorn.run(app, host="127.0.0.1", port=job.port, loop="uvloop", http="httptools", log_level="warning")


if __name__ == "__main__":
    main()
