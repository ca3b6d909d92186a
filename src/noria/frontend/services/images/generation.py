"""Validates requests and generates their images, for every route that makes images and for jobs.

A request passes through `request_validation.py` (limits and defaults), `engines/retries.py` (to pixels) and
`image_writer.py` (to files).
"""

import asyncio
import contextlib
import contextvars
import functools
import random
import time
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from opentelemetry.trace import Tracer
from prometheus_client import Histogram

from noria.config import FrontendConfig
from noria.errors import InvalidField, ModelNotFound, NoriaError
from noria.errors.problems import Problems
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.access.quotas import InFlight
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.results import OnUpdate, RawImage
from noria.frontend.engines.submission import RequestOutcome, Submission, count_deployment
from noria.frontend.engines.versions.shadow_mirror import PrepareCopy
from noria.frontend.services.counted_values import image_values, request_values, safety_values
from noria.frontend.services.images.generation_types import (
    AdmittedRequest,
    GenerationResult,
    ImageTask,
    ResponseTimings,
    Written,
)
from noria.frontend.services.images.image_writer import to_base64, write_images
from noria.frontend.services.images.refusals import divide, record_refusals
from noria.frontend.services.images.request_validation import NO_IMAGES, validate
from noria.frontend.services.images.span_attributes import request_attributes
from noria.frontend.services.images.start_images import (
    NUM_UPLOAD_THREADS,
    LoadFiles,
    StartImages,
    files_of,
    with_less_time,
)
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.images.metadata import metadata_for
from noria.images.start_image import RequestImageFacts, RequestImages
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.observe.logs.request_log import LogPrompts, RequestLogRecord, prompt_fields, request_fields
from noria.observe.metrics import declarations, outcomes
from noria.observe.metrics.exemplars import exemplar_labels
from noria.observe.metrics.exposition import keep_exemplar, series
from noria.observe.metrics.section import add_all
from noria.observe.request_scope import current_span, current_trace
from noria.observe.traces.tracer import nanoseconds
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest, ImageRequestBody
from noria.protocol.routes import Target

_NUM_FILE_THREADS = 2  # that read LoRA files: not those for uploads, which take longer
_STAGES = ("queue", "image_encode", "text_encode", "denoise", "decode", "postprocess")
_POSTPROCESS_WEIGHT = 0.1  # weight of the newest request in the smoothed time
_NOTHING_HELD = contextlib.nullcontext()
_SEEDS = random.Random()  # noqa: S311 - no secrets; not Python's own generator, which code of an endpoint may seed

Check = Callable[[ImageRequest, RequestImageFacts], None]
"""Raises NoriaError if the protocol of a validated request does not allow it with its images."""


def _random_seed() -> int:
    return _SEEDS.getrandbits(32)  # exact in JavaScript's numbers, and short enough to copy by hand


class GenerationService:
    """Validates requests and generates their images."""

    def __init__(
        self,
        submission: Submission,
        config: FrontendConfig,
        tracer: Tracer,
        log_prompts: LogPrompts,
        statistics: StatisticsRecorder,
        folders: AdapterFolders,
    ) -> None:
        self.submission, self.engine_pool = submission, submission.engine_pool
        self.config, self.tracer, self.folders = config, tracer, folders
        self._statistics, self._log_prompts = statistics, log_prompts
        self.upload_threads = FairThreads(NUM_UPLOAD_THREADS)  # for work on the bodies of requests that have files
        self._file_threads = FairThreads(_NUM_FILE_THREADS)
        self._start_images = StartImages(config.max_image_bytes, self.upload_threads)
        self._postprocess_s = 0.0  # smoothed time from a request's pixels to its files
        # Few: writing images is CPU-bound, and the engine needs the cores too.
        self.write_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="write-image")

    @property
    def models(self) -> Mapping[str, DiffusionModelSpec]:
        """The models that generate images, by name, the default one first; empty until an engine was ready."""
        return self.engine_pool.models_of(DiffusionModelSpec)

    def list_models(self) -> list[DiffusionModelSpec]:
        """Return `models` as a list. Raises EngineUnavailable while it is empty."""
        if not self.models:
            raise self.engine_pool.unavailable_error(f"a {DiffusionModelSpec.kind} model")
        return list(self.models.values())

    def resolve_model(self, name: str | None, context: RequestContext) -> DiffusionModelSpec:
        """Return the model named `name` that answers a request; the default model for None or `DEFAULT_MODEL_ALIAS`.

        Raises:
            EngineUnavailable: no engine has been ready yet, so the models are unknown, or none with the default model.
            ModelNotFound: no such model; names those that are served.
        """
        return self.submission.resolve_model(DiffusionModelSpec, name, (), context.versions)

    async def open_model(
        self, name: str | None, context: RequestContext, deadline_ms: int | None = None
    ) -> DiffusionModelSpec | None:
        """Return what `resolve_model` does, or None of what it, and thus `admit`, rejects; open a checkpoint first."""
        await self.submission.checkpoints.open(name, context, self.config.request_timeout_s, deadline_ms)
        with contextlib.suppress(NoriaError):
            return self.resolve_model(name, context)
        return None

    def _resolve_model(self, name: str | None, context: RequestContext, problems: Problems) -> DiffusionModelSpec:
        """Return what `resolve_model` does; raises `problems`, if there are some, instead of what it raises."""
        try:
            return self.resolve_model(name, context)
        except NoriaError as error:
            if problems.are_there and isinstance(error, ModelNotFound):
                problems.add(InvalidField(error.message, field=error.field))
            problems.raise_all()
            raise

    async def admit(
        self,
        body: ImageRequestBody,
        context: RequestContext,
        quality: int | None = None,
        load_files: LoadFiles | None = None,
        *,
        job_id: str | None = None,
        check: Check | None = None,
        problems: Problems | None = None,
    ) -> AdmittedRequest:
        """Validate `body`, fill in defaults, read its images or those of `load_files` if the quota allows.

        `job_id` is that of the job that it becomes, if it does; `check` is called before pixels are decoded. `problems`
        are those of fields that were found before; with these or others, no image is read. A rejection is counted and
        logged. Raises RequestError or EngineUnavailable, and what `check` raises.
        """
        problems, api_client, client = problems or Problems(), context.api_client, context.client
        started, spec = time.monotonic() - context.opened_s, None
        try:
            timeout_s = self.config.request_timeout_s
            await self.submission.checkpoints.open(body.model, context, timeout_s, body.deadline_ms)
            spec = self._resolve_model(body.model, context, problems)
            if body.has_images:
                load_files = load_files or problems.attempt(functools.partial(files_of, body), None)
                body = body.without_images()
            api_client.images.check_rate(body.n)
            prioritised = msgspec.structs.replace(body, priority=api_client.allowed_priority(body.priority))
            request_id = job_id or context.request_id
            validated = functools.partial(self._validate, prioritised, spec, context, request_id, problems)
            images, data, facts = None, None, NO_IMAGES
            if load_files is not None or problems.are_there:  # then images in invalid fields are no longer known
                await validated(None)
            held: contextlib.AbstractContextManager[None] = _NOTHING_HELD  # the quota, while images are read
            if load_files is not None:
                backlog_s, quota = functools.partial(self.engine_pool.reports.backlog_s, spec), api_client.images
                held = quota.hold(max(body.n, 1), time.monotonic(), backlog_s, in_flight=job_id is None)
            with held:
                if load_files is not None:
                    images = await self._start_images.open(client, load_files)
                    load_files, facts = None, images.facts  # it holds the files no longer
                request = await validated(facts)
                if check is not None:
                    check(request, facts)
                if images is not None:
                    request, data = await self._read_pixels(client, images, request, spec, started)
                elif context.opened_s:
                    request = with_less_time(request, context.opened_s)
        except NoriaError as error:
            self.record_rejection(context, body, spec, error)
            raise
        if (span := current_span()).is_recording():
            span.set_attributes(request_attributes(request))
        return AdmittedRequest(
            request=request,
            spec=spec,
            file_format=body.format,
            quality=quality,
            metadata=body.metadata,
            data=data,
            context=context,
            body=body,
            images=facts,
            paste=None
            if images is None or images.pasted is None
            else functools.partial(self._start_images.paste, client, images.pasted),
        )

    async def _read_pixels(
        self, client: str, images: RequestImages, request: ImageRequest, spec: DiffusionModelSpec, started: float
    ) -> tuple[ImageRequest, bytes]:
        """Return `request` with an earlier deadline, and its pixels. Raises DeadlineExceeded, before it begins, too."""
        with_less_time(request, time.monotonic() - started)
        data = await self._start_images.pixels(client, images, request, spec)
        return with_less_time(request, time.monotonic() - started), data

    async def _validate(
        self,
        body: ImageRequestBody,
        spec: DiffusionModelSpec,
        context: RequestContext,
        request_id: str,
        problems: Problems,
        images: RequestImageFacts | None,
    ) -> ImageRequest:
        """Return what `validate` does; in a thread if it reads folders."""
        key_name = context.api_client.name or ""
        arguments = body, spec, self.config, request_id, _random_seed, key_name, self.folders, images, problems
        fields = body.loras, body.controls, body.ip_adapter, body.refiner
        if any(fields) or self.folders.embeddings:
            return await self._file_threads.run(context.client, validate, *arguments)
        return validate(*arguments)

    def record_rejection(
        self, context: RequestContext, body: ImageRequestBody, spec: ModelSpec | None, error: NoriaError
    ) -> None:
        """Count and log a request that is not admitted."""
        outcomes.count_request(None if spec is None else spec.name, error.code)
        if spec is not None:
            count_deployment(context.versions, spec.name, error.code)
        context.log_record.add(
            **prompt_fields("prompt", body.prompt, self._log_prompts),
            model=body.model if spec is None else spec.name,
            model_version=None if spec is None else spec.fingerprint,
            n=body.n,
            scheduler=body.scheduler,
            inference_steps=body.inference_steps,
            guidance_scale=body.guidance_scale,
            seed=body.seed,
            outcome=error.code,
            error=error.message,
        )

    def generate(
        self, admitted: AdmittedRequest, on_update: OnUpdate | None = None
    ) -> Coroutine[Any, Any, GenerationResult]:
        """Generate the images and write their files. Calls `on_update` with progress and previews.

        Cancelling this call removes the request from the engine at its next step.

        Raises:
            NoriaError: the request was rejected or failed.
        """
        context, spec = admitted.context, admitted.spec
        backlog_s = functools.partial(self.engine_pool.reports.backlog_s, spec)
        held = InFlight(context.api_client.images, admitted.request.payload.n, time.monotonic(), backlog_s)
        return self._generate(admitted, on_update, held, context.log_record)

    async def generate_job(
        self, task: ImageTask, log_record: RequestLogRecord, on_update: OnUpdate | None = None
    ) -> GenerationResult:
        """Generate the images of a job, which was charged at its submission, as `generate` does."""
        return await self._generate(task, on_update, contextlib.nullcontext(), log_record)

    async def _generate(
        self,
        task: ImageTask,
        on_update: OnUpdate | None,
        quota: contextlib.AbstractContextManager[None],
        log_record: RequestLogRecord,
    ) -> GenerationResult:
        """Generate while `quota` is held; a job has no versions."""
        versions = task.context.versions if isinstance(task, AdmittedRequest) else None
        model, has_deadline = task.spec.name, task.request.deadline_s is not None
        log_record.add(**request_fields(task.request, task.spec.fingerprint, self._log_prompts))
        with RequestOutcome(model, log_record, versions, has_deadline=has_deadline, shape=task.shape), quota:
            started = time.perf_counter()
            request = self._for_engine(task)
            answering = self.engine_pool.submitter.submit(request, on_update, task.data, log_record)
            if isinstance(task, AdmittedRequest):
                copier, own = self._copier(task), task.context.versions
                answering = self.submission.shadows.answer(task.spec, own, answering, copier, task.data)
            result = await answering
            generated = time.perf_counter()
            target = self.submission.versions.target_of(task.spec, versions)
            wanted = () if request.payload.upscaling else self._statistics.wanted(model)
            write = functools.partial(_write_files, task, target, wanted)
            shown = [image for image in result.images if not image.is_refused]
            files, values = await self._write(task, shown, write)
            if wanted:
                version = self.submission.versions.version_name(task.spec, versions)
                of_all = safety_values(result.images, wanted)
                values = [*request_values(task.request.payload, wanted), *values, *of_all]
                self._statistics.record(model, version, wanted, values, versions)
            facts, refused = divide(result.images)
            if refused:
                record_refusals(model, refused, len(result.images), log_record)
            done = time.perf_counter()
            if (span := current_span()).is_recording():
                now = time.time()
                self.tracer.start_span("postprocess", start_time=nanoseconds(now - (done - generated))).end(
                    nanoseconds(now)
                )
                span.set_attribute("noria.mean_batch", result.mean_batch)
            timings = ResponseTimings(
                **msgspec.structs.asdict(result.timings),
                postprocess_s=done - generated,
                total_s=done - started,
                predicted_s=result.predicted_s,
            )
            self._postprocess_s += _POSTPROCESS_WEIGHT * (timings.postprocess_s - self._postprocess_s)
            _record_metrics(task, timings, len(files))
            log_record.add(
                **msgspec.structs.asdict(timings), mean_batch=result.mean_batch, steps_run=result.num_steps_run
            )
            num_cut = max((image.num_truncated_tokens for image in result.images), default=0)
            return GenerationResult(
                task, files, facts, refused, timings, result.num_steps_run, result.mean_batch, num_cut
            )

    async def _write(
        self, task: ImageTask, images: Sequence[RawImage], write: Callable[[Sequence[RawImage]], Written]
    ) -> Written:
        """Return what `write` does, in threads."""
        if task.paste is None:
            in_context = contextvars.copy_context().run  # the executor does not pass the context on
            return await asyncio.get_running_loop().run_in_executor(self.write_threads, in_context, write, images)
        written = [await task.paste(image, write) for image in images]
        return [file for files, _ in written for file in files], [value for _, values in written for value in values]

    def _copier(self, admitted: AdmittedRequest) -> PrepareCopy:
        """Return what prepares the same request, with its seed, for another version of its model."""

        async def prepare(spec: ModelSpec) -> ImageRequest:
            assert isinstance(spec, DiffusionModelSpec), "versions of an endpoint are of one kind"
            payload = admitted.request.payload
            if payload.upscaling is not None:
                return msgspec.structs.replace(admitted.request, model_version=spec.fingerprint)
            body = msgspec.structs.replace(admitted.body, seed=payload.seed, stream=False, partial_images=0)
            if admitted.data is not None:  # pixels of this size
                body = msgspec.structs.replace(body, width=payload.width, height=payload.height)
            return validate(
                body,
                spec,
                self.config,
                admitted.request.request_id,
                _random_seed,
                folders=self.folders,
                images=admitted.images,
            )

        return prepare

    def _for_engine(self, task: ImageTask) -> ImageRequest:
        """Return a request with its trace and share, and its deadline reduced by the time to write the files."""
        changes = current_trace()
        if isinstance(task, AdmittedRequest):
            changes |= {"share_client": task.context.share.client, "share_weight": task.context.share.weight}
        if (deadline_s := task.request.deadline_s) is not None:
            changes["deadline_s"] = deadline_s - min(self._postprocess_s, 0.2 * deadline_s)  # at most a fifth
        return msgspec.structs.replace(task.request, **changes)

    async def as_base64(self, files: Sequence[bytes]) -> list[str]:
        """Return files, such as those of a result, in base64."""
        return await asyncio.get_running_loop().run_in_executor(self.write_threads, to_base64, files)


def _write_files(task: ImageTask, target: Target | None, wanted: Container[str], images: Sequence[RawImage]) -> Written:
    """Return the files, and the values of the `wanted` variables of their pixels."""
    metadata = (
        [metadata_for(task.request, task.spec, image.seed, target, image.safety_score) for image in images]
        if task.metadata
        else None
    )
    return write_images(images, task.file_format, task.quality, metadata), image_values(images, wanted)


def _record_metrics(task: ImageTask, timings: ResponseTimings, num_images: int) -> None:
    model = task.spec.name
    seconds: list[tuple[Histogram, float, tuple[str, ...]]] = [
        (declarations.REQUEST_SECONDS, timings.total_s, (model,)),
        (declarations.QUEUE_SECONDS, timings.queue_s, (model,)),
        *[(declarations.STAGE_SECONDS, getattr(timings, f"{stage}_s"), (model, stage)) for stage in _STAGES],
    ]
    add_all(
        (series(declarations.IMAGES, model), num_images),
        *[(series(histogram, *labels), amount) for histogram, amount, labels in seconds],
    )
    keep_exemplar(exemplar_labels(task.request.request_id), *seconds)
    if task.request.deadline_s is not None and timings.total_s > task.request.deadline_s:
        declarations.DEADLINES_MISSED.labels(model).inc()
