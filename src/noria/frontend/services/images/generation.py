"""Validates requests and generates their images, for every route that makes images and for jobs.

A request passes through `request_validation.py` (limits and defaults), `engines/pool.py` (to pixels) and
`image_writer.py` (to files).
"""

import asyncio
import contextlib
import contextvars
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from opentelemetry.trace import Tracer, format_trace_id, get_current_span

from noria.config import FrontendConfig
from noria.errors import DeadlineExceeded, NoriaError
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.access.quotas import ApiClient
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.results import OnUpdate, RawImage
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult, ResponseTimings
from noria.frontend.services.images.image_writer import to_base64, write_images
from noria.frontend.services.images.request_validation import MAX_LORAS, NO_IMAGES, CompleteLoras, no_loras, validate
from noria.frontend.services.images.span_attributes import add_request_attributes
from noria.frontend.services.images.start_images import NUM_UPLOAD_THREADS, LoadFiles, StartImages, files_of
from noria.frontend.services.submission import record_outcome, resolve_model, with_trace_context
from noria.frontend.statistics.built_in import image_values, request_values
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.images.metadata import metadata_for
from noria.images.start_image import RequestImageFacts, RequestImages
from noria.models.controlnet_folders import ControlNetFolders
from noria.models.lora_folders import LoraFolders
from noria.models.refiner_folders import RefinerFolders
from noria.observe.logs.request_log import LogPrompts, current_log_record, prompt_fields, request_fields
from noria.observe.metrics import declarations, outcomes
from noria.observe.metrics.exposition import observe
from noria.observe.traces.tracer import GLOBAL_TRACER, nanoseconds
from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload, Lora
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest, ImageRequestBody
from noria.protocol.routes import Target
from noria.statistics.values import Values

_NUM_FILE_THREADS = 2  # that read LoRA files: not those for uploads, which take longer
_POSTPROCESS_WEIGHT = 0.1  # of the newest request in the smoothed time

Check = Callable[[ImageRequest, RequestImageFacts], None]
"""Raises NoriaError if the protocol of a validated request does not allow it with its images."""


def _random_seed() -> int:
    return secrets.randbits(32)  # exact in JavaScript's numbers, and short enough to copy by hand


class GenerationService:
    """Validates requests and generates their images."""

    def __init__(
        self,
        engine_pool: EnginePool,
        config: FrontendConfig,
        draw_seed: Callable[[], int] = _random_seed,
        tracer: Tracer = GLOBAL_TRACER,
        log_prompts: LogPrompts = "off",
        statistics: StatisticsRecorder | None = None,
        loras: LoraFolders | None = None,
        controlnets: ControlNetFolders | None = None,
        refiners: RefinerFolders | None = None,
    ) -> None:
        self.engine_pool = engine_pool
        self.loras, self.controlnets = loras or LoraFolders(()), controlnets or ControlNetFolders(())
        self.refiners = refiners or RefinerFolders(())
        self._statistics = statistics or StatisticsRecorder()
        self.config = config
        self.tracer = tracer
        self._draw_seed, self._log_prompts = draw_seed, log_prompts
        self.upload_threads = FairThreads(NUM_UPLOAD_THREADS)  # for work on the bodies of requests that have files
        self._file_threads = FairThreads(_NUM_FILE_THREADS)
        self._start_images = StartImages(config.max_image_bytes, self.upload_threads)
        self._postprocess_s = 0.0  # smoothed time from a request's pixels to its files
        # Few: writing images is CPU-bound, and the engine needs the cores too.
        self._thread_pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="write-image")

    @property
    def models(self) -> Mapping[str, DiffusionModelSpec]:
        """The models that generate images, by name, the default one first; empty until an engine was ready."""
        return self.engine_pool.models_of(DiffusionModelSpec)

    def list_models(self) -> list[DiffusionModelSpec]:
        """Return `models` as a list. Raises EngineUnavailable while it is empty."""
        if not self.models:
            raise self.engine_pool.unavailable_error(f"a {DiffusionModelSpec.kind} model")
        return list(self.models.values())

    def resolve_model(self, name: str | None = None) -> DiffusionModelSpec:
        """Return the model named `name`; the default model for None or `DEFAULT_MODEL_ALIAS`.

        Raises:
            EngineUnavailable: no engine has been ready yet, so the models are unknown, or none with the default model.
            ModelNotFound: no such model; names those that are served.

        """
        return resolve_model(self.engine_pool, DiffusionModelSpec, name)

    def find_model(self, name: str | None) -> DiffusionModelSpec | None:
        """Return the model named `name` as `resolve_model` does; None of one that this, and thus `admit`, rejects."""
        with contextlib.suppress(NoriaError):
            return self.resolve_model(name)
        return None

    async def admit(
        self,
        body: ImageRequestBody,
        api_client: ApiClient,
        request_id: str,
        quality: int | None = None,
        load_files: LoadFiles | None = None,
        *,
        client: str = "",
        is_job: bool = False,
        check: Check | None = None,
    ) -> AdmittedRequest:
        """Validate `body`, fill in defaults, read its images or those of `load_files` if the quota allows.

        `client` is who takes turns in reading, as `concurrency_limits.py` names it; `check` is called before pixels are
        decoded. A rejection is counted and logged. Raises RequestError or EngineUnavailable, and what `check` raises.
        """
        try:
            spec = self.resolve_model(body.model)
        except NoriaError as error:
            outcomes.count_request(None, error.code)
            self._log_rejection(body, None, error)
            raise
        started = time.monotonic()
        held = contextlib.ExitStack()  # of the quota, while images are read
        try:
            load_files = load_files or files_of(body)
            body = body.without_images()
            prioritised = api_client.apply_priority(body)
            images = None
            if load_files is not None:
                backlog_s, quota = self.engine_pool.backlog_s(spec), api_client.images
                held.enter_context(quota.hold(max(body.n, 1), time.monotonic(), backlog_s, in_flight=not is_job))
                images = await self._start_images.open(client, load_files)
            load_files = None  # it may hold the files
            facts = NO_IMAGES if images is None else images.facts
            complete_loras: CompleteLoras = no_loras
            if body.loras:
                found = await self._file_threads.run(client, self._find_loras, body.loras, spec.name)
                complete_loras = functools.partial(_return_or_raise, found)
            await self._read_folders(client, body, spec)
            request = validate(
                prioritised,
                spec,
                self.config,
                request_id,
                self._draw_seed,
                api_client.name or "",
                complete_loras,
                self.controlnets.complete,
                facts,
                self.refiners.complete,
            )
            if check is not None:
                check(request, facts)
            data = None
            if images is not None:
                request, data = await self._read_pixels(client, images, request, spec, started)
        except NoriaError as error:
            outcomes.count_request(spec.name, error.code)
            self._log_rejection(body, spec, error)
            raise
        finally:
            held.close()
        add_request_attributes(get_current_span(), request)
        return AdmittedRequest(request, spec, body.format, quality, body.metadata, api_client, body, facts, data)

    async def _read_pixels(
        self, client: str, images: RequestImages, request: ImageRequest, spec: DiffusionModelSpec, started: float
    ) -> tuple[ImageRequest, bytes]:
        """Return `request` with an earlier deadline, and its pixels. Raises DeadlineExceeded, before it begins, too."""
        _with_less_time(request, time.monotonic() - started)
        data = await self._start_images.pixels(client, images, request, spec)
        return _with_less_time(request, time.monotonic() - started), data

    async def _read_folders(self, client: str, body: ImageRequestBody, spec: DiffusionModelSpec) -> None:
        """Read the folders of ControlNets and of the refiner that `body` names, which are kept, in a thread."""
        if body.controls:
            await self._file_threads.run(client, self.controlnets.for_model, spec)
        if body.refiner is not None:
            await self._file_threads.run(client, self.refiners.for_model, spec)

    def _find_loras(self, loras: Sequence[Lora], model: str) -> tuple[Lora, ...] | NoriaError:
        """Return the LoRAs that the folders have now, or why not, for `validate` to raise in the order of fields."""
        try:
            return self.loras.complete(loras[:MAX_LORAS], model)
        except NoriaError as error:
            return error

    def _log_rejection(self, body: ImageRequestBody, spec: ModelSpec | None, error: NoriaError) -> None:
        current_log_record().add(
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

    async def generate(self, admitted: AdmittedRequest, on_update: OnUpdate | None = None) -> GenerationResult:
        """Generate the images and write their files. Calls `on_update` with progress and previews.

        Cancelling this call removes the request from the engine at its next step.

        Raises:
            NoriaError: the request was rejected or failed.

        """
        current_log_record().add(**request_fields(admitted.request, admitted.spec.fingerprint, self._log_prompts))
        has_deadline, is_job = admitted.request.deadline_s is not None, admitted.api_client is None
        with (
            record_outcome(
                self.engine_pool,
                admitted.spec.name,
                has_deadline=has_deadline,
                is_job=is_job,
                shape=_shape(admitted.request.payload),
            ),
            self._hold_quota(admitted),
        ):
            started = time.perf_counter()
            request, data = self._prepare_for_engine(admitted.request), admitted.data
            answering = self.engine_pool.submit(request, on_update, data)
            result = await self.engine_pool.shadows.answer(admitted.spec, answering, self._copier(admitted), data)
            generated = time.perf_counter()
            loop = asyncio.get_running_loop()
            in_context = contextvars.copy_context().run  # the executor does not pass the context on
            target = self.engine_pool.versions.target_of(admitted.spec)
            wanted = self._statistics.wanted(admitted.spec.name)
            files, image_values = await loop.run_in_executor(
                self._thread_pool, in_context, _write_files, admitted, result.images, target, wanted
            )
            if wanted:
                version = self.engine_pool.versions.version_name(admitted.spec)
                values = [*request_values(admitted.request.payload, wanted), *image_values]
                self._statistics.record(admitted.spec.name, version, wanted, values)
            done = time.perf_counter()
            now = time.time()
            self.tracer.start_span("postprocess", start_time=nanoseconds(now - (done - generated))).end(
                nanoseconds(now)
            )
            get_current_span().set_attribute("noria.mean_batch", result.mean_batch)
            engine_timings = msgspec.structs.asdict(result.timings)
            timings = ResponseTimings(
                **engine_timings, postprocess_s=done - generated, total_s=done - started, predicted_s=result.predicted_s
            )
            self._postprocess_s += _POSTPROCESS_WEIGHT * (timings.postprocess_s - self._postprocess_s)
            _record_metrics(admitted, timings, len(files))
            current_log_record().add(
                **msgspec.structs.asdict(timings), mean_batch=result.mean_batch, steps_run=result.num_steps_run
            )
            return GenerationResult(admitted, files, timings, result.num_steps_run, result.mean_batch)

    def _copier(self, admitted: AdmittedRequest) -> Callable[[ModelSpec], Awaitable[ImageRequest]]:
        """Return what prepares the same request, with its seed, for another version of its model."""

        async def prepare(spec: ModelSpec) -> ImageRequest:
            assert admitted.body is not None and isinstance(spec, DiffusionModelSpec), "jobs are not copied"
            payload = admitted.request.payload
            body = msgspec.structs.replace(admitted.body, seed=payload.seed, stream=False, partial_images=0)
            if admitted.data is not None:  # pixels of this size
                body = msgspec.structs.replace(body, width=payload.width, height=payload.height)
            return validate(
                body,
                spec,
                self.config,
                admitted.request.request_id,
                self._draw_seed,
                complete_loras=self.loras.complete,
                complete_controls=self.controlnets.complete,
                images=admitted.images,
                complete_refiner=self.refiners.complete,
            )

        return prepare

    @contextlib.contextmanager
    def _hold_quota(self, admitted: AdmittedRequest) -> Iterator[None]:
        """Count the request's images in its client's quota. Raises what `ApiClient.acquire` raises."""
        if admitted.api_client is None:
            yield
            return
        admitted.api_client.images.acquire(
            admitted.request.payload.n, time.monotonic(), self.engine_pool.backlog_s(admitted.spec)
        )
        try:
            yield
        finally:
            admitted.api_client.images.release(admitted.request.payload.n)

    def _prepare_for_engine(self, request: ImageRequest) -> ImageRequest:
        """Return `request` with the current trace context, its deadline reduced by the time to write the files."""
        request = with_trace_context(request)
        if request.deadline_s is None:
            return request
        # At most a fifth of the client's deadline, however long files took recently.
        reserved_s = min(self._postprocess_s, 0.2 * request.deadline_s)
        return msgspec.structs.replace(request, deadline_s=request.deadline_s - reserved_s)

    async def files_as_base64(self, result: GenerationResult) -> list[str]:
        """Return the result's files in base64."""
        return await asyncio.get_running_loop().run_in_executor(self._thread_pool, to_base64, result.files)


def _return_or_raise(found: tuple[Lora, ...] | NoriaError, *_: object) -> tuple[Lora, ...]:
    if isinstance(found, NoriaError):
        raise found
    return found


def _with_less_time(request: ImageRequest, seconds: float) -> ImageRequest:
    """Return `request` with a deadline, if it has one, that is earlier by the time that its images took so far.

    Raises:
        DeadlineExceeded: nothing is left.

    """
    if request.deadline_s is None:
        return request
    if seconds >= request.deadline_s:
        raise DeadlineExceeded(
            f"the deadline, {round(1000 * request.deadline_s)} ms after the request, passed after {1000 * seconds:.0f} "
            "ms of reading its images. Allow more time.",
            field="deadline_ms",
        )
    return msgspec.structs.replace(request, deadline_s=request.deadline_s - seconds)


def _shape(payload: DiffusionPayload) -> str:
    """Return what decides how long a request takes."""
    shape = f"{payload.width}x{payload.height}, {payload.num_steps} steps, {payload.n} images"
    if payload.controls:
        shape += f", {len(payload.controls)} controls"
    if payload.reference_images:
        shape += f", {payload.num_reference_pixels / 1e6:.1f} megapixels of references"
    return shape if payload.refiner is None else f"{shape}, refiner from {payload.refiner.start:g}"


def _write_files(
    admitted: AdmittedRequest, images: Sequence[RawImage], target: Target | None, wanted: Container[str]
) -> tuple[list[bytes], Values]:
    """Return the files, and the values of the `wanted` variables of their pixels."""
    metadata = (
        [metadata_for(admitted.request, admitted.spec, image.seed, target) for image in images]
        if admitted.metadata
        else None
    )
    return write_images(images, admitted.file_format, admitted.quality, metadata), image_values(images, wanted)


def _record_metrics(admitted: AdmittedRequest, timings: ResponseTimings, num_images: int) -> None:
    span = get_current_span().get_span_context()
    # The id of an unsampled trace would lead nowhere.
    exemplar = {"trace_id": format_trace_id(span.trace_id)} if span.trace_flags.sampled else {}
    exemplar["request_id"] = admitted.request.request_id
    model = {"model": admitted.spec.name}
    declarations.IMAGES.labels(admitted.spec.name).inc(num_images)
    observe(declarations.REQUEST_SECONDS, timings.total_s, model, exemplar)
    observe(declarations.QUEUE_SECONDS, timings.queue_s, model, exemplar)
    for stage in ("queue", "image_encode", "text_encode", "denoise", "decode", "postprocess"):
        observe(declarations.STAGE_SECONDS, getattr(timings, f"{stage}_s"), model | {"stage": stage}, exemplar)
    if admitted.request.deadline_s is not None and timings.total_s > admitted.request.deadline_s:
        declarations.DEADLINES_MISSED.labels(admitted.spec.name).inc()
