"""Tokenizes the texts of a front end: short ones at once, the others in a thread, so that the event loop does not wait.

Passing a text to another thread and back costs as much as tokenizing some 100 tokens. Whenever the thread is free it
takes all texts that wait, and answers them together. It loads the tokenizer of a model when that is first used.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from noria.errors import InternalError, NoriaError, UntokenizableText
from noria.models.encoder.tokenizers.tokens import TextInput, TokenizedText, Tokenizer
from noria.observe.logs.log_record import fields
from noria.protocol.model_spec import ModelKey
from noria.protocol.text import EncoderModelSpec, TruncationSide

T = TypeVar("T")

# A request of less is tokenized at once, in half a millisecond. A text costs as much as 64 characters beside its own.
_MAX_INLINE_COST, _TEXT_COST = 1024, 64
_MAX_TEXTS = 256  # taken at once, unless one request has more: the first must not wait long for the last
_log = logging.getLogger("noria.frontend")


class _Job(NamedTuple):
    spec: EncoderModelSpec
    inputs: Sequence[TextInput]
    side: TruncationSide
    outcome: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop
    work: Callable[[Tokenizer], Any] | None = None  # instead of tokenizing `inputs`


class TokenizationThread:
    """Tokenizes for all requests of one process. Starts its thread with the first text."""

    def __init__(self, load: Callable[[EncoderModelSpec], Tokenizer]) -> None:
        """`load` loads the tokenizer of a model; it may raise."""
        self._load = load
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._tokenizers: dict[ModelKey, Tokenizer] = {}
        self._thread: threading.Thread | None = None

    def tokenize_now(
        self, spec: EncoderModelSpec, inputs: Sequence[TextInput], side: TruncationSide = "right"
    ) -> list[TokenizedText] | None:
        """Return what `tokenize` does, if that is sooner done than handed over; None if it is not.

        Raises:
            UntokenizableText: a text cannot be tokenized.

        """
        tokenizer = self._tokenizers.get(spec.key)
        if tokenizer is None or len(inputs) * _TEXT_COST > _MAX_INLINE_COST:
            return None
        num_chars = sum([len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in inputs])
        if num_chars + len(inputs) * _TEXT_COST > _MAX_INLINE_COST:
            return None
        try:
            return tokenizer.encode(inputs, side)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in `_tokenize`
            raise _as_noria_error(error, spec) from error

    def tokenize(
        self, spec: EncoderModelSpec, inputs: Sequence[TextInput], side: TruncationSide = "right"
    ) -> "asyncio.Future[list[TokenizedText]]":
        """Return the texts as the model sees them, one for each of `inputs`.

        The future raises UntokenizableText for a text that cannot be tokenized, InternalError if the tokenizer cannot
        be loaded.
        """
        return self._put(spec, inputs, side)

    def run(self, spec: EncoderModelSpec, work: Callable[[Tokenizer], T]) -> "asyncio.Future[T]":
        """Return what `work` makes with the tokenizer of a model. The future raises as that of `tokenize`."""
        return self._put(spec, work=work)

    def _put(
        self,
        spec: EncoderModelSpec,
        inputs: Sequence[TextInput] = (),
        side: TruncationSide = "right",
        work: Callable[[Tokenizer], Any] | None = None,
    ) -> "asyncio.Future[Any]":
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tokenizer", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        self._jobs.put(_Job(spec, inputs, side, outcome, loop, work))
        return outcome

    def close(self) -> None:
        """End the thread when it has tokenized what waits."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (first := self._jobs.get()) is not None:
            jobs, num_texts, is_last = [first], len(first.inputs), False
            with contextlib.suppress(queue.Empty):
                while num_texts < _MAX_TEXTS and not is_last:
                    job = self._jobs.get_nowait()
                    if job is None:
                        is_last = True
                    else:
                        jobs.append(job)
                        num_texts += len(job.inputs)
            jobs = [job for job in jobs if not job.outcome.done()]  # else it was cancelled
            if jobs:
                answers = list(zip(jobs, self._tokenize(jobs), strict=True))
                with contextlib.suppress(RuntimeError):  # the event loop is closed: no request waits
                    jobs[0].loop.call_soon_threadsafe(_deliver, answers)
            if is_last:
                return

    def _tokenize(self, jobs: list[_Job]) -> list[Any]:
        """Return the texts of each job, or what its work returns, or the error that there is instead."""
        first = jobs[0]
        if all(
            job.work is first.work is None and job.spec is first.spec and job.side == first.side for job in jobs[1:]
        ):
            try:
                if first.work is not None:
                    return [first.work(self._tokenizer(first.spec))]
                texts = iter(
                    self._tokenizer(first.spec).encode([text for job in jobs for text in job.inputs], first.side)
                )
                return [[next(texts) for _ in job.inputs] for job in jobs]
            except BaseException as error:  # `tokenizers` raises Exception, and for a panic in Rust BaseException
                if len(jobs) == 1:  # else one text may be at fault
                    return [_as_noria_error(error, first.spec)]
        return [self._tokenize([job])[0] for job in jobs]

    def _tokenizer(self, spec: EncoderModelSpec) -> Tokenizer:
        if spec.key not in self._tokenizers:
            try:
                self._tokenizers[spec.key] = self._load(spec)
            except BaseException as error:
                _log.exception(
                    "the tokenizer of %s cannot be loaded", spec.name, extra=fields(event="tokenizer_failed")
                )
                raise InternalError(
                    f"the tokenizer of {spec.name} cannot be loaded; the log has the details."
                ) from error
        return self._tokenizers[spec.key]


def _as_noria_error(error: BaseException, spec: EncoderModelSpec) -> NoriaError:
    if isinstance(error, NoriaError):
        return error
    return UntokenizableText(f"a text cannot be tokenized for {spec.name}: {error}.", field="input")


def _deliver(answers: list[tuple[_Job, Any]]) -> None:
    for job, answer in answers:
        if job.outcome.done():  # cancelled
            continue
        if isinstance(answer, NoriaError):
            job.outcome.set_exception(answer)
        else:
            job.outcome.set_result(answer)
