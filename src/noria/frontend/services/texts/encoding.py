"""Tokenizes texts and has an engine encode them, for every route of text models.

A request passes through `tokenization.py` (to token ids), `engines/retries.py` (to float32 numbers) and back to its
route, which knows what the numbers mean to its clients.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import asdict
from opentelemetry.trace import INVALID_SPAN, Tracer

from noria.config import FrontendConfig
from noria.errors import (
    DeadlineExceeded,
    EmptyInput,
    EngineUnavailable,
    InvalidField,
    NoriaError,
    UntokenizableText,
    WrongTask,
    short_repr,
)
from noria.errors.problems import Problems
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.access.quotas import InFlight
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.submission import DEFAULT_MODEL_ALIAS, RequestOutcome, Submission
from noria.frontend.services.counted_values import encoding_values
from noria.frontend.services.texts.encoding_result import EncodingResult, EncodingTimings
from noria.frontend.services.texts.image_inputs import ImageInputs, are_read_alike, with_images
from noria.frontend.services.texts.text_request import (
    TextRequestSettings,
    adapter_of,
    check_size,
    fit_to_role,
    length_limit,
    make_payload,
    pack_token_ids,
    with_prompt,
)
from noria.frontend.services.texts.tokenization import TokenizationThread
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.models.encoder.tokenizers.tokens import TextInput, TokenizedText, Tokenizer
from noria.observe.metrics import declarations, outcomes
from noria.observe.metrics.exemplars import exemplar_labels
from noria.observe.metrics.exposition import keep_exemplar, series
from noria.observe.metrics.section import add_all
from noria.observe.request_scope import current_span, current_trace
from noria.observe.traces.tracer import nanoseconds
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import EngineRequest
from noria.protocol.text import EncoderModelSpec, EncoderTask, TextPayload, TextTimings

T = TypeVar("T")

_MAX_INLINE_NUMBERS = 16_384  # numbers of a response that the event loop makes itself, in at most a millisecond


class EncodingService:
    """Validates requests of texts and has them encoded."""

    def __init__(
        self,
        submission: Submission,
        config: FrontendConfig,
        load_tokenizer: Callable[[EncoderModelSpec], Tokenizer],
        tracer: Tracer,
        statistics: StatisticsRecorder,
        threads: FairThreads,
    ) -> None:
        """`threads` are for work on the bodies of requests that have files."""
        self.submission, self.engine_pool, self.config = submission, submission.engine_pool, config
        self._tracer, self._statistics = tracer, statistics
        self._tokenization = TokenizationThread(load_tokenizer)
        self._image_inputs = ImageInputs(config.max_image_bytes, threads)
        self.engine_pool.on_models.append(self._load_tokenizers)

    @property
    def models(self) -> Mapping[str, EncoderModelSpec]:
        """The text encoders, by name, the default one first; empty until an engine was ready."""
        return self.engine_pool.models_of(EncoderModelSpec)

    def find_model(
        self, name: str | None, context: RequestContext, tasks: Sequence[EncoderTask] = ()
    ) -> EncoderModelSpec:
        """Return what `resolve_model` does. Records the request if it has none."""
        try:
            return self.resolve_model(name, context, tasks)
        except NoriaError as error:
            outcomes.count_request(None, error.code)
            context.log_record.add(
                model=name and short_repr(name), task=next(iter(tasks), None), outcome=error.code, error=error.message
            )
            raise

    def resolve_model(
        self, name: str | None, context: RequestContext, tasks: Sequence[EncoderTask] = ()
    ) -> EncoderModelSpec:
        """Return the model named `name`, or the default one: the first of the first of `tasks` that has one.

        Without `tasks` a model of any will do.

        Raises:
            EngineUnavailable: no engine has been ready yet.
            ModelNotFound: no such model.
            WrongTask: the model is of another task.

        """
        spec = self.submission.resolve_model(EncoderModelSpec, name, tasks, context.versions)
        if not tasks or spec.task == tasks[0]:
            return spec
        is_chosen = name not in (None, "", DEFAULT_MODEL_ALIAS)
        if is_chosen and spec.task in tasks:
            return spec
        allowed = [each for task in tasks for each in self.models.values() if each.task == task]
        if allowed and not is_chosen:
            return self.submission.versions.choose(allowed[0], context.versions)
        raise WrongTask(self.submission.misfit(EncoderModelSpec, spec, tasks), field="model")

    def _load_tokenizers(self, specs: Iterable[ModelSpec]) -> None:
        """Load the tokenizers of new models before their first request."""
        for spec in specs:
            if isinstance(spec, EncoderModelSpec):
                self._tokenization.tokenize(spec, ()).add_done_callback(lambda done: done.exception())

    async def encode(
        self,
        settings: TextRequestSettings,
        tasks: Sequence[EncoderTask],
        context: RequestContext,
        on_read: Callable[[], None] = lambda: None,
    ) -> EncodingResult:
        """Tokenize the texts and encode them by a model of one of `tasks`. Cancelling it removes them from the engine.

        `on_read` is called when the files of images are read and no longer held.

        Raises:
            NoriaError: the request was rejected or failed.

        """
        started = time.perf_counter()
        spec = self.find_model(settings.model, context, tasks)
        api_client, log_record, versions = context.api_client, context.log_record, context.versions
        deadline_ms, num_texts = settings.deadline_ms, settings.num_texts
        with RequestOutcome(spec.name, log_record, versions, has_deadline=deadline_ms is not None) as request_outcome:
            log_record.add(model=spec.name, model_version=spec.fingerprint, task=spec.task, num_texts=num_texts)
            self._check(settings, spec)
            priority = api_client.allowed_priority(settings.priority) or "normal"
            backlog_s = functools.partial(self.engine_pool.reports.backlog_s, spec)
            with (
                InFlight(api_client.texts, num_texts, time.monotonic(), backlog_s),
                self._image_inputs.counted(context.client, settings.images, spec),
            ):
                timeout_s = self.config.request_timeout_s if deadline_ms is None else deadline_ms / 1000
                texts = with_images(await self.tokenize(settings, spec, timeout_s), settings.images, spec)
                pixels = await self._image_inputs.pixels(context.client, settings.images, spec, timeout_s)
                settings = settings.without_images()
                on_read()
                tokenized = time.perf_counter()
                payload = make_payload(texts, spec, settings)
                check_size(payload, spec, is_dense=settings.is_dense)
                request_outcome.shape = functools.partial(_shape, num_texts, payload.num_tokens)
                deadline_s = None if deadline_ms is None else max(deadline_ms / 1000 - (tokenized - started), 0.001)
                log_record.add(
                    num_tokens=payload.num_tokens,
                    num_truncated=payload.num_truncated or None,
                    priority=priority if priority != "normal" else None,
                    deadline_s=None if deadline_ms is None else deadline_ms / 1000,
                )
                request = EngineRequest(
                    context.request_id,
                    spec.name,
                    payload,
                    self.config.request_timeout_s,
                    model_version=spec.fingerprint,
                    client=api_client.name or "",
                    share_client=context.share.client,
                    share_weight=context.share.weight,
                    priority=priority,
                    deadline_s=deadline_s,
                    **current_trace(),
                )
                answering = self.engine_pool.submitter.submit(request, data=pixels, log_record=log_record)
                result = await self.submission.shadows.answer(
                    spec, versions, answering, functools.partial(self._copy, settings, context.request_id, spec), pixels
                )
            assert isinstance(result.timings, TextTimings) and result.final is not None and result.data is not None
            numbers, final = result.data.cast("B").cast("f"), result.final  # both sides are little-endian
            assert len(numbers) == final.num_rows * final.num_columns
            timings = EncodingTimings(
                tokenized - started,
                result.timings.queue_s,
                result.timings.infer_s,
                time.perf_counter() - started,
                result.predicted_s,
            )
            if deadline_ms is not None and 1000 * timings.total_s > deadline_ms:
                declarations.DEADLINES_MISSED.labels(spec.name).inc()
            _record_metrics(spec, timings, num_texts, context.request_id)
            log_record.add(**asdict(timings), mean_batch=result.mean_batch)
            shape, counts = (final.num_rows, final.num_columns), (payload.num_tokens, payload.num_truncated)
            done = EncodingResult(
                spec, numbers, *shape, texts, *counts, timings, result.mean_batch, log_record, final.row_counts
            )
            if wanted := self._statistics.wanted(spec.name):
                version, is_normalized = self.submission.versions.version_name(spec, versions), payload.normalize
                inputs = () if settings.token_ids or settings.images else settings.inputs
                values = encoding_values(spec, inputs, texts, done.row, wanted, is_normalized=is_normalized)
                self._statistics.record(spec.name, version, wanted, values, versions)
            return done

    async def respond(
        self, result: EncodingResult, make: Callable[[], T], weight: int = 1
    ) -> tuple[T, Mapping[str, str]]:
        """Return what `make` makes of the numbers, and the response's headers; records this stage, `postprocess`.

        `make` runs in a thread if it would hold up the event loop for a millisecond. `weight` is how many times as long
        it takes for a number as for one of an embedding.
        """
        started = time.perf_counter()
        is_large = len(result.numbers) * weight > _MAX_INLINE_NUMBERS
        made = await asyncio.to_thread(make) if is_large else make()
        seconds = time.perf_counter() - started
        if current_span() is not INVALID_SPAN:
            self._record_span("postprocess", seconds)
        add_all((series(declarations.STAGE_SECONDS, result.spec.name, "postprocess"), seconds))
        result.log_record.add(postprocess_s=seconds)
        return made, result.headers(seconds)

    def _record_span(self, stage: str, seconds: float) -> None:
        if current_span().is_recording():
            now = time.time()
            span = self._tracer.start_span(stage, start_time=nanoseconds(now - seconds))
            span.end(nanoseconds(now))

    async def _copy(
        self, settings: TextRequestSettings, request_id: str, original: EncoderModelSpec, spec: ModelSpec
    ) -> EngineRequest[TextPayload]:
        """Return the same request for `spec`, another version of its model `original`.

        Raises EngineUnavailable: the versions see images of another size or cut, and the pixels are those of one.
        """
        assert isinstance(spec, EncoderModelSpec), "versions of an endpoint are of one kind"
        if settings.images and not are_read_alike(spec, original):
            raise EngineUnavailable(f"{spec.name} does not read images as {original.name} does.")
        texts = with_images(await self.tokenize(settings, spec), settings.images, spec)
        payload = make_payload(texts, spec, settings)
        return EngineRequest(
            request_id, spec.name, payload, self.config.request_timeout_s, model_version=spec.fingerprint
        )

    async def with_tokenizer(
        self,
        settings: TextRequestSettings,
        context: RequestContext,
        work: Callable[[Tokenizer, Sequence[TextInput]], T],
    ) -> T:
        """Return what `work` makes of the texts, their prompts before them, in the thread that tokenizes.

        With a template, which takes pairs, the texts are as they are given.

        Raises:
            NoriaError: the request was rejected, or a text cannot be tokenized.

        """
        spec, quota = self.resolve_model(settings.model, context), context.api_client.texts
        self._check(settings, spec)
        with InFlight(quota, settings.num_texts, time.monotonic(), lambda: 0.0):
            inputs = with_prompt(settings, spec) if spec.template is None else settings.inputs
            return await self._tokenization.run(spec, lambda tokenizer: work(tokenizer, inputs))

    def _check(self, settings: TextRequestSettings, spec: EncoderModelSpec) -> None:
        """Check what needs no tokenizer. Raises InvalidField."""
        num_texts, max_texts = settings.num_texts - settings.is_ranking, self.config.max_texts
        max_chars = self.config.max_text_chars
        if not 1 <= num_texts <= max_texts:
            error_type = InvalidField if num_texts else EmptyInput
            raise error_type(f"the request has {num_texts} texts; allowed are 1 to {max_texts}.", field="input")
        for index, text in enumerate(settings.inputs):
            if not text:
                raise EmptyInput(f"{settings.name(index)} is empty.", field="input")
            if not isinstance(text, str) and not all(text):
                raise EmptyInput(f"{settings.name(index)} is a pair with an empty text.", field="input")
            num_chars = len(text) if isinstance(text, str) else max(map(len, text))
            if num_chars > max_chars:
                raise InvalidField(
                    f"{settings.name(index)} has {num_chars} characters; allowed are at most {max_chars} "
                    "(frontend.max_text_chars). Split it.",
                    field="input",
                )
        self.check_options(settings, spec)

    def check_options(self, settings: TextRequestSettings, spec: EncoderModelSpec) -> None:
        """Check all but the texts. Raises InvalidField, of all options that are wrong."""
        problems = Problems()
        for name in ("dimensions", "normalize") if spec.task != "embedding" else ():
            if getattr(settings, name) is not None:
                message = f"{name} is for embeddings of texts; {spec.name} is for {spec.task}."
                problems.add(InvalidField(message, field=name))
        dimensions = settings.dimensions if spec.task == "embedding" else None
        if dimensions is not None and not 1 <= dimensions <= spec.dimensions:
            allowed = f"allowed for {spec.name} are 1 to {spec.dimensions}"
            problems.add(InvalidField(f"dimensions is {short_repr(dimensions)}; {allowed}.", field="dimensions"))
        max_deadline_ms = int(self.config.request_timeout_s * 1000)
        if settings.deadline_ms is not None and not 1 <= settings.deadline_ms <= max_deadline_ms:
            allowed = f"allowed are 1 to {max_deadline_ms}"
            problems.add(InvalidField(f"deadline_ms is {settings.deadline_ms}; {allowed}.", field="deadline_ms"))
        if settings.prompt_name is not None and settings.prompt_name not in dict(spec.prompts):
            names = ", ".join(name for name, _ in spec.prompts) or "none: the model has no prompts"
            message = f"prompt_name is {short_repr(settings.prompt_name)}; allowed are {names}."
            problems.add(InvalidField(message, field="prompt_name"))
        problems.attempt(lambda: adapter_of(settings, spec), 0)
        fields = () if spec.template is None else spec.template.fields
        if settings.instruction is not None and "instruction" not in fields:
            message = f"instruction is for rerankers whose template has one; {spec.name} has none."
            problems.add(InvalidField(message, field="instruction"))
        elif settings.instruction is not None and len(settings.instruction) > self.config.max_text_chars:
            message = (
                f"instruction has {len(settings.instruction)} characters; allowed are at most "
                f"{self.config.max_text_chars} (frontend.max_text_chars)."
            )
            problems.add(InvalidField(message, field="instruction"))
        problems.raise_all()

    def close(self) -> None:
        """End the thread that tokenizes."""
        self._tokenization.close()

    async def tokenize(
        self, settings: TextRequestSettings, spec: EncoderModelSpec, timeout_s: float | None = None
    ) -> Sequence[TokenizedText]:
        """Return the texts as the model sees them. Raises InvalidField and DeadlineExceeded."""
        started, side = time.perf_counter(), settings.truncation_side or spec.truncation_side
        texts: list[TokenizedText] = [
            pack_token_ids(ids, index, spec, side, settings.type_ids[index] if settings.type_ids else b"")
            for index, ids in enumerate(settings.token_ids)
        ]
        if settings.inputs:
            inputs = with_prompt(settings, spec)
            tokenized = self._tokenization.tokenize_now(spec, inputs, side)
            if tokenized is None:
                try:
                    async with asyncio.timeout(timeout_s):
                        tokenized = await self._tokenization.tokenize(spec, inputs, side)
                except TimeoutError as error:
                    self._record_span("tokenize", time.perf_counter() - started)
                    raise DeadlineExceeded(f"the texts were not tokenized within {timeout_s:g} s.") from error
            if spec.late_interaction is not None:
                tokenized = [
                    fit_to_role(text, settings.role_at(index), spec) if text.num_tokens else text
                    for index, text in enumerate(tokenized)
                ]
            texts += tokenized
        if current_span() is not INVALID_SPAN:
            self._record_span("tokenize", time.perf_counter() - started)
        truncates = self.config.truncate_texts if settings.truncate is None else settings.truncate
        for index, text in enumerate(texts):
            if not text.num_tokens:
                raise UntokenizableText(
                    f"{settings.name(index)} has no tokens: the tokenizer of {spec.name} leaves nothing of it. Send "
                    "words.",
                    field="input",
                )
            if text.num_cut and not truncates:
                limit = spec.max_length if settings.token_ids else length_limit(settings.role_at(index), spec)
                raise InvalidField(
                    f"{settings.name(index)} has {text.num_tokens + text.num_cut} tokens; {spec.name} takes at most "
                    f"{limit}. Shorten it, or allow truncation.",
                    field="input",
                )
        return texts


def _shape(num_texts: int, num_tokens: int) -> str:
    """Return what decides how long a request takes, roughly: powers of two."""
    return f"{num_texts.bit_length()}, {num_tokens.bit_length()}"


@functools.cache
def _series(model: str) -> list[Any]:
    """Return the series of a model's texts, its requests' seconds and those of three stages, and of the queue."""
    stages = [series(declarations.STAGE_SECONDS, model, stage) for stage in ("tokenize", "queue", "infer")]
    request, queue = (series(each, model) for each in (declarations.REQUEST_SECONDS, declarations.QUEUE_SECONDS))
    return [series(declarations.TEXTS, model), request, queue, *stages]


def _record_metrics(spec: EncoderModelSpec, timings: EncodingTimings, num_texts: int, request_id: str) -> None:
    queue_s, total_s = timings.queue_s, timings.total_s
    amounts = num_texts, total_s, queue_s, timings.tokenize_s, queue_s, timings.infer_s
    add_all(*zip(_series(spec.name), amounts, strict=True))
    keep_exemplar(exemplar_labels(request_id), (declarations.REQUEST_SECONDS, total_s, (spec.name,)))
