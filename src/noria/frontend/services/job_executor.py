"""Between jobs and the studio: a wish as it is kept in the database, and how it is drawn when its turn has come."""

import math
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from noria.errors import DeadlineExceeded, EngineUnavailable
from noria.frontend.engines.pool import ProgressUpdate, Update
from noria.frontend.http.request_spans import add_request_attributes
from noria.frontend.services.generation import AdmittedRequest, GenerationService, with_trace_context
from noria.jobs.records import JobRecord
from noria.jobs.worker import JobOutput
from noria.observe.metrics import declarations
from noria.observe.traces.tracer import CURRENT_SPAN
from noria.protocol.request import ImageFormat, ImageRequest

_DEFAULT_NUM_SLOTS = 16  # until the engines have told


class StoredRequest(Struct, frozen=True):
    """All that it takes to draw a wish again, to the same image: its defaults are filled in, its seed is drawn."""

    request: ImageRequest
    file_format: ImageFormat
    quality: int | None
    metadata: bool


def serialize_request(admitted: AdmittedRequest) -> bytes:
    """`wish` as the database keeps it; its model is kept beside it."""
    request = msgspec.structs.replace(with_trace_context(admitted.request), watched=True)
    return msgspec.json.encode(StoredRequest(request, admitted.file_format, admitted.quality, admitted.metadata))


class GenerationJobExecutor:
    """Draws jobs in the studio, as any request is drawn; a `Painter`."""

    def __init__(
        self,
        generation_service: GenerationService,
        concurrency: int | Literal["auto"],
        num_frontends: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._generation_service, self._concurrency, self._num_frontends, self._clock = (
            generation_service,
            concurrency,
            num_frontends,
            clock,
        )

    def available_models(self) -> set[tuple[str, str]]:
        """The models that a ready engine serves."""
        engine_pool = self._generation_service.engine_pool
        return {(spec.name, spec.fingerprint) for spec in engine_pool.models.values()} if engine_pool.ready else set()

    def capacity(self) -> int:
        """As set; else twice what the engines seat, so that their scheduler has a choice, shared among the front ends."""
        if self._concurrency != "auto":
            return self._concurrency
        return math.ceil(
            2 * (self._generation_service.engine_pool.load.num_slots or _DEFAULT_NUM_SLOTS) / self._num_frontends
        )

    async def execute(self, record: JobRecord, on_progress: Callable[[bytes], None]) -> JobOutput:
        """One job's files; raises NoriaError."""
        stored = msgspec.json.decode(record.request, type=StoredRequest)
        spec = self._generation_service.engine_pool.models.get(record.model)
        if spec is None or spec.fingerprint != record.version:  # since it was claimed
            raise EngineUnavailable(f"model {record.model!r} of version {record.version} is no longer served.")
        add_request_attributes(CURRENT_SPAN.get(), stored.request)
        request = self._with_remaining_time(record, stored.request)

        def on_update(update: Update) -> None:
            if isinstance(update, ProgressUpdate):
                on_progress(msgspec.json.encode(update))

        result = await self._generation_service.generate(
            AdmittedRequest(request, spec, stored.file_format, stored.quality, stored.metadata), on_update
        )
        timings = {**msgspec.structs.asdict(result.timings), "num_steps_run": result.num_steps_run}
        return JobOutput(result.files, stored.file_format, timings)

    def _with_remaining_time(self, record: JobRecord, request: ImageRequest) -> ImageRequest:
        """Its deadline counts from its acceptance, however often it is drawn; without one a job waits as long as it takes."""
        if request.deadline_s is None:  # `request_timeout_s` is for those whom somebody waits for
            return msgspec.structs.replace(request, timeout_s=math.inf)
        remaining_s = record.created_at + request.deadline_s - self._clock()
        if remaining_s <= 0:
            declarations.DEADLINES_MISSED.labels(record.model).inc()
            raise DeadlineExceeded(f"not done {request.deadline_s:g} s after it was accepted.")
        return msgspec.structs.replace(request, deadline_s=remaining_s)
