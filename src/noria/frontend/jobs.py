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
from noria.errors import InvalidField, JobNotFound, NoriaError, shown
from noria.frontend import streaming
from noria.frontend.admission import heed
from noria.frontend.bodies import Bodies, decode
from noria.frontend.job_painter import StudioPainter, keep
from noria.frontend.keys import Caller
from noria.frontend.openai import GenerationsBody, admit_generation
from noria.frontend.refusals import error_answer
from noria.frontend.studio import Studio, Wish
from noria.jobs.records import (
    ENDED,
    WEBHOOK_EVENTS,
    Event,
    Job,
    JobRecord,
    NewJob,
    StatusNote,
    WebhookEvent,
    as_job,
    new_job_id,
)
from noria.jobs.service import JobService
from noria.observe import outcomes
from noria.request import ImageBody

ENDPOINTS = ("/t2i", "/v1/images/generations")
DEFAULT_LIMIT, LARGEST_LIMIT = 20, 100

_LOOK_EVERY_S = 0.5  # as often as progress is written down at most
_KEEP_ALIVE_S = 15.0
_KEY = re.compile(r"[!-~]{1,255}")


class JobBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/jobs`."""

    input: dict[str, Any]
    webhook: str | None = None
    webhook_events_filter: list[Literal["start", "completed"]] | None = None


class JobList(Struct, frozen=True):
    """One page of `GET /v1/jobs`, newest first."""

    results: list[Job]
    next: str | None  # the next page's address


class Jobs:
    """The routes under /v1/jobs. They answer between `start` and `stop`."""

    def __init__(self, studio: Studio, bodies: Bodies, config: Config, open_service: Callable[[], JobService]) -> None:
        self._studio, self._bodies, self._config, self._open_service = studio, bodies, config, open_service
        self._opened: JobService | None = None
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
        self._opened = await asyncio.to_thread(self._open_service)
        painter = StudioPainter(self._studio, self._config.jobs.concurrency, self._config.frontend.processes)
        await self._opened.start(painter)

    def drain(self) -> None:
        """Claim no more jobs, and end the streams of events: the process is about to stop."""
        self._draining.set()
        if self._opened is not None:
            self._opened.drain()

    async def stop(self) -> None:
        """Hand back what is being drawn."""
        await self._service.stop()

    @property
    def _service(self) -> JobService:
        assert self._opened is not None, "the routes are served after `start`"
        return self._opened

    async def jobs(self, http: Request) -> Response:
        """POST accepts a job; GET lists them."""
        return await (self._accept(http) if http.method == "POST" else self._list(http))

    async def _accept(self, http: Request) -> Response:
        body = await self._bodies.read_json(http, JobBody)
        caller: Caller = http.state.caller
        job_id = new_job_id()
        wish = admit_input(self._studio, body.input, caller, job_id, http.headers)
        events = body.webhook_events_filter
        new = NewJob(
            id=job_id,
            model=wish.spec.name,
            version=wish.spec.fingerprint,
            input=msgspec.json.encode(body.input | {"seed": wish.request.seed}),
            request=keep(wish),
            base_url=str(http.base_url),
            priority=wish.request.priority,
            webhook=body.webhook,
            webhook_events=WEBHOOK_EVENTS if events is None else _in_order(events),
            made_by=caller.name or "",
            idempotency_key=_key(http.headers),
            body_digest=hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest(),
        )
        job = as_job(await self._keep(new, wish, caller))
        http.state.job_id = job.id  # for the log
        return _json(job, 202 if job.id == job_id else 200, {"Location": job.urls.get})

    async def _keep(self, new: NewJob, wish: Wish, caller: Caller) -> JobRecord:
        """The job, or the one that its key has made before. A refusal is counted here; what is kept is counted when it has ended."""
        num_images, is_new = wish.request.num_images, False
        try:
            caller.charge(num_images, time.monotonic())
            try:
                record, is_new = await self._service.accept(new)
            finally:
                if not is_new:
                    caller.refund(num_images)
        except NoriaError as error:
            outcomes.count(new.model, error.code)
            raise
        return record

    async def _list(self, http: Request) -> Response:
        limit = _limit(http.query_params.get("limit"))
        records = await self._service.page(limit + 1, _from_cursor(http.query_params.get("cursor")), _maker(http))
        following = None
        if len(records) > limit:
            following = f"{http.base_url}v1/jobs?limit={limit}&cursor={_cursor(records[limit - 1].seq)}"
        return _json(JobList([as_job(record) for record in records[:limit]], following))

    async def job(self, http: Request) -> Response:
        """GET tells of a job; DELETE ends it as canceled, unless it has ended."""
        act = self._service.cancel if http.method == "DELETE" else self._service.get
        record = await act(_job_id(http), _maker(http))
        return _json(as_job(record))

    async def image(self, http: Request) -> Response:
        """One image of a job that has succeeded, as a file."""
        job_id, index = _job_id(http), http.path_params["index"]
        if not re.fullmatch(r"\d{1,6}", index, re.ASCII):
            raise JobNotFound(f"there is no image {shown(index)}; images are numbered from 0.")
        content, suffix = await self._service.image(job_id, int(index), _maker(http))
        return Response(content, media_type=f"image/{suffix}")

    async def events(self, http: Request) -> Response:
        """What happens to a job, as a stream, from the event after Last-Event-ID on; it ends with the job."""
        job_id, after = _job_id(http), _last_event_id(http.headers)
        record = await self._service.get(job_id, _maker(http))
        if record.status in ENDED and after >= record.last_event:
            return Response(
                status_code=204
            )  # nothing more will come: the one answer after which an EventSource stays away
        frames = self._frames(job_id, after, http.state.request_id)
        return streaming.EventStream(frames, _nothing, self._draining)  # clients come again, with their Last-Event-ID

    async def _frames(self, job_id: str, after: int, request_id: str) -> AsyncGenerator[bytes, None]:
        silent_s = 0.0
        try:
            while True:
                record = await self._service.get(job_id)  # before its events: what ends it is then among them
                for happening in await self._service.events(job_id, after):
                    yield streaming.event(happening.type, msgspec.Raw(happening.data), str(happening.seq))
                    after, silent_s = happening.seq, 0.0
                    if _ends(happening):
                        return
                if record.status in ENDED:
                    return
                if silent_s >= _KEEP_ALIVE_S:
                    yield streaming.COMMENT
                    silent_s = 0.0
                await asyncio.sleep(_LOOK_EVERY_S)
                silent_s += _LOOK_EVERY_S
        except NoriaError as error:
            yield streaming.event("error", error_answer(error, request_id))


def admit_input(
    studio: Studio, given: Mapping[str, Any], caller: Caller, request_id: str, headers: Mapping[str, str]
) -> Wish:
    """The `input` of a job as a wish: the body of the route that its `endpoint` names, `/t2i` by default.

    Raises:
        NoriaError: as `Studio.admit` does; a field's name begins with `input.`.

    """
    fields = dict(given)
    endpoint = fields.pop("endpoint", ENDPOINTS[0])
    if endpoint not in ENDPOINTS:
        raise InvalidField(
            f"input.endpoint is {shown(endpoint)}; allowed are {', '.join(ENDPOINTS)}.", field="input.endpoint"
        )
    raw = msgspec.json.encode(fields)
    try:
        if endpoint == ENDPOINTS[0]:
            body = decode(raw, ImageBody)
            _refuse_streams(body)
            return studio.admit(heed(body, headers), caller, request_id)
        generation = decode(raw, GenerationsBody)
        _refuse_streams(generation)
        return admit_generation(studio, generation, caller, request_id, headers)
    except InvalidField as error:
        if error.field is not None and not error.field.startswith("X-"):  # a header's
            error.field = f"input.{error.field}"
        raise


def _refuse_streams(body: ImageBody | GenerationsBody) -> None:
    for field in ("stream", "partial_images"):
        if got := getattr(body, field):
            raise InvalidField(
                f"{field} is {msgspec.json.encode(got).decode()}; nobody waits for a job's answer. GET its `urls.stream` to watch it, and "
                "leave this out.",
                field=field,
            )


def _in_order(events: list[Literal["start", "completed"]]) -> tuple[WebhookEvent, ...]:
    return tuple(name for name in WEBHOOK_EVENTS if name in events)


def _key(headers: Mapping[str, str]) -> str | None:
    key = headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidField(
            f"header Idempotency-Key is {shown(key)}; allowed are 1 to 255 characters of ASCII, without spaces.",
            field="Idempotency-Key",
        )
    return key


def _job_id(http: Request) -> str:
    """The name in the path; what cannot be one is not taken to the database, which may not bear it."""
    job_id: str = http.path_params["id"]
    if not re.fullmatch(r"job_[0-9a-f]{1,64}", job_id):
        raise JobNotFound(
            f"there is no job {shown(job_id)}; their names are job_ and 26 digits. GET /v1/jobs lists the jobs."
        )
    return job_id


def _maker(http: Request) -> str | None:
    """Whose jobs there are for this request: its key's; everybody's where there are no keys."""
    name: str | None = http.state.caller.name
    return name


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or not 1 <= int(text) <= LARGEST_LIMIT:
        raise InvalidField(f"limit is {shown(text)}; allowed are 1 to {LARGEST_LIMIT}.", field="limit")
    return int(text)


def _cursor(seq: int) -> str:
    return base64.urlsafe_b64encode(str(seq).encode()).decode().rstrip("=")


def _from_cursor(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        number = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        number = ""
    if not re.fullmatch(r"\d{1,18}", number, re.ASCII):
        raise InvalidField(f"cursor is {shown(text)}; take it from `next` of the page before.", field="cursor")
    return int(number)


def _last_event_id(headers: Mapping[str, str]) -> int:
    text = headers.get("last-event-id", "0")
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise InvalidField(
            f"header Last-Event-ID is {shown(text)}; allowed is the `id` of an event of this stream.",
            field="Last-Event-ID",
        )
    return int(text)


def _ends(event: Event) -> bool:
    return event.type == "status" and msgspec.json.decode(event.data, type=StatusNote).status in ENDED


async def _nothing() -> None:
    """A stream that ends leaves nothing to be done: its job goes on."""


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, media_type="application/json")
