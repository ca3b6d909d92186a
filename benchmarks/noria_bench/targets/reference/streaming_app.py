"""The server of `noria bench streaming`: sends one body in each mode.

A process: `python -m noria_bench.targets.reference.streaming_app JOB`. `GET /MODE` sends the body in one of the modes
of `response_modes`; `GET /cpu` returns the CPU seconds that this process has used.
"""

import random
import sys
import time
from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Response
from msgspec import Struct

from noria.protocol.process_signals import die_with_parent
from noria_bench.targets.pipeline_generator import ImageResponse
from noria_bench.targets.reference.reference_server import serve
from noria_bench.targets.reference.response_modes import RESPONSE_MODES


class StreamingJob(Struct, frozen=True):
    """The job, as JSON in the first argument."""

    port: int
    num_bytes: int
    parent_pid: int


def random_image_bytes(num_bytes: int) -> bytes:
    """Pseudo-random bytes, always the same, which resemble a PNG's compressed pixels: one in 256 is a newline."""
    return random.Random(1).randbytes(num_bytes)


def build_app(content: bytes) -> FastAPI:
    """The application."""
    app, response = FastAPI(), ImageResponse(content, "image/png", {})

    @app.get("/readyz")
    async def readyz() -> dict[str, bool]:
        return {"ready": True}

    @app.get("/cpu")
    async def cpu() -> float:
        return time.process_time()

    def add(name: str, mode: Callable[[ImageResponse], Response]) -> None:
        @app.get(f"/{name}")
        async def body() -> Response:
            return mode(response)

    for name, mode in RESPONSE_MODES.items():
        add(name, mode)
    return app


def main() -> None:
    """Serve until SIGTERM."""
    job = msgspec.json.decode(sys.argv[1], type=StreamingJob)
    die_with_parent(parent_pid=job.parent_pid)
    serve(build_app(random_image_bytes(job.num_bytes)), job.port)


if __name__ == "__main__":
    main()
