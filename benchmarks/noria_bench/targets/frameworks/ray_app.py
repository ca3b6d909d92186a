"""Ray Serve over diffusers' pipeline, with `@serve.batch`. A process: `python -m noria_bench.targets.frameworks.ray_app
JOB`.

Ray starts a node of its own: a scheduler, an object store, Serve's controller, an HTTP proxy, and one replica. In the
replica, one thread generates and others compress files.
"""

import asyncio
import os
import secrets
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pydantic
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from noria.frontend.engines.results import RawImage
from noria_bench.targets.pipeline_generator import (
    PipelineGenerator,
    T2IBody,
    TargetJob,
    generate_mixed,
    image_response,
    read_job,
)
from noria_bench.targets.process_tree import kill_tree_on_sigterm

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A replica that requests no GPU still sees all of them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # The default gives workers a low priority.
    "RAY_worker_niceness": "0",
}
_STORE_BYTES = 200 * 2**20


class Replica:
    """The deployment: the model with its queue."""

    def __init__(self, job_json: bytes) -> None:
        from ray import serve

        self._job = msgspec.json.decode(job_json, type=TargetJob)
        self._generator = PipelineGenerator(self._job)
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        max_images = self._job.settings.max_images
        self._generate = serve.batch(
            max_batch_size=max_images,
            batch_wait_timeout_s=self._job.settings.timeout_s,
            # Counts images. A request larger than a batch would be rejected, so it counts as a full batch.
            batch_size_fn=lambda bodies: sum(min(body.n, max_images) for body in bodies),
        )(self._generate_batch)

    async def __call__(self, request: Request) -> Response:
        """Answer /readyz and /t2i."""
        if request.url.path == "/readyz":
            return PlainTextResponse("ready")
        try:
            body = T2IBody.model_validate_json(await request.body())
        except pydantic.ValidationError as error:
            return PlainTextResponse(str(error), status_code=422)
        images, batch_size = await self._generate(body)
        response = await asyncio.to_thread(image_response, images, batch_size)
        return Response(response.content, headers=response.headers, media_type=response.media_type)

    async def _generate_batch(self, bodies: list[T2IBody]) -> list[tuple[list[RawImage], int]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._device, generate_mixed, self._generator, self._job.spec, bodies)


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    folder = tempfile.mkdtemp(prefix="noria-ray-")
    kill_tree_on_sigterm(folder)
    # Ray's processes authenticate with a token, by default from a file in the user's home.
    os.environ |= _RAY_ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}

    # Reads the environment.
    import ray
    from ray import serve

    ray.init(
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=os.cpu_count(),
        object_store_memory=_STORE_BYTES,
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": job.port},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    deployment = serve.deployment(
        name="t2i",
        num_replicas=1,
        # Ray sets the number of OpenMP threads to it, 1 by default.
        ray_actor_options={"num_cpus": os.cpu_count()},
        # All requests wait in the replica, where they are batched.
        max_ongoing_requests=100_000,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(Replica)
    serve.run(deployment.bind(msgspec.json.encode(job)), route_prefix="/")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
