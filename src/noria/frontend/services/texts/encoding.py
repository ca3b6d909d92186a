"""Tokenizes texts and has an engine encode them, for every route of text models.

A request passes through `tokenization.py` (to token ids), `engines/pool.py` (to float32 numbers) and back to its route,
which knows what the numbers mean to its clients.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from opentelemetry.trace import Tracer, format_trace_id, get_current_span
from prometheus_client import Counter, Histogram

from noria.config import FrontendConfig
from noria.errors import (
    DeadlineExceeded,
    EmptyInput,
    InvalidField,
    NoriaError,
    UntokenizableText,
    WrongTask,
    short_repr,
)
from noria.frontend.access.quotas import ApiClient
from noria.frontend.engines.pool import EnginePool
from noria.frontend.services.submission import DEFAULT_MODEL_ALIAS, record_outcome, resolve_model, with_trace_context
from noria.frontend.services.texts.encoding_result import EncodingResult, EncodingTimings
from noria.frontend.services.texts.text_request import (
    TextRequestSettings,
    make_payload,
    pack_token_ids,
    with_prompt,
)
from noria.frontend.services.texts.tokenization import TokenizationThread
from noria.frontend.statistics.built_in import encoding_values
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.models.encoder.tokens import TextInput, TokenizedText, Tokenizer
from noria.observe.logs.request_log import current_log_record
from noria.observe.metrics import declarations, outcomes
from noria.observe.metrics.exposition import observe
from noria.observe.traces.tracer import GLOBAL_TRACER, nanoseconds
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import EngineRequest
from noria.protocol.text import EncoderModelSpec, EncoderTask, TextPayload, TextTimings

T = TypeVar("T")

_MAX_INLINE_NUMBERS = 16_384  # of a response that the event loop makes itself, in at most a millisecond

_NOT_SERVED = {
    "embedding": "an embedding model",
    "classification": "a classification model",
    "token_classification": "a model that classifies tokens",
    "reranking": "a reranking model",
}


class EncodingService:
    """Validates requests of texts and has them encoded."""

    def __init__(
        self,
        engine_pool: EnginePool,
        config: FrontendConfig,
        load_tokenizer: Callable[[EncoderModelSpec], Tokenizer],
        tracer: Tracer = GLOBAL_TRACER,
        statistics: StatisticsRecorder | None = None,
    ) -> None:
        self.engine_pool, self.config, self._tracer = engine_pool, config, tracer
        self._statistics = statistics or StatisticsRecorder()
        self._tokenization = TokenizationThread(load_tokenizer)
        engine_pool.on_models = self._load_tokenizers

    @property
    def models(self) -> Mapping[str, EncoderModelSpec]:
        """The text encoders, by name, the default one first; empty until an engine was ready."""
        return self.engine_pool.models_of(EncoderModelSpec)

    def find_model(self, name: str | None, tasks: Sequence[EncoderTask] = ()) -> EncoderModelSpec:
        """Return what `resolve_model` does. Records the request if it has none."""
        try:
            return self.resolve_model(name, tasks)
        except NoriaError as error:
            outcomes.count_request(None, error.code)
            current_log_record().add(
                model=name and short_repr(name), task=next(iter(tasks), None), outcome=error.code, error=error.message
            )
            raise

    def resolve_model(self, name: str | None, tasks: Sequence[EncoderTask] = ()) -> EncoderModelSpec:
        """Return the model named `name`, or the default one: the first of the first of `tasks` that has one.

        Without `tasks` a model of any will do.

        Raises:
            EngineUnavailable: no engine has been ready yet.
            ModelNotFound: no such model.
            WrongTask: the model is of another task.

        """
        spec = resolve_model(self.engine_pool, EncoderModelSpec, name)
        if not tasks or spec.task == tasks[0]:
            return spec
        is_chosen = name not in (None, DEFAULT_MODEL_ALIAS)
        if is_chosen and spec.task in tasks:
            return spec
        allowed = [each for task in tasks for each in self.models.values() if each.task == task]
        if allowed and not is_chosen:
            return self.engine_pool.versions.choose(allowed[0])
        needed = " or ".join(_NOT_SERVED[task] for task in tasks)
        raise WrongTask(
            f"model {spec.name!r} is {_NOT_SERVED[spec.task]}; this route needs {needed}: "
            f"{', '.join(repr(each.name) for each in allowed) or 'none is served here'}.",
            field="model",
        )

    def _load_tokenizers(self, specs: Iterable[ModelSpec]) -> None:
        """Load the tokenizers of new models before their first request."""
        for spec in specs:
            if isinstance(spec, EncoderModelSpec):
                self._tokenization.tokenize(spec, ()).add_done_callback(lambda done: done.exception())

    async def encode(
        self, settings: TextRequestSettings, tasks: Sequence[EncoderTask], api_client: ApiClient, request_id: str
    ) -> EncodingResult:
        """Tokenize the texts and encode them by a model of one of `tasks`. Cancelling it removes them from the engine.

        Raises:
            NoriaError: the request was rejected or failed.

        """
        started = time.perf_counter()
        spec = self.find_model(settings.model, tasks)
        deadline_ms, num_texts = settings.deadline_ms, settings.num_texts
        has_deadline = deadline_ms is not None
        with record_outcome(self.engine_pool, spec.name, has_deadline=has_deadline) as request_outcome:
            log_record = current_log_record()
            log_record.add(model=spec.name, model_version=spec.fingerprint, task=spec.task, num_texts=num_texts)
            self._check(settings, spec)
            priority = api_client.allowed_priority(settings.priority) or "normal"
            api_client.texts.check_rate(num_texts)
            api_client.texts.acquire(num_texts, time.monotonic(), self.engine_pool.backlog_s(spec))
            try:
                timeout_s = self.config.request_timeout_s if deadline_ms is None else deadline_ms / 1000
                texts = await self._tokenize_within(timeout_s, settings, spec)
                tokenized = time.perf_counter()
                payload = make_payload(texts, spec, settings)
                request_outcome.shape = _shape(num_texts, payload.num_tokens)
                deadline_s = None if deadline_ms is None else max(deadline_ms / 1000 - (tokenized - started), 0.001)
                log_record.add(
                    num_tokens=payload.num_tokens,
                    num_truncated=payload.num_truncated or None,
                    priority=priority if priority != "normal" else None,
                    deadline_s=None if deadline_ms is None else deadline_ms / 1000,
                )
                request = EngineRequest(
                    request_id,
                    spec.name,
                    payload,
                    self.config.request_timeout_s,
                    model_version=spec.fingerprint,
                    client=api_client.name or "",
                    priority=priority,
                    deadline_s=deadline_s,
                )
                answering = self.engine_pool.submit(with_trace_context(request))
                result = await self.engine_pool.shadows.answer(spec, answering, self._copier(settings, request_id))
            finally:
                api_client.texts.release(num_texts)
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
            _record_metrics(spec, timings, num_texts, request_id)
            log_record.add(
                tokenize_s=timings.tokenize_s,
                queue_s=timings.queue_s,
                infer_s=timings.infer_s,
                total_s=timings.total_s,
                predicted_s=timings.predicted_s,
                mean_batch=result.mean_batch,
            )
            done = EncodingResult(spec, numbers, final.num_rows, final.num_columns, texts, timings, result.mean_batch)
            if wanted := self._statistics.wanted(spec.name):
                version, is_normalized = self.engine_pool.versions.version_name(spec), payload.normalize
                inputs = () if settings.token_ids else settings.inputs
                values = encoding_values(spec, inputs, texts, done.rows, wanted, is_normalized=is_normalized)
                self._statistics.record(spec.name, version, wanted, values)
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
        self._record_span("postprocess", seconds)
        _bound(declarations.STAGE_SECONDS, result.spec.name, "postprocess").observe(seconds)
        current_log_record().add(postprocess_s=seconds)
        return made, result.headers(seconds)

    def _record_span(self, stage: str, seconds: float) -> None:
        """Record the span of a stage that has just ended."""
        if get_current_span().is_recording():
            now = time.time()
            span = self._tracer.start_span(stage, start_time=nanoseconds(now - seconds))
            span.end(nanoseconds(now))

    def _copier(
        self, settings: TextRequestSettings, request_id: str
    ) -> Callable[[ModelSpec], Awaitable[EngineRequest[TextPayload]]]:
        """Return what prepares the same request for another version of its model."""

        async def prepare(spec: ModelSpec) -> EngineRequest[TextPayload]:
            assert isinstance(spec, EncoderModelSpec), "versions of an endpoint are of one kind"
            payload = make_payload(await self.tokenize(settings, spec), spec, settings)
            return EngineRequest(
                request_id, spec.name, payload, self.config.request_timeout_s, model_version=spec.fingerprint
            )

        return prepare

    async def with_tokenizer(
        self,
        settings: TextRequestSettings,
        api_client: ApiClient,
        work: Callable[[Tokenizer, Sequence[TextInput]], T],
    ) -> T:
        """Return what `work` makes of the texts, their prompts before them, in the thread that tokenizes.

        Raises:
            NoriaError: the request was rejected, or a text cannot be tokenized.

        """
        spec = self.resolve_model(settings.model)
        self._check(settings, spec)
        api_client.texts.check_rate(settings.num_texts)
        api_client.texts.acquire(settings.num_texts, time.monotonic(), 0.0)
        try:
            inputs = with_prompt(settings, spec)
            return await self._tokenization.run(spec, lambda tokenizer: work(tokenizer, inputs))
        finally:
            api_client.texts.release(settings.num_texts)

    def _check(self, settings: TextRequestSettings, spec: EncoderModelSpec) -> None:
        """Check what needs no tokenizer. Raises InvalidField."""
        num_texts, max_texts, max_chars = settings.num_texts, self.config.max_texts, self.config.max_text_chars
        if not 1 <= num_texts <= max_texts:
            error_type = InvalidField if num_texts else EmptyInput
            raise error_type(f"the request has {num_texts} texts; allowed are 1 to {max_texts}.", field="input")
        for index, text in enumerate(settings.inputs):
            if not text:
                raise EmptyInput(f"text {index} is empty.", field="input")
            if not isinstance(text, str) and not all(text):
                raise EmptyInput(f"text {index} is a pair with an empty text.", field="input")
            num_chars = len(text) if isinstance(text, str) else max(map(len, text))
            if num_chars > max_chars:
                raise InvalidField(
                    f"text {index} has {num_chars} characters; allowed are at most {max_chars} "
                    "(frontend.max_text_chars). Split it.",
                    field="input",
                )
        self.check_options(settings, spec)

    def check_options(self, settings: TextRequestSettings, spec: EncoderModelSpec) -> None:
        """Check all but the texts. Raises InvalidField."""
        if settings.dimensions is not None and not 1 <= settings.dimensions <= spec.dimensions:
            raise InvalidField(
                f"dimensions is {short_repr(settings.dimensions)}; allowed for {spec.name} are 1 to {spec.dimensions}.",
                field="dimensions",
            )
        max_deadline_ms = int(self.config.request_timeout_s * 1000)
        if settings.deadline_ms is not None and not 1 <= settings.deadline_ms <= max_deadline_ms:
            raise InvalidField(
                f"deadline_ms is {settings.deadline_ms}; allowed are 1 to {max_deadline_ms}.", field="deadline_ms"
            )
        if settings.prompt_name is not None and settings.prompt_name not in dict(spec.prompts):
            names = ", ".join(name for name, _ in spec.prompts) or "none: the model has no prompts"
            raise InvalidField(
                f"prompt_name is {short_repr(settings.prompt_name)}; allowed are {names}.", field="prompt_name"
            )

    async def _tokenize_within(
        self, timeout_s: float, settings: TextRequestSettings, spec: EncoderModelSpec
    ) -> Sequence[TokenizedText]:
        """Return the texts as the model sees them. Raises InvalidField and DeadlineExceeded."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.tokenize(settings, spec)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the texts were not tokenized within {timeout_s:g} s.") from error
        finally:
            self._record_span("tokenize", time.perf_counter() - started)

    def close(self) -> None:
        """End the thread that tokenizes."""
        self._tokenization.close()

    async def tokenize(self, settings: TextRequestSettings, spec: EncoderModelSpec) -> Sequence[TokenizedText]:
        """Return the texts as the model sees them. Raises InvalidField."""
        texts: list[TokenizedText] = [
            pack_token_ids(
                ids, index, spec, settings.truncation_side, settings.type_ids[index] if settings.type_ids else b""
            )
            for index, ids in enumerate(settings.token_ids)
        ]
        if settings.inputs:
            inputs = with_prompt(settings, spec)
            texts += await self._tokenization.tokenize(spec, inputs, settings.truncation_side)
        if not all(text.num_tokens for text in texts):
            index = next(index for index, text in enumerate(texts) if not text.num_tokens)
            raise UntokenizableText(
                f"text {index} has no tokens: the tokenizer of {spec.name} leaves nothing of it. Send words.",
                field="input",
            )
        truncates = self.config.truncate_texts if settings.truncate is None else settings.truncate
        if not truncates:
            for index, text in enumerate(texts):
                if text.num_cut:
                    raise InvalidField(
                        f"text {index} has {text.num_tokens + text.num_cut} tokens; {spec.name} takes at most "
                        f"{spec.max_length}. Shorten it, or allow truncation.",
                        field="input",
                    )
        return texts


def _shape(num_texts: int, num_tokens: int) -> str:
    """Return what decides how long a request takes, roughly: powers of two."""
    return f"{num_texts.bit_length()}, {num_tokens.bit_length()}"


@functools.cache
def _bound(metric: Counter | Histogram, *labels: str) -> Any:
    return metric.labels(*labels)


def _record_metrics(spec: EncoderModelSpec, timings: EncodingTimings, num_texts: int, request_id: str) -> None:
    span = get_current_span().get_span_context()
    # The id of an unsampled trace would lead nowhere.
    exemplar = {"trace_id": format_trace_id(span.trace_id)} if span.trace_flags.sampled else {}
    exemplar["request_id"] = request_id
    _bound(declarations.TEXTS, spec.name).inc(num_texts)
    observe(declarations.REQUEST_SECONDS, timings.total_s, {"model": spec.name}, exemplar)
    _bound(declarations.QUEUE_SECONDS, spec.name).observe(timings.queue_s)
    for stage, seconds in (("tokenize", timings.tokenize_s), ("queue", timings.queue_s), ("infer", timings.infer_s)):
        _bound(declarations.STAGE_SECONDS, spec.name, stage).observe(seconds)
