"""The two services of the BentoML target: one speaks HTTP, the other generates. BentoML runs each in a process of its
own.

BentoML batches calls that reach a service from outside, and such a method takes lists. So HTTP bodies reach `Front`,
which calls `Model` with a list: one entry for each image, so that batches count images. The services communicate
through a Unix socket; `Front` compresses the files.

BentoML decides how long a batch waits, from the durations of earlier batches. `max_latency_ms`, our `timeout_s`, is not
that wait: a request that would take longer is rejected with 503.
"""

import asyncio
import os
from typing import Any

import bentoml
import msgspec
from starlette.responses import Response

from noria.frontend.engines.results import RawImage
from noria.protocol.process_signals import die_with_parent
from noria_bench.targets.frameworks.bentoml_app import JOB_VARIABLE
from noria_bench.targets.pipeline_generator import PipelineGenerator, T2IBody, TargetJob, generate_mixed, image_response

JOB = msgspec.json.decode(os.environ[JOB_VARIABLE], type=TargetJob)
_SERVICE_OPTIONS: dict[str, Any] = {
    "traffic": {"timeout": 3600.0},
    # By default a service closes its connections to another after 100 calls or 300 s, and calls in flight on them fail
    # with 500.
    "runner_connection": {"max_requests": 2**31, "max_age": 1e9},
    "logging": {"access": {"enabled": False}},
    "metrics": {"enabled": False},
    "workers": 1,
}
# The dispatcher hardly batches the first ones; afterwards it learns from each batch.
_NUM_TRAINING_REQUESTS = 11


@bentoml.service(**_SERVICE_OPTIONS, threads=1)
class Model:
    """The pipeline."""

    def __init__(self) -> None:
        die_with_parent()
        self._generator = PipelineGenerator(JOB)

    @bentoml.api(  # type: ignore[untyped-decorator] # frameworks are not installed for mypy
        batchable=True, max_batch_size=JOB.settings.max_images, max_latency_ms=int(JOB.settings.timeout_s * 1000)
    )
    def generate(self, bodies: list[T2IBody]) -> list[bytes]:
        """For each body (of one image): the image and its batch size, packed."""
        generated = generate_mixed(self._generator, JOB.spec, bodies)
        return [msgspec.msgpack.encode((images[0], batch_size)) for images, batch_size in generated]


@bentoml.service(**_SERVICE_OPTIONS)
class Front:
    """The HTTP service."""

    model = bentoml.depends(Model)

    def __init__(self) -> None:
        die_with_parent()
        self._trained = False

    async def __is_ready__(self) -> bool:
        """Ready after the dispatcher is trained."""
        if not self._trained:
            for _ in range(_NUM_TRAINING_REQUESTS):
                await self._generate(T2IBody(prompt="", inference_steps=2))
            self._trained = True
        return True

    @bentoml.api(route="/t2i", input_spec=T2IBody)  # type: ignore[untyped-decorator]
    async def t2i(self, **fields: Any) -> Any:
        """Answer one body with a Response, which BentoML sends unchanged but cannot describe."""
        generated = await self._generate(T2IBody(**fields))
        response = await asyncio.to_thread(
            image_response, [image for image, _ in generated], max(batch_size for _, batch_size in generated)
        )
        return Response(response.content, headers=response.headers, media_type=response.media_type)

    async def _generate(self, body: T2IBody) -> list[tuple[RawImage, int]]:
        singles = [body.model_copy(update={"seed": body.seed + k, "n": 1}) for k in range(body.n)]
        packed = await self.model.to_async.generate(singles)
        return [msgspec.msgpack.decode(image, type=tuple[RawImage, int]) for image in packed]
