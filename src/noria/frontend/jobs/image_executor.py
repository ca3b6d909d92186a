"""Executes jobs: how an admitted request is stored in the jobs' database, and generated when its job runs."""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from noria.errors import DeadlineExceeded, EngineUnavailable
from noria.frontend.access.shares import job_client
from noria.frontend.engines.results import ProgressUpdate, Update
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import ImageTask
from noria.frontend.services.images.span_attributes import request_attributes
from noria.jobs.records import JobRecord
from noria.jobs.stored_request import StoredRequest, deserialize, serialize
from noria.jobs.worker import JobOutput
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations
from noria.observe.request_scope import current_span, current_trace
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import ImageRequest

_DEFAULT_NUM_SLOTS = 16  # until the engines have reported theirs


def serialize_request(task: ImageTask) -> bytes:
    """Return a task as the database stores it. The model is stored in a column of its own."""
    request = msgspec.structs.replace(task.request, **current_trace())
    return serialize(StoredRequest(request, task.file_format, task.quality, task.metadata))


class GenerationJobExecutor:
    """Generates the images of jobs with the `GenerationService`. Implements `jobs.worker.JobExecutor`."""

    def __init__(
        self,
        generation_service: GenerationService,
        concurrency: int | Literal["auto"],
        num_frontends: Callable[[], int],
        weight: float,
        images: Callable[[str], Awaitable[bytes]],
    ) -> None:
        """`weight` is that of a key's jobs; `images` returns the pixels of the images of a job by its id."""
        self._generation_service = generation_service
        self._concurrency, self._num_frontends, self._images = concurrency, num_frontends, images
        self._weight = weight

    def available_models(self) -> set[ModelKey]:
        """Return the models that can be used now."""
        pool = self._generation_service.engine_pool
        return pool.ready_models(DiffusionModelSpec) | self._generation_service.submission.checkpoints.loadable()

    def capacity(self) -> int:
        """Return how many jobs to run at once: as configured, else this front end's share of twice the engines' slots.

        Twice, so that the engines' scheduler has a choice.
        """
        if self._concurrency != "auto":
            return self._concurrency
        num_slots = self._generation_service.engine_pool.reports.num_slots(DiffusionModelSpec) or _DEFAULT_NUM_SLOTS
        return math.ceil(2 * num_slots / self._num_frontends())

    async def execute(
        self, record: JobRecord, on_progress: Callable[[bytes], None], log_record: RequestLogRecord
    ) -> JobOutput:
        """Generate the images of one job. Calls `on_progress` with progress as JSON. Raises NoriaError."""
        stored = deserialize(record.request)
        assert isinstance(stored, StoredRequest), record.id
        spec = self._generation_service.engine_pool.find_model(record.model, record.version)
        if spec is None:  # it changed after the claim
            raise EngineUnavailable(f"model {record.model!r} of version {record.version} is no longer served.")
        current_span().set_attributes(request_attributes(stored.request))
        request = msgspec.structs.replace(
            stored.request,
            model_version=record.version,
            stream_progress=True,
            share_client=job_client(record.made_by),
            share_weight=self._weight,
        )
        request = self._with_remaining_time(record, request)

        def on_update(update: Update) -> None:
            if isinstance(update, ProgressUpdate):
                on_progress(msgspec.json.encode(update))

        payload = request.payload
        data = await self._images(record.id) if payload.has_images else None
        task = ImageTask(
            request=request,
            spec=spec,
            file_format=stored.file_format,
            quality=stored.quality,
            metadata=stored.metadata,
            data=data,
        )
        result = await self._generation_service.generate_job(task, log_record, on_update)
        metrics: dict[str, float | list[float]] = {
            **msgspec.structs.asdict(result.timings),
            "num_steps_run": result.num_steps_run,
            "num_truncated_tokens": result.num_truncated_tokens,
        }
        if scores := result.safety_scores:
            metrics |= {"safety_scores": scores, "refused_images": [each.index for each in result.refused]}
        return JobOutput(result.files, stored.file_format, metrics)

    def _with_remaining_time(self, record: JobRecord, request: ImageRequest) -> ImageRequest:
        """Return `request` with what is left of its deadline since the job's acceptance; without one, no timeout."""
        if request.deadline_s is None:  # `request_timeout_s` is for requests with a waiting client
            return msgspec.structs.replace(request, timeout_s=math.inf)
        remaining_s = record.created_at + request.deadline_s - time.time()
        if remaining_s <= 0:
            declarations.DEADLINES_MISSED.labels(record.model).inc()
            raise DeadlineExceeded(f"not done {request.deadline_s:g} s after it was accepted.")
        return msgspec.structs.replace(request, deadline_s=remaining_s)
