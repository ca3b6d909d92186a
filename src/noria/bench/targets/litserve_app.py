"""LitServe over diffusers' own pipeline, with its dynamic batching. A process: `python -m noria.bench.targets.litserve_app JOB`.

LitServe collects up to `max_images` requests (it counts requests, not images) for `timeout_s` after the model is free, and calls
`predict` with them in a process of its own. It would compress the files in that process too, between two batches; here a reply
travels as pixels and is compressed by the process that speaks HTTP, while the model draws on.
"""

import asyncio
from typing import Any

import litserve
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from noria.bench.targets.drawing import PipelineDrawer, T2IBody, TargetJob, draw_mixed, read_job, reply_with
from noria.bench.targets.ending import end_all_at_sigterm
from noria.frontend.engine_link import DrawnImage
from noria.observe.process import die_with_parent


class DrawnReply(Response):
    """Images on their way between processes; a file when it is sent."""

    def __init__(self, images: list[DrawnImage], batch_size: int) -> None:
        super().__init__()
        self._packed = msgspec.msgpack.encode(images)  # memoryviews cannot be pickled
        self._batch_size = batch_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compress in a thread, and send."""
        images = msgspec.msgpack.decode(self._packed, type=list[DrawnImage])
        reply = await asyncio.to_thread(reply_with, images, self._batch_size)
        await Response(reply.content, headers=reply.headers, media_type=reply.media_type)(scope, receive, send)


class Api(litserve.LitAPI):  # type: ignore[misc] # mypy sees no peer
    """What LitServe calls in its worker."""

    def __init__(self, job: TargetJob) -> None:
        super().__init__(max_batch_size=job.settings.max_images, batch_timeout=job.settings.timeout_s, api_path="/t2i")
        self._job = job

    def setup(self, device: str) -> None:  # noqa: ARG002 -- the job says which
        """Load the model, in the worker."""
        die_with_parent()
        self._drawer = PipelineDrawer(self._job)

    def decode_request(self, request: T2IBody) -> T2IBody:
        """FastAPI has read it, by this annotation."""
        return request

    def batch(self, inputs: list[T2IBody]) -> list[T2IBody]:
        """Nothing to stack."""
        return inputs

    def predict(self, bodies: list[T2IBody]) -> list[tuple[list[DrawnImage], int]]:
        """Each request's images, and how many were drawn together."""
        return draw_mixed(self._drawer, self._job.spec, bodies)

    def unbatch(self, output: list[tuple[list[DrawnImage], int]]) -> list[tuple[list[DrawnImage], int]]:
        """Nothing to take apart."""
        return output

    def encode_response(self, output: tuple[list[DrawnImage], int]) -> Response:
        """The reply."""
        return DrawnReply(*output)


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    end_all_at_sigterm()
    server = litserve.LitServer(
        Api(job),
        accelerator="cpu",  # LitServe only passes it on to `setup`
        devices=1,
        workers_per_device=1,
        timeout=False,  # nothing is refused
        healthcheck_path="/readyz",
        fast_queue=True,
    )
    options: dict[str, Any] = {"access_log": False, "loop": "uvloop", "http": "httptools"}
    server.run(
        host="127.0.0.1",
        port=job.port,
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
        **options,
    )


if __name__ == "__main__":
    main()
