"""Executes jobs of texts: encodes their chunks, and stores the numbers of each as a part.

Requests with a waiting client come first. All jobs of a front end together have few texts in flight, in small pieces of
the lowest priority, of which only one is tokenized at a time; an engine takes them when nothing else waits for long.
"""

import array
import asyncio
import functools
import itertools
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from noria.errors import EngineUnavailable, GenerationFailed, QueueFull, RequestError
from noria.frontend.access.shares import job_client
from noria.frontend.engines.submission import RequestOutcome
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.scores import scores
from noria.frontend.services.texts.text_request import TextRequestSettings, make_payload, num_truncated
from noria.jobs.records import JobRecord
from noria.jobs.stored_request import StoredTextRequest, TextJobRequest, deserialize
from noria.jobs.text_parts import TextChunk, TextJobFiles, TextPart
from noria.jobs.worker import JobOutput
from noria.models.encoder.tokenizers.tokens import TextInput, TokenizedText
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import EngineRequest
from noria.protocol.text import EncoderModelSpec

MAX_PIECE_TEXTS, MAX_PIECE_CHARS = 32, 32_768  # tokenized in some 10 ms, for which a client's text may have to wait
_MAX_PIECES_IN_FLIGHT = 8
_NUM_JOBS = 4  # that run at once by default: they share what may be in flight
_CHUNKS_AT_ONCE = 2  # chunks of a job: one is encoded while the other is stored
_MAX_RETRY_S = 10.0


class EncodedPiece(NamedTuple):
    """Texts as the model sees them, and their results, one row after the other."""

    texts: Sequence[TokenizedText]
    numbers: "memoryview[float]"  # float32
    row_counts: Sequence[int]  # rows of each text


class TextProgress(msgspec.Struct, frozen=True):
    """The data of a `progress` event."""

    num_done: int
    num_texts: int


class TextJobExecutor:
    """Encodes the texts of jobs. Implements `jobs.worker.JobExecutor`."""

    def __init__(
        self,
        encoding_service: EncodingService,
        files: TextJobFiles,
        concurrency: int | Literal["auto"],
        weight: float,
    ) -> None:
        """`weight` is that of a key's jobs."""
        self._encoding_service, self._files, self._weight = encoding_service, files, weight
        self._capacity = _NUM_JOBS if concurrency == "auto" else concurrency
        self._in_flight = asyncio.Semaphore(_MAX_PIECES_IN_FLIGHT)
        self._tokenizing = asyncio.Lock()

    def available_models(self) -> set[ModelKey]:
        """Return the text encoders that can be used now."""
        return self._encoding_service.engine_pool.ready_models(EncoderModelSpec)

    def capacity(self) -> int:
        """Return how many jobs to run at once."""
        return self._capacity

    async def execute(
        self, record: JobRecord, report_progress: Callable[[bytes], None], log_record: RequestLogRecord
    ) -> JobOutput:
        """Encode the chunks that have no part yet. Calls `report_progress` with `TextProgress` as JSON."""
        stored = deserialize(record.request)
        assert isinstance(stored, StoredTextRequest), record.id
        spec = self._encoding_service.engine_pool.find_model(record.model, record.version)
        if not isinstance(spec, EncoderModelSpec):  # it changed after the claim
            raise EngineUnavailable(f"model {record.model!r} of version {record.version} is no longer served.")
        with RequestOutcome(record.model, log_record):
            encode = functools.partial(self._encode, record, spec, log_record)
            parts = await _Run(self._files, encode, record.id, stored.request, report_progress).encode_all()
            metrics = {
                "num_texts": stored.request.num_texts,
                "num_tokens": sum(part.num_tokens for part in parts),
                "num_truncated": sum(part.num_truncated for part in parts),
            }
            log_record.add(**metrics | {"num_truncated": metrics["num_truncated"] or None})
            return JobOutput((), "", metrics, [part.name for part in parts])

    async def _encode(
        self, record: JobRecord, spec: EncoderModelSpec, log_record: RequestLogRecord, settings: TextRequestSettings
    ) -> EncodedPiece:
        """Encode the texts of `settings`. Waits while queues are full. Raises NoriaError."""
        async with self._in_flight:
            async with self._tokenizing:
                texts = await self._encoding_service.tokenize(settings, spec)
            request = EngineRequest(
                record.id,
                spec.name,
                make_payload(texts, spec, settings),
                math.inf,
                model_version=spec.fingerprint,
                client=record.made_by,
                share_client=job_client(record.made_by),
                share_weight=self._weight,
                priority="low",
            )
            while True:
                try:
                    result = await self._encoding_service.engine_pool.submitter.submit(request, log_record=log_record)
                except QueueFull as error:
                    await asyncio.sleep(min(error.retry_after_s or 1.0, _MAX_RETRY_S))
                else:
                    break
        declarations.TEXTS.labels(spec.name).inc(len(texts))
        assert result.data is not None and result.final is not None
        counts: Sequence[int] = result.final.row_counts
        if spec.task == "token_embedding":
            counts = [text.num_tokens for text in texts]
        return EncodedPiece(texts, result.data.cast("B").cast("f"), counts or [1] * len(texts))  # both little-endian


class _Run:
    def __init__(
        self,
        files: TextJobFiles,
        encode: Callable[[TextRequestSettings], Awaitable[EncodedPiece]],
        job_id: str,
        request: TextJobRequest,
        report_progress: Callable[[bytes], None],
    ) -> None:
        self._files, self._encode, self._job_id, self._request = files, encode, job_id, request
        self._report_progress = report_progress
        self._num_done = 0
        self._settings = TextRequestSettings(
            dimensions=request.dimensions,
            normalize=request.normalize,
            truncate=request.truncate,
            prompt_name=request.prompt_name,
            role=request.role,
        )

    async def encode_all(self) -> list[TextPart]:
        """Return the parts of all chunks, in order; those that are not stored are encoded and stored."""
        parts = {part.number: part for part in await self._files.parts(self._job_id)}
        self._add_progress(sum(part.num_texts for part in parts.values()))
        missing = iter([number for number in range(self._request.num_chunks) if number not in parts])

        async def work() -> None:
            for number in missing:
                parts[number] = await self._encode_chunk(number)

        await _run_all(work() for _ in range(_CHUNKS_AT_ONCE))
        return [parts[number] for number in range(self._request.num_chunks)]

    async def _encode_chunk(self, number: int) -> TextPart:
        chunk = await self._files.chunk(self._job_id, number)
        rows: list[list[bytes]] = [[]] * len(chunk.texts)
        num_tokens = num_cut = 0

        async def encode(piece: Sequence[int]) -> None:
            nonlocal num_tokens, num_cut
            texts, numbers, counts = await self._encode_piece(chunk, piece)
            scored = await asyncio.to_thread(self._score, numbers) if self._request.labels else numbers
            content, row_bytes = scored.cast("B"), 4 * self._request.row_width
            starts = iter(range(0, len(content), row_bytes))
            for index, text, count in zip(piece, texts, counts, strict=True):
                own, skipped = itertools.islice(starts, count), frozenset(text.skipped)
                rows[index] = [
                    bytes(content[at : at + row_bytes]) for each, at in enumerate(own) if each not in skipped
                ]
            num_tokens += sum(text.num_tokens for text in texts)
            num_cut += num_truncated(texts)
            self._add_progress(len(piece))

        await _run_all(encode(piece) for piece in _pieces(chunk.texts))
        part = TextPart(number, len(rows), num_tokens, num_cut, self._request.is_ragged)
        beginning = array.array("f", map(len, rows)).tobytes() if part.is_ragged else b""
        await self._files.save_part(self._job_id, part, beginning + b"".join(itertools.chain(*rows)))
        return part

    async def _encode_piece(self, chunk: TextChunk, piece: Sequence[int]) -> EncodedPiece:
        """Encode the texts of these indices. Raises NoriaError, which names the line if one text is at fault."""
        settings = msgspec.structs.replace(self._settings, inputs=[chunk.texts[index] for index in piece])
        try:
            return await self._encode(settings)
        except (RequestError, GenerationFailed) as error:
            if len(piece) > 1:
                for index in piece:
                    await self._encode_piece(chunk, [index])
                raise
            line = f"line {chunk.first_line + piece[0]}"
            message, is_named = re.subn(r"^text 0\b", line, error.message)
            raise type(error)(message if is_named else f"{line}: {message}", field="body") from error

    def _score(self, logits: "memoryview[float]") -> "memoryview[float]":
        """Return the scores of the labels; takes a millisecond for a thousand."""
        width = self._request.num_columns
        rows = (logits[start : start + width].tolist() for start in range(0, len(logits), width))
        return memoryview(array.array("f", [score for row in rows for score in scores(row, self._request.activation)]))

    def _add_progress(self, num_texts: int) -> None:
        """Report at each whole percent: a long job has no more events than a short one."""
        total, before = self._request.num_texts, self._num_done
        self._num_done += num_texts
        if 100 * self._num_done // total > 100 * before // total:
            self._report_progress(msgspec.json.encode(TextProgress(self._num_done, total)))


def _pieces(texts: Sequence[TextInput]) -> list[list[int]]:
    """Return the indices of all texts in pieces of similar length, so that batches have little padding."""
    num_chars = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
    pieces: list[list[int]] = []
    chars_of_piece = 0
    for index in sorted(range(len(texts)), key=num_chars.__getitem__):
        if not pieces or len(pieces[-1]) >= MAX_PIECE_TEXTS or chars_of_piece + num_chars[index] > MAX_PIECE_CHARS:
            pieces.append([])
            chars_of_piece = 0
        pieces[-1].append(index)
        chars_of_piece += num_chars[index]
    return pieces


async def _run_all(coroutines: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all at once. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
