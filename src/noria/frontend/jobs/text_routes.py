"""`POST /v1/jobs/texts`, and the results of such jobs. All else about them is as for every job: `routes/jobs/`.

The body is a file of lines, read in pieces: neither it nor the results are ever in memory as a whole.
"""

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, get_args

import msgspec
from msgspec import Struct
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from noria.config import Config
from noria.errors import JobNotFound, JobsUnavailable, NoriaError, UnsupportedMediaType, short_repr
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.http.body import decode, stream_bytes
from noria.frontend.http.operations import Handler, JsonObject, Operation, Served, parameter
from noria.frontend.http.request_head import base_url
from noria.frontend.jobs.routes import (
    IDEMPOTENCY_KEY,
    JobRoutes,
    idempotency_key,
    job_id_of,
    owner_of,
    webhook_events,
)
from noria.frontend.jobs.running_jobs import RunningJobs
from noria.frontend.jobs.text_lines import LineFormat, LineLimits, TextLines
from noria.frontend.jobs.text_results import (
    JSONL,
    NPY,
    NPZ,
    ResultFormat,
    json_lines,
    npy_header,
    npz_pieces,
    pieces_of_texts,
)
from noria.frontend.protocols.openai.embeddings import MAX_DIMENSIONS
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.text_request import InputType, TextRequestSettings, role_of
from noria.jobs.records import RAGGED_FORMATS, RESULT_FORMATS, Job, JobRecord, NewJob, WantedEvent, new_job_id
from noria.jobs.stored_request import StoredTextRequest, TextJobRequest, deserialize, serialize
from noria.jobs.text_parts import TextPart
from noria.jobs.webhooks.url_check import MAX_URL_CHARS
from noria.observe.metrics import outcomes
from noria.observe.request_scope import current_span
from noria.observe.traces.tracer import trace_headers
from noria.protocol.text import EncoderModelSpec, EncoderTask

PATH = "/v1/jobs/texts"
TASKS: tuple[EncoderTask, ...] = (
    "embedding", "classification", "reranking", "sparse_embedding", "token_embedding"
)  # fmt: skip
"""The tasks of models that jobs are for."""
MEDIA_TYPES: Mapping[str, LineFormat] = {
    "text/plain": "text",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
}
MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT = 16, 4
UPLOAD_TIMEOUT_S = 600.0  # the default jobs.max_job_bytes at 112 kB/s
_RETRY_AFTER_S = 30.0
_USUAL_TOKENS = 128  # tokens of a text, and numbers of its sparse embedding
_MAX_JSON_NUMBERS = 65_536  # made into lines at once, in some milliseconds


class TextJobOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `POST /v1/jobs/texts`."""

    model: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    webhook: str | None = None
    webhook_events_filter: list[WantedEvent] | None = None


_LINES = {"type": "string", "pattern": r"^[^\r\n]+(\n[^\r\n]+)*\n?$"}  # no line is empty


def _parameters(served: Served) -> list[JsonObject]:
    """Return the fields of `TextJobOptions`, and a header; with the bounds of the model if it is known."""
    spec = served.embedding_spec
    prompts = None if spec is None else [name for name, _ in spec.prompts]
    prompt_name = [] if prompts == [] else [parameter("prompt_name", "query", **({"enum": prompts} if prompts else {}))]
    max_dimensions = MAX_DIMENSIONS if spec is None else spec.dimensions
    return [
        *prompt_name,
        parameter("model", "query"),
        parameter("dimensions", "query", type="integer", minimum=1, maximum=max_dimensions),
        parameter("normalize", "query", type="boolean"),
        parameter("truncate", "query", type="boolean"),
        parameter("input_type", "query", enum=list(get_args(InputType))),
        parameter("webhook", "query", format="uri", maxLength=MAX_URL_CHARS),
        parameter("webhook_events_filter", "query", type="array", items={"enum": list(get_args(WantedEvent))}),
        IDEMPOTENCY_KEY,
    ]


class TextJobRoutes:
    """The routes; `jobs` has the service that they use."""

    def __init__(
        self, jobs: JobRoutes, running_jobs: RunningJobs, encoding_service: EncodingService, config: Config
    ) -> None:
        self._accept, self._jobs = jobs.accept, running_jobs
        self._encoding_service, self._config = encoding_service, config
        self._uploads = ConcurrencyLimiter("uploads of texts", MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT, _RETRY_AFTER_S)

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        submit = Operation(
            method="POST",
            path=PATH,
            handler=self._texts,
            group="Jobs",
            scopes=("jobs",),
            summary="Submit a job of texts",
            description="The body has a text in each line: `text/plain`, or `application/jsonl` with a text, a pair of "
            "texts, or an object with `text` in each.",
            parameters=_parameters,
            body={
                media_type: _LINES if line_format == "text" else {} for media_type, line_format in MEDIA_TYPES.items()
            },
            response=Job,
            other_responses={202: ("accepted", Job)},
        )
        results = [
            Operation(
                method="GET",
                path=f"/v1/jobs/{{id}}/results.{each.name}",
                handler=self._results(each),
                group="Jobs",
                scopes=("jobs",),
                summary="Get the results of a job of texts",
                description="In the order of the texts, until the job's time to live is over.",
                parameters=[parameter("id", "path")],
                response={each.media_type: {}},
                errors=[JobNotFound, JobsUnavailable],
            )
            for each in (NPY, NPZ, JSONL)
        ]
        return [submit, *results]

    async def _texts(self, http: Request) -> Response:
        line_format, options = _line_format(http), _parse_options(http.query_params)
        context: RequestContext = http.state.context
        spec = self._encoding_service.find_model(options.model, context, TASKS)
        async with contextlib.AsyncExitStack() as stack:
            try:
                stack.enter_context(self._uploads.hold(context.client))
                self._check(options, spec)
                file, offload = await stack.enter_async_context(self._jobs.service.spool())
                lines = TextLines(line_format, self._limits(spec), _usual_numbers(options, spec), file)
                async for piece in stream_bytes(http, self._config.jobs.max_job_bytes, UPLOAD_TIMEOUT_S):
                    await offload(lines.feed, piece)
                await offload(lines.finish)
                context.api_client.texts.check_rate(lines.num_texts)
            except NoriaError as error:
                outcomes.count_request(spec.name, error.code)
                context.log_record.add(
                    model=spec.name,
                    model_version=spec.fingerprint,
                    task=spec.task,
                    outcome=error.code,
                    error=error.message,
                )
                raise
            job_input = {"endpoint": PATH, "num_texts": lines.num_texts} | {
                name: value
                for name, value in msgspec.structs.asdict(options).items()
                if value is not None and not name.startswith("webhook")
            }
            new_job = NewJob(
                id=new_job_id(),
                model=spec.name,
                version=spec.fingerprint,
                input=msgspec.json.encode(job_input),
                request=serialize(StoredTextRequest(_request(options, spec, lines))),
                base_url=base_url(http),
                priority="low",
                webhook=options.webhook,
                webhook_events=webhook_events(options.webhook_events_filter),
                made_by=context.api_client.name or "",
                client=context.client,
                idempotency_key=idempotency_key(http.headers),
                body_digest=hashlib.sha256(
                    msgspec.json.encode((line_format, options)) + lines.digest.digest()
                ).hexdigest(),
                text_bytes=lines.stored_bytes,
                chunks=file,
            )
            return await self._accept(http, new_job, context.api_client.texts, lines.num_texts)

    def _limits(self, spec: EncoderModelSpec) -> LineLimits:
        return LineLimits(
            self._config.jobs.max_job_texts, self._config.frontend.max_text_chars, not spec.task.endswith("embedding")
        )

    def _check(self, options: TextJobOptions, spec: EncoderModelSpec) -> None:
        settings = TextRequestSettings(
            dimensions=options.dimensions,
            normalize=options.normalize,
            prompt_name=options.prompt_name,
            role=role_of(options.input_type, None),
        )
        self._encoding_service.check_options(settings, spec)

    def _results(self, result_format: ResultFormat) -> Handler:

        async def results(http: Request) -> Response:
            record, parts = await self._jobs.service.parts(job_id_of(http), owner_of(http))
            stored = deserialize(record.request)
            assert isinstance(stored, StoredTextRequest), record.id
            formats = RAGGED_FORMATS if stored.request.is_ragged else RESULT_FORMATS
            if result_format.name not in formats:
                raise JobNotFound(
                    f"job {record.id} has no results.{result_format.name}: its results are in "
                    f"{' and '.join(f'results.{name}' for name in formats)}."
                )
            pieces = self._pieces(record, parts, stored.request, result_format)
            first = await anext(pieces)  # an error is a response of its own
            headers = {}
            if result_format is NPY:
                num_bytes = 4 * stored.request.num_texts * stored.request.num_columns
                headers["Content-Length"] = str(len(npy_header(stored.request)) + num_bytes)
            if http.method == "HEAD":
                await pieces.aclose()
                return Response(headers=headers, media_type=result_format.media_type)
            return StreamingResponse(_chain(first, pieces), headers=headers, media_type=result_format.media_type)

        return results

    async def _pieces(
        self, record: JobRecord, parts: list[TextPart], request: TextJobRequest, result_format: ResultFormat
    ) -> AsyncGenerator[bytes, None]:
        read = functools.partial(self._jobs.service.read_part, record.id)
        if result_format is NPZ:
            async with contextlib.aclosing(npz_pieces(read, parts, request)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        beginning, first_index = npy_header(request), 0
        for part in parts:
            content = await read(part)
            if result_format is NPY:
                yield beginning + content
                beginning = b""
                continue
            for num_texts, piece in pieces_of_texts(content, part.num_texts, request, _MAX_JSON_NUMBERS):
                yield await asyncio.to_thread(json_lines, piece, first_index, request)
                first_index += num_texts


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


def _line_format(http: Request) -> LineFormat:
    media_type = http.headers.get("content-type", "")
    line_format = MEDIA_TYPES.get(media_type.partition(";")[0].strip().lower())
    if line_format is None:
        raise UnsupportedMediaType(
            f"Content-Type is {short_repr(media_type)}; send text/plain, where each line is a text, or "
            "application/jsonl, where each line is a text in JSON."
        )
    return line_format


def _parse_options(query: QueryParams) -> TextJobOptions:
    fields: dict[str, Any] = dict(query)
    if "webhook_events_filter" in fields:
        fields["webhook_events_filter"] = query.getlist("webhook_events_filter")
    return decode(msgspec.json.encode(fields), TextJobOptions, strict=False)


def _usual_numbers(options: TextJobOptions, spec: EncoderModelSpec) -> int:
    """Return how many numbers the result of a text mostly has."""
    if spec.task == "sparse_embedding":
        return 2 * _USUAL_TOKENS
    return (options.dimensions or spec.dimensions) * (_USUAL_TOKENS if spec.task == "token_embedding" else 1)


def _request(options: TextJobOptions, spec: EncoderModelSpec, lines: TextLines) -> TextJobRequest:
    is_embedding = spec.task == "embedding"
    return TextJobRequest(
        task=spec.task,
        num_texts=lines.num_texts,
        num_chunks=lines.num_chunks,
        num_columns=options.dimensions or spec.dimensions,
        labels=() if is_embedding else spec.labels,
        activation="identity" if is_embedding else spec.activation,
        dimensions=options.dimensions,
        normalize=options.normalize,
        truncate=options.truncate,
        prompt_name=options.prompt_name,
        role=role_of(options.input_type, None),
        **trace_headers(current_span()),
    )
