"""`/v1/jobs`: image requests that nobody waits for. What is here is HTTP; `noria.jobs` keeps them and has them drawn."""

import asyncio
import base64
import binascii
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.config import Config
from noria.errors import InvalidField, JobNotFound, NoriaError, short_repr
from noria.frontend.http import sse
from noria.frontend.http.body import JsonBodyReader, decode
from noria.frontend.http.error_body import error_body
from noria.frontend.http.quotas import ApiClient
from noria.frontend.routes.openai_images import GenerationsRequestBody, admit_generation
from noria.frontend.services.admission import apply_headers
from noria.frontend.services.generation import AdmittedRequest, GenerationService
from noria.frontend.services.job_executor import GenerationJobExecutor, serialize_request
from noria.jobs.records import (
    TERMINAL_STATUSES,
    WEBHOOK_EVENTS,
    Job,
    JobEvent,
    JobRecord,
    NewJob,
    StatusEventData,
    WebhookEvent,
    as_job,
    new_job_id,
)
from noria.jobs.service import JobService
from noria.observe.metrics import outcomes
from noria.protocol.request import ImageRequestBody

ENDPOINTS = ("/t2i", "/v1/images/generations")
DEFAULT_LIMIT, MAX_LIMIT = 20, 100

_POLL_INTERVAL_S = 0.5  # as often as progress is written down at most
_KEEP_ALIVE_S = 15.0
_IDEMPOTENCY_KEY_PATTERN = re.compile(r"[!-~]{1,255}")


class JobRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/jobs`."""

    input: dict[str, Any]
    webhook: str | None = None
    webhook_events_filter: list[Literal["start", "completed"]] | None = None


class JobList(Struct, frozen=True):
    """One page of `GET /v1/jobs`, newest first."""

    results: list[Job]
    next: str | None  # the next page's address


class JobRoutes:
    """The routes under /v1/jobs. They answer between `start` and `stop`."""

    def __init__(
        self,
        generation_service: GenerationService,
        body_reader: JsonBodyReader,
        config: Config,
        open_service: Callable[[], JobService],
    ) -> None:
        self._generation_service, self._body_reader, self._config, self._open_service = (
            generation_service,
            body_reader,
            config,
            open_service,
        )
        self._started_service: JobService | None = None
        self._draining = asyncio.Event()

    @property
    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/jobs", self.jobs, methods=["GET", "POST"]),
            Route("/v1/jobs/{id}", self.job, methods=["GET", "DELETE"]),
            Route("/v1/jobs/{id}/events", self.events),
            Route("/v1/jobs/{id}/images/{index}", self.image),
        ]

    async def start(self) -> None:
        """Begin to work on jobs. Raises ConfigError."""
        self._started_service = await asyncio.to_thread(self._open_service)
        executor = GenerationJobExecutor(
            self._generation_service, self._config.jobs.concurrency, self._config.frontend.processes
        )
        await self._started_service.start(executor)

    def drain(self) -> None:
        """Claim no more jobs, and end the streams of events: the process is about to stop."""
        self._draining.set()
        if self._started_service is not None:
            self._started_service.drain()

    async def stop(self) -> None:
        """Hand back what is being drawn."""
        await self._service.stop()

    @property
    def _service(self) -> JobService:
        assert self._started_service is not None, "the routes are served after `start`"
        return self._started_service

    async def jobs(self, http: Request) -> Response:
        """POST accepts a job; GET lists them."""
        return await (self._accept(http) if http.method == "POST" else self._list(http))

    async def _accept(self, http: Request) -> Response:
        body = await self._body_reader.read_json(http, JobRequestBody)
        api_client: ApiClient = http.state.caller
        job_id = new_job_id()
        admitted = admit_input(self._generation_service, body.input, api_client, job_id, http.headers)
        events = body.webhook_events_filter
        new_job = NewJob(
            id=job_id,
            model=admitted.spec.name,
            version=admitted.spec.fingerprint,
            input=msgspec.json.encode(body.input | {"seed": admitted.request.seed}),
            request=serialize_request(admitted),
            base_url=str(http.base_url),
            priority=admitted.request.priority,
            webhook=body.webhook,
            webhook_events=WEBHOOK_EVENTS if events is None else _in_order(events),
            made_by=api_client.name or "",
            idempotency_key=_idempotency_key(http.headers),
            body_digest=hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest(),
        )
        job = as_job(await self._store(new_job, admitted, api_client))
        http.state.job_id = job.id  # for the log
        return _json_response(job, 202 if job.id == job_id else 200, {"Location": job.urls.get})

    async def _store(self, new_job: NewJob, admitted: AdmittedRequest, api_client: ApiClient) -> JobRecord:
        """The job, or the one that its key has made before. A refusal is counted here; what is kept is counted when it has ended."""
        num_images, is_new = admitted.request.num_images, False
        try:
            api_client.charge(num_images, time.monotonic())
            try:
                record, is_new = await self._service.accept(new_job)
            finally:
                if not is_new:
                    api_client.refund(num_images)
        except NoriaError as error:
            outcomes.count_request(new_job.model, error.code)
            raise
        return record

    async def _list(self, http: Request) -> Response:
        limit = _parse_limit(http.query_params.get("limit"))
        records = await self._service.page(limit + 1, _parse_cursor(http.query_params.get("cursor")), _owner(http))
        next_url = None
        if len(records) > limit:
            next_url = f"{http.base_url}v1/jobs?limit={limit}&cursor={_format_cursor(records[limit - 1].seq)}"
        return _json_response(JobList([as_job(record) for record in records[:limit]], next_url))

    async def job(self, http: Request) -> Response:
        """GET tells of a job; DELETE ends it as canceled, unless it has ended."""
        action = self._service.cancel if http.method == "DELETE" else self._service.get
        record = await action(_job_id(http), _owner(http))
        return _json_response(as_job(record))

    async def image(self, http: Request) -> Response:
        """One image of a job that has succeeded, as a file."""
        job_id, index = _job_id(http), http.path_params["index"]
        if not re.fullmatch(r"\d{1,6}", index, re.ASCII):
            raise JobNotFound(f"there is no image {short_repr(index)}; images are numbered from 0.")
        content, suffix = await self._service.image(job_id, int(index), _owner(http))
        return Response(content, media_type=f"image/{suffix}")

    async def events(self, http: Request) -> Response:
        """What happens to a job, as a stream, from the event after Last-Event-ID on; it ends with the job."""
        job_id, after = _job_id(http), _parse_last_event_id(http.headers)
        record = await self._service.get(job_id, _owner(http))
        if record.status in TERMINAL_STATUSES and after >= record.last_event:
            return Response(
                status_code=204
            )  # nothing more will come: the one answer after which an EventSource stays away
        frames = self._frames(job_id, after, http.state.request_id)
        return sse.EventStream(frames, _no_cleanup, self._draining)  # clients come again, with their Last-Event-ID

    async def _frames(self, job_id: str, after: int, request_id: str) -> AsyncGenerator[bytes, None]:
        idle_s = 0.0
        try:
            while True:
                record = await self._service.get(job_id)  # before its events: what ends it is then among them
                for event in await self._service.events(job_id, after):
                    yield sse.serialize_event(event.type, msgspec.Raw(event.data), str(event.seq))
                    after, idle_s = event.seq, 0.0
                    if _is_terminal(event):
                        return
                if record.status in TERMINAL_STATUSES:
                    return
                if idle_s >= _KEEP_ALIVE_S:
                    yield sse.KEEP_ALIVE_COMMENT
                    idle_s = 0.0
                await asyncio.sleep(_POLL_INTERVAL_S)
                idle_s += _POLL_INTERVAL_S
        except NoriaError as error:
            yield sse.serialize_event("error", error_body(error, request_id))


def admit_input(
    generation_service: GenerationService,
    job_input: Mapping[str, Any],
    api_client: ApiClient,
    request_id: str,
    headers: Mapping[str, str],
) -> AdmittedRequest:
    """The `input` of a job as a wish: the body of the route that its `endpoint` names, `/t2i` by default.

    Raises:
        NoriaError: as `Studio.admit` does; a field's name begins with `input.`.

    """
    fields = dict(job_input)
    endpoint = fields.pop("endpoint", ENDPOINTS[0])
    if endpoint not in ENDPOINTS:
        raise InvalidField(
            f"input.endpoint is {short_repr(endpoint)}; allowed are {', '.join(ENDPOINTS)}.", field="input.endpoint"
        )
    raw = msgspec.json.encode(fields)
    try:
        if endpoint == ENDPOINTS[0]:
            body = decode(raw, ImageRequestBody)
            _refuse_streams(body)
            return generation_service.admit(apply_headers(body, headers), api_client, request_id)
        generations_body = decode(raw, GenerationsRequestBody)
        _refuse_streams(generations_body)
        return admit_generation(generation_service, generations_body, api_client, request_id, headers)
    except InvalidField as error:
        if error.field is not None and not error.field.startswith("X-"):  # a header's
            error.field = f"input.{error.field}"
        raise


def _refuse_streams(body: ImageRequestBody | GenerationsRequestBody) -> None:
    for field in ("stream", "partial_images"):
        if got := getattr(body, field):
            raise InvalidField(
                f"{field} is {msgspec.json.encode(got).decode()}; nobody waits for a job's answer. GET its `urls.stream` to watch it, and "
                "leave this out.",
                field=field,
            )


def _in_order(events: list[Literal["start", "completed"]]) -> tuple[WebhookEvent, ...]:
    return tuple(name for name in WEBHOOK_EVENTS if name in events)


def _idempotency_key(headers: Mapping[str, str]) -> str | None:
    key = headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY_PATTERN.fullmatch(key):
        raise InvalidField(
            f"header Idempotency-Key is {short_repr(key)}; allowed are 1 to 255 characters of ASCII, without spaces.",
            field="Idempotency-Key",
        )
    return key


def _job_id(http: Request) -> str:
    """The name in the path; what cannot be one is not taken to the database, which may not bear it."""
    job_id: str = http.path_params["id"]
    if not re.fullmatch(r"job_[0-9a-f]{1,64}", job_id):
        raise JobNotFound(
            f"there is no job {short_repr(job_id)}; their names are job_ and 26 digits. GET /v1/jobs lists the jobs."
        )
    return job_id


def _owner(http: Request) -> str | None:
    """Whose jobs there are for this request: its key's; everybody's where there are no keys."""
    name: str | None = http.state.caller.name
    return name


def _parse_limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidField(f"limit is {short_repr(text)}; allowed are 1 to {MAX_LIMIT}.", field="limit")
    return int(text)


def _format_cursor(seq: int) -> str:
    return base64.urlsafe_b64encode(str(seq).encode()).decode().rstrip("=")


def _parse_cursor(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        number = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        number = ""
    if not re.fullmatch(r"\d{1,18}", number, re.ASCII):
        raise InvalidField(f"cursor is {short_repr(text)}; take it from `next` of the page before.", field="cursor")
    return int(number)


def _parse_last_event_id(headers: Mapping[str, str]) -> int:
    text = headers.get("last-event-id", "0")
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise InvalidField(
            f"header Last-Event-ID is {short_repr(text)}; allowed is the `id` of an event of this stream.",
            field="Last-Event-ID",
        )
    return int(text)


def _is_terminal(event: JobEvent) -> bool:
    return event.type == "status" and msgspec.json.decode(event.data, type=StatusEventData).status in TERMINAL_STATUSES


async def _no_cleanup() -> None:
    """A stream that ends leaves nothing to be done: its job goes on."""


def _json_response(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, media_type="application/json")
