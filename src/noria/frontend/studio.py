"""What every route that makes images calls: a body becomes a checked wish, a wish becomes finished files. Knows no HTTP.

A wish's way: `admission.py` (bounds and defaults), `engine_link.py` (to pixels), `encoding.py` (to files).
"""

import asyncio
import contextlib
import contextvars
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
from msgspec import Struct

from noria.config import FrontendConfig
from noria.errors import (
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    NoriaError,
    RequestCancelled,
    RequestError,
    shown,
)
from noria.frontend.admission import admit
from noria.frontend.encoding import base64_texts, encode_images
from noria.frontend.engine_link import DrawnImage, EngineLink, Watch
from noria.frontend.keys import Caller
from noria.frontend.spans import describe
from noria.observe import metrics, outcomes
from noria.observe.exposition import observe
from noria.observe.requests import LogPrompts, current_note, said_of, said_of_prompt
from noria.observe.traces import ACTIVE, NO_TRACER, Tracer, record
from noria.parameters import of_request
from noria.request import ImageBody, ImageFormat, ImageRequest
from noria.spec import ModelSpec

_POSTPROCESS_WEIGHT = 0.1  # of one request
ALIAS = "noria"  # a name that is always served, for clients that cannot leave `model` out


class AnswerTimings(Struct, frozen=True):
    """Where the time went, in seconds. `encode_s` is the prompt's, `decode_s` latents to pixels, `postprocess_s` pixels to files.

    `predicted_s` is what the engine, when it accepted the request, thought that queue to decode would take together.
    """

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    postprocess_s: float
    total_s: float
    predicted_s: float


@dataclass(frozen=True)
class Wish:
    """A request that was admitted, and the form in which its images are wanted."""

    request: ImageRequest
    spec: ModelSpec
    file_format: ImageFormat
    quality: int | None  # the WebP's or JPEG's, 0 to 100; None is `encoding.py`'s own
    metadata: bool  # whether the files say how they were made
    caller: Caller | None = None  # whose images in flight they are; None for a job's, which nobody waits for


@dataclass(frozen=True)
class Drawing:
    """A wish and its finished files, ready to be answered in any protocol."""

    wish: Wish
    files: list[bytes]
    timings: AnswerTimings
    num_steps_run: int
    mean_batch: float  # images that shared its steps, itself included

    @property
    def request(self) -> ImageRequest:
        """What was drawn, defaults filled in."""
        return self.wish.request

    @property
    def headers(self) -> dict[str, str]:
        """What every answer with images carries, whatever its body."""
        stages = ("queue", "encode", "denoise", "decode", "postprocess", "predicted")
        spent = ", ".join(f"{stage};dur={getattr(self.timings, stage + '_s') * 1000:.1f}" for stage in stages)
        return {
            "X-Noria-Seed": str(self.request.seed),
            "X-Noria-Model": quote(self.wish.spec.name, safe="/:@+ "),  # a header bears neither é nor a line's end
            "X-Noria-Mean-Batch": f"{self.mean_batch:.2f}",
            "Server-Timing": spent,
        }


def _random_seed() -> int:
    return secrets.randbelow(2**32)  # short enough to survive JavaScript's numbers and copying by hand


class Studio:
    """Admits and draws, for every route and for jobs."""

    def __init__(
        self,
        link: EngineLink,
        config: FrontendConfig,
        draw_seed: Callable[[], int] = _random_seed,
        tracer: Tracer = NO_TRACER,
        log_prompts: LogPrompts = "off",
    ) -> None:
        self.link = link
        self.config = config
        self.tracer = tracer
        self._draw_seed, self._log_prompts = draw_seed, log_prompts
        self._postprocess_s = 0.0  # smoothed: what a request's files take once its pixels are there
        # Few: encoding is all CPU, and the engine wants the cores too.
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="encode")

    def spec(self, name: str | None = None) -> ModelSpec:
        """The model of that name; the first one served without a name, or by the alias.

        Raises:
            EngineUnavailable: no engine has told yet what it serves.
            ModelNotFound: naming those that are served.

        """
        models = self.link.models
        if not models:
            raise self.link.unavailable()
        if name is None or (name == ALIAS and name not in models):
            return next(iter(models.values()))
        if name not in models:
            served = ", ".join(repr(known) for known in models)
            raise ModelNotFound(
                f"model {shown(name)} is not served here; allowed are {served} (or leave it out, or say {ALIAS!r}).",
                field="model",
            )
        return models[name]

    def admit(self, body: ImageBody, caller: Caller, request_id: str, quality: int | None = None) -> Wish:
        """`body` with its defaults filled in and its bounds checked; raises `errors.RequestError` or EngineUnavailable."""
        try:
            spec = self.spec(body.model)
        except NoriaError as error:
            outcomes.count(None, error.code)
            self._note_refusal(body, None, error)
            raise
        try:
            request = admit(caller.permit(body), spec, self.config, request_id, self._draw_seed)
        except NoriaError as error:
            outcomes.count(spec.name, error.code)
            self._note_refusal(body, spec, error)
            raise
        describe(ACTIVE.get(), request)
        return Wish(request, spec, body.format, quality, body.metadata, caller)

    def _note_refusal(self, body: ImageBody, spec: ModelSpec | None, error: NoriaError) -> None:
        current_note().add(
            **said_of_prompt("prompt", body.prompt, self._log_prompts),
            model=body.model if spec is None else spec.name,
            model_version=None if spec is None else spec.fingerprint,
            n=body.n,
            scheduler=body.scheduler,
            steps=body.inference_steps,
            guidance=body.guidance_scale,
            seed=body.seed,
            outcome=error.code,
            error=error.message,
        )

    async def draw(self, wish: Wish, watch: Watch | None = None) -> Drawing:
        """The wish's files; `watch` hears of their way. A cancelled call leaves the engine at its next step.

        Raises:
            NoriaError: any refusal or failure.

        """
        current_note().add(**said_of(wish.request, wish.spec.fingerprint, self._log_prompts))
        with _counted(wish), self._aboard(wish):
            started = time.perf_counter()
            result = await self.link.submit(self._for_engine(wish.request), watch)
            drawn = time.perf_counter()
            loop = asyncio.get_running_loop()
            in_context = contextvars.copy_context().run  # no thread has it by itself
            files = await loop.run_in_executor(self._pool, in_context, _files, wish, result.images)
            done = time.perf_counter()
            span, now = ACTIVE.get(), time.time()
            record(self.tracer, "postprocess", span, now - (done - drawn), now)
            span.note({"noria.mean_batch": result.mean_batch})
            engine = msgspec.structs.asdict(result.timings)
            timings = AnswerTimings(
                **engine, postprocess_s=done - drawn, total_s=done - started, predicted_s=result.predicted_s
            )
            self._postprocess_s += _POSTPROCESS_WEIGHT * (timings.postprocess_s - self._postprocess_s)
            _record(wish, timings, len(files))
            current_note().add(
                **msgspec.structs.asdict(timings), mean_batch=result.mean_batch, steps_run=result.num_steps_run
            )
            return Drawing(wish, files, timings, result.num_steps_run, result.mean_batch)

    @contextlib.contextmanager
    def _aboard(self, wish: Wish) -> Iterator[None]:
        """Count the wish's images among its caller's; raises as `Caller.board` does."""
        if wish.caller is None:
            yield
            return
        wish.caller.board(wish.request.num_images, time.monotonic(), self.link.load.drain_s)
        try:
            yield
        finally:
            wish.caller.leave(wish.request.num_images)

    def _for_engine(self, request: ImageRequest) -> ImageRequest:
        """`request` on behalf of the span at work, with the deadline that the engine has to keep for the caller's to be kept.

        Files have to be made after it.
        """
        request = on_behalf(request)
        if request.deadline_s is None:
            return request
        # Whatever the files took lately, it never takes more than a fifth of what the caller allows.
        reserved_s = min(self._postprocess_s, 0.2 * request.deadline_s)
        return msgspec.structs.replace(request, deadline_s=request.deadline_s - reserved_s)

    async def in_base64(self, drawing: Drawing) -> list[str]:
        """The drawing's files as JSON carries them."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, base64_texts, drawing.files)


def on_behalf(request: ImageRequest) -> ImageRequest:
    """`request` as part of the trace of the span at work, if there is one."""
    context = ACTIVE.get().context
    if context is None:
        return request
    return msgspec.structs.replace(request, traceparent=context.traceparent, tracestate=context.tracestate)


def _files(wish: Wish, images: Sequence[DrawnImage]) -> list[bytes]:
    said = [of_request(wish.request, wish.spec, image.seed) for image in images] if wish.metadata else None
    return encode_images(images, wish.file_format, wish.quality, said)


@contextlib.contextmanager
def _counted(wish: Wish) -> Iterator[None]:
    """Count the request that runs inside, by its outcome. A job's may be drawn again: it is counted where the job ends (`jobs/ends.py`)."""
    outcome, is_mistake = InternalError.code, False
    started, note = time.perf_counter(), current_note()
    try:
        with metrics.INFLIGHT.track_inprogress():
            yield
        outcome = outcomes.OK
    except NoriaError as error:
        outcome, is_mistake = error.code, isinstance(error, RequestError)
        note.add(error=error.message)
        if outcome == DeadlineExceeded.code and wish.request.deadline_s is not None:
            metrics.DEADLINES_MISSED.labels(wish.spec.name).inc()
        raise
    except asyncio.CancelledError:
        outcome = RequestCancelled.code
        raise
    finally:
        span = ACTIVE.get()
        span.note({"noria.outcome": outcome})
        if outcome != outcomes.OK and not is_mistake:  # a stream's status tells nothing of it
            span.fail(outcome)
        if wish.caller is not None:
            outcomes.count(wish.spec.name, outcome)
        note.add(outcome=outcome)
        if outcome != outcomes.OK:  # else it is as the answer has it
            note.add(total_s=time.perf_counter() - started)


def _record(wish: Wish, timings: AnswerTimings, num_images: int) -> None:
    trace = ACTIVE.get().context
    who = {"trace_id": trace.trace_id} if trace is not None and trace.is_sampled else {}  # else it leads nowhere
    who["request_id"] = wish.request.request_id
    model = {"model": wish.spec.name}
    metrics.IMAGES.labels(wish.spec.name).inc(num_images)
    observe(metrics.REQUEST_SECONDS, timings.total_s, model, who)
    observe(metrics.QUEUE_SECONDS, timings.queue_s, model, who)
    for stage in ("queue", "encode", "denoise", "decode", "postprocess"):
        observe(metrics.STAGE_SECONDS, getattr(timings, f"{stage}_s"), {"stage": stage}, who)
    if wish.request.deadline_s is not None and timings.total_s > wish.request.deadline_s:
        metrics.DEADLINES_MISSED.labels(wish.spec.name).inc()
