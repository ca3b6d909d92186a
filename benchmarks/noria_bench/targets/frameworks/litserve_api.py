"""The LitServe API over diffusers' pipeline.

LitServe collects up to `max_images` requests (it counts requests, not images) for `timeout_s` after the model is free,
and calls `predict` with them in a process of its own. It would compress the files in that process too, between two
batches. Here responses are sent as pixels to the HTTP process, which compresses them while the model continues.
"""

import asyncio

import litserve
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from noria.frontend.engines.results import RawImage
from noria.protocol.process_signals import die_with_parent
from noria_bench.targets.pipeline_generator import PipelineGenerator, T2IBody, TargetJob, generate_mixed, image_response


class GeneratedResponse(Response):
    """Images as pixels between processes; compressed when the response is sent."""

    def __init__(self, images: list[RawImage], batch_size: int) -> None:
        super().__init__()
        self._packed = msgspec.msgpack.encode(images)  # memoryviews cannot be pickled
        self._batch_size = batch_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compress in a thread and send."""
        images = msgspec.msgpack.decode(self._packed, type=list[RawImage])
        response = await asyncio.to_thread(image_response, images, self._batch_size)
        await Response(response.content, headers=response.headers, media_type=response.media_type)(scope, receive, send)


class LitServeApi(litserve.LitAPI):  # type: ignore[misc] # frameworks are not installed for mypy
    """The methods that LitServe calls."""

    def __init__(self, job: TargetJob) -> None:
        super().__init__(max_batch_size=job.settings.max_images, batch_timeout=job.settings.timeout_s, api_path="/t2i")
        self._job = job

    def setup(self, device: str) -> None:  # noqa: ARG002 - the job has the device
        """Load the model, in the worker."""
        die_with_parent()
        self._generator = PipelineGenerator(self._job)

    def decode_request(self, request: T2IBody) -> T2IBody:
        """Return it unchanged: FastAPI has parsed it by this annotation."""
        return request

    def batch(self, inputs: list[T2IBody]) -> list[T2IBody]:
        """Return the list: there are no tensors to stack."""
        return inputs

    def predict(self, bodies: list[T2IBody]) -> list[tuple[list[RawImage], int]]:
        """Each request's images and batch size."""
        return generate_mixed(self._generator, self._job.spec, bodies)

    def unbatch(self, output: list[tuple[list[RawImage], int]]) -> list[tuple[list[RawImage], int]]:
        """Return the list."""
        return output

    def encode_response(self, output: tuple[list[RawImage], int]) -> Response:
        """The response, to be compressed by the HTTP process."""
        return GeneratedResponse(*output)
