"""`POST /v1/jobs/texts`, and the results of such jobs. All else about them is as for every job: `routes/jobs/`.

The body is a file of lines, read in pieces: neither it nor the results are ever in memory as a whole.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from opentelemetry.trace import get_current_span
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from noria.config import Config
from noria.errors import InvalidField, NoriaError, UnsupportedMediaType, short_repr
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter, client_id_of
from noria.frontend.access.quotas import ApiClient
from noria.frontend.http.body import decode, stream_bytes
from noria.frontend.routes.jobs.routes import JobRoutes, base_url, idempotency_key, job_id_of, owner_of, webhook_events
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.scores import activation_of
from noria.frontend.services.texts.text_request import TextRequestSettings
from noria.frontend.text_jobs.lines import LineFormat, LineLimits, TextLines
from noria.frontend.text_jobs.results import JSONL, NPY, ResultFormat, json_lines, npy_header
from noria.jobs.records import JobRecord, NewJob, new_job_id
from noria.jobs.stored_request import StoredTextRequest, TextJobRequest, deserialize, serialize
from noria.jobs.text_parts import TextPart
from noria.observe.logs.request_log import current_log_record
from noria.observe.metrics import outcomes
from noria.observe.traces.tracer import trace_headers
from noria.protocol.text import EncoderModelSpec, EncoderTask

PATH = "/v1/jobs/texts"
TASKS: tuple[EncoderTask, ...] = ("embedding", "classification", "reranking")
"""Whose results are one row for each text."""
MEDIA_TYPES: Mapping[str, LineFormat] = {
    "text/plain": "text",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
}
MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT = 16, 4
UPLOAD_TIMEOUT_S = 600.0  # the default jobs.max_job_bytes at 112 kB/s
_RETRY_AFTER_S = 30.0
_MAX_JSON_NUMBERS = 65_536  # made into lines at once, in some milliseconds


class TextJobOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `POST /v1/jobs/texts`."""

    model: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    webhook: str | None = None
    webhook_events_filter: list[Literal["start", "completed"]] | None = None


class TextJobRoutes:
    """The routes; `jobs` has the service that they use."""

    def __init__(self, jobs: JobRoutes, encoding_service: EncodingService, config: Config) -> None:
        self._jobs, self._encoding_service, self._config = jobs, encoding_service, config
        self._uploads = ConcurrencyLimiter("uploads of texts", MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT, _RETRY_AFTER_S)

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        results = [
            Route(f"/v1/jobs/{{id}}/results.{each.name}", self._results(each), methods=["GET"]) for each in (NPY, JSONL)
        ]
        return [Route(PATH, self.texts, methods=["POST"]), *results]

    async def texts(self, http: Request) -> Response:
        """Accept a job."""
        line_format, options = _line_format(http), _parse_options(http.query_params)
        api_client: ApiClient = http.state.api_client
        spec = self._encoding_service.find_model(options.model, TASKS)
        async with contextlib.AsyncExitStack() as stack:
            try:
                stack.enter_context(self._uploads.hold(client_id_of(http)))
                self._check(options, spec)
                file, offload = await stack.enter_async_context(self._jobs.service.spool())
                num_columns = options.dimensions or spec.dimensions
                lines = TextLines(line_format, self._limits(spec), num_columns, file)
                async for piece in stream_bytes(http, self._config.jobs.max_job_bytes, UPLOAD_TIMEOUT_S):
                    await offload(lines.feed, piece)
                await offload(lines.finish)
                api_client.texts.check_rate(lines.num_texts)
            except NoriaError as error:
                outcomes.count_request(spec.name, error.code)
                current_log_record().add(
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
                made_by=api_client.name or "",
                idempotency_key=idempotency_key(http.headers),
                body_digest=hashlib.sha256(
                    msgspec.json.encode((line_format, options)) + lines.digest.digest()
                ).hexdigest(),
                text_bytes=lines.stored_bytes,
                chunks=file,
            )
            return await self._jobs.accept(http, new_job, api_client.texts, lines.num_texts)

    def _limits(self, spec: EncoderModelSpec) -> LineLimits:
        return LineLimits(
            self._config.jobs.max_job_texts, self._config.frontend.max_text_chars, spec.task != "embedding"
        )

    def _check(self, options: TextJobOptions, spec: EncoderModelSpec) -> None:
        """Check the options for a model. Raises InvalidField."""
        for name in ("dimensions", "normalize"):
            if spec.task != "embedding" and getattr(options, name) is not None:
                raise InvalidField(f"{name} is for embeddings; {spec.name} is for {spec.task}.", field=name)
        settings = TextRequestSettings(dimensions=options.dimensions, prompt_name=options.prompt_name)
        self._encoding_service.check_options(settings, spec)

    def _results(self, result_format: ResultFormat) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of the results in one format."""

        async def results(http: Request) -> Response:
            record, parts = await self._jobs.service.parts(job_id_of(http), owner_of(http))
            stored = deserialize(record.request)
            assert isinstance(stored, StoredTextRequest), record.id
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
        beginning, first_index = npy_header(request), 0
        row_bytes = 4 * request.num_columns
        step = row_bytes * max(_MAX_JSON_NUMBERS // request.num_columns, 1)
        for part in parts:
            content = await self._jobs.service.read_part(record.id, part)
            if result_format is NPY:
                yield beginning + content
                beginning = b""
                continue
            for start in range(0, len(content), step):
                index = first_index + start // row_bytes
                yield await asyncio.to_thread(json_lines, content[start : start + step], index, request)
            first_index += part.num_texts


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
    """Return the options; raises InvalidField."""
    fields: dict[str, Any] = dict(query)
    if "webhook_events_filter" in fields:
        fields["webhook_events_filter"] = query.getlist("webhook_events_filter")
    return decode(msgspec.json.encode(fields), TextJobOptions, strict=False)


def _request(options: TextJobOptions, spec: EncoderModelSpec, lines: TextLines) -> TextJobRequest:
    is_embedding = spec.task == "embedding"
    return TextJobRequest(
        task=spec.task,
        num_texts=lines.num_texts,
        num_chunks=lines.num_chunks,
        num_columns=options.dimensions or spec.dimensions,
        labels=() if is_embedding else spec.labels,
        activation="identity" if is_embedding else activation_of(spec),
        dimensions=options.dimensions,
        normalize=options.normalize,
        truncate=options.truncate,
        prompt_name=options.prompt_name,
        **trace_headers(get_current_span()),
    )
