"""`/v1/jobs`: asynchronous requests over HTTP. `noria.jobs` stores and runs them; `text_routes.py` is for texts."""

import contextlib
import functools
import re
import time
from collections.abc import AsyncGenerator, Collection, Mapping

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidField, JobNotFound, JobsUnavailable, NoriaError, short_repr
from noria.frontend.access.auth import client_id_of
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.access.quotas import ApiClient, Quota
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.http import sse
from noria.frontend.http.body import JsonBodyReader, decode
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.http.errors import error_body
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import EVENT_STREAM, IMAGE_CONTENT, Operation, parameter
from noria.frontend.http.request_head import base_url, read_flag, read_number
from noria.frontend.jobs.image_executor import serialize_request
from noria.frontend.jobs.inputs import (
    JOB_FIELDS,
    JobRequestBody,
    admit_input,
    describe_job,
    digest_of,
    images_in,
    stored_input,
    take_images,
)
from noria.frontend.jobs.running_jobs import RunningJobs
from noria.frontend.services.images.generation import GenerationService
from noria.jobs.records import (
    TERMINAL_STATUSES,
    WEBHOOK_EVENTS,
    Job,
    JobState,
    NewJob,
    WantedEvent,
    WebhookEvent,
    as_job,
    new_job_id,
)
from noria.jobs.stored_request import pack_start_image
from noria.observe.metrics import outcomes

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
MAX_STREAMS = 256
"""Of the events of jobs, of one front end. Each holds a connection; all of them share one query every half second."""
MAX_STREAMS_PER_CLIENT = 64
"""A quarter of `MAX_STREAMS`: one client cannot keep others out."""
_STREAM_RETRY_AFTER_S = 10.0

IDEMPOTENCY_KEY_PATTERN = "[!-~]{1,255}"
IDEMPOTENCY_KEY = parameter("Idempotency-Key", "header", pattern=f"^{IDEMPOTENCY_KEY_PATTERN}$")
CURSOR_PATTERN = "[0-9a-f]{1,15}"  # fits into a signed 64-bit integer


class JobList(Struct, frozen=True):
    """A page of `GET /v1/jobs`, newest first. It may have fewer jobs than requested, if they are long."""

    results: list[Job]
    next: str | None  # the URL of the next page


class JobRoutes:
    """The routes under /v1/jobs."""

    def __init__(
        self, generation_service: GenerationService, body_reader: JsonBodyReader, running_jobs: RunningJobs
    ) -> None:
        self._generation_service, self._body_reader, self._jobs = generation_service, body_reader, running_jobs
        self._stream_limiter = ConcurrencyLimiter(
            "streams of the events of jobs", MAX_STREAMS, MAX_STREAMS_PER_CLIENT, _STREAM_RETRY_AFTER_S
        )

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        job_operation = functools.partial(Operation, group="Jobs", scopes=("jobs",))
        id_parameter, errors = parameter("id", "path"), [JobNotFound, JobsUnavailable]
        return [
            job_operation(
                method="POST",
                path="/v1/jobs",
                handler=self._submit,
                summary="Submit a job",
                description="The response is immediate; the job survives restarts. If the `Idempotency-Key` was sent "
                "before, the status is 200 and the response is the job that it created.",
                parameters=[IDEMPOTENCY_KEY],
                body=JobRequestBody,
                fields=JOB_FIELDS,
                example={"input": {"prompt": "a red circle above a blue square", "seed": 7}},
                response=Job,
                other_responses={202: ("accepted", Job)},
                describe=describe_job,
            ),
            job_operation(
                method="GET",
                path="/v1/jobs",
                handler=self._list_jobs,
                summary="List jobs",
                description="Newest first; `next` is the URL of the next page.",
                parameters=[
                    parameter("limit", "query", type="integer", minimum=1, maximum=MAX_LIMIT, default=DEFAULT_LIMIT),
                    parameter("cursor", "query", pattern=f"^{CURSOR_PATTERN}$"),
                ],
                response=JobList,
                errors=[InvalidField, JobsUnavailable],
            ),
            job_operation(
                method="GET",
                path="/v1/jobs/{id}",
                handler=self._job,
                summary="Get a job",
                description="In the form of Replicate's predictions.",
                parameters=[id_parameter],
                response=Job,
                errors=errors,
            ),
            job_operation(
                method="DELETE",
                path="/v1/jobs/{id}",
                handler=self._cancel,
                summary="Cancel or erase a job",
                description="Its images leave the running batch. With `erase=true` the job, its images and its "
                "pending webhooks are deleted at once, whether it has ended or not.",
                parameters=[id_parameter, parameter("erase", "query", type="boolean", default=False)],
                response=Job,
                other_responses={204: ("the job is erased", None)},
                errors=[InvalidField, *errors],
            ),
            job_operation(
                method="GET",
                path="/v1/jobs/{id}/events",
                handler=self._events,
                summary="Stream the events of a job",
                description="Events `status` and `progress`, from the one after Last-Event-ID on, until the job has "
                "ended.",
                parameters=[
                    id_parameter,
                    parameter("Last-Event-ID", "header", type="integer", minimum=0, maximum=10**9 - 1),
                ],
                response=EVENT_STREAM,
                other_responses={204: ("the job has ended, and has no later events", None)},
                errors=[InvalidField, *errors],
            ),
            job_operation(
                method="GET",
                path="/v1/jobs/{id}/images/{index}",
                handler=self._image,
                summary="Get an image of a job",
                description="Until the job's time to live is over.",
                parameters=[id_parameter, parameter("index", "path", type="integer", minimum=0)],
                response=IMAGE_CONTENT,
                errors=errors,
            ),
        ]

    async def _submit(self, http: Request) -> Response:
        with contextlib.ExitStack() as slots:
            raw = await self._body_reader.receive(http, slots)
            body = decode(raw, JobRequestBody)
            self._body_reader.check_length(raw, *images_in(body.input))
            del raw  # with images it is long
            new_job, num_images = await cancel_on_disconnect(http, self._new_job(http, body))
            del body
        return await self.accept(http, new_job, http.state.api_client.images, num_images)

    async def _new_job(self, http: Request, body: JobRequestBody) -> tuple[NewJob, int]:
        context: RequestContext = http.state.context
        job_id, client, threads = new_job_id(), context.client, self._generation_service.upload_threads
        digest = await threads.run(client, digest_of, body) if images_in(body.input) else digest_of(body)
        images = take_images(body.input)
        admitted = await admit_input(self._generation_service, body.input, images, context, job_id, http.headers)
        payload = admitted.request.payload
        packed = None if admitted.data is None else await threads.run(client, pack_start_image, admitted.data)
        new_job = NewJob(
            id=job_id,
            model=admitted.spec.name,
            version=admitted.spec.fingerprint,
            input=msgspec.json.encode(stored_input(body.input, payload)),
            request=serialize_request(admitted),
            base_url=base_url(http),
            priority=admitted.request.priority,
            webhook=body.webhook,
            webhook_events=webhook_events(body.webhook_events_filter),
            made_by=context.api_client.name or "",
            client=client,
            idempotency_key=idempotency_key(http.headers),
            body_digest=digest,
            image_bytes=len(packed or b""),
            chunks=() if packed is None else (packed,),
        )
        return new_job, payload.n

    async def accept(self, http: Request, new_job: NewJob, quota: Quota, num_results: int) -> Response:
        """Store the job; returns it, or the one that its idempotency key created before.

        A rejected request is counted here, a job when it has ended. Raises NoriaError.
        """
        is_new = False
        try:
            quota.charge(num_results, time.monotonic())
            try:
                record, is_new = await self._jobs.service.accept(new_job)
            finally:
                if not is_new:
                    quota.refund(num_results)
        except NoriaError as error:
            outcomes.count_request(new_job.model, error.code)
            raise
        job = as_job(record)
        http.state.job_id = job.id  # logged
        return json_response(job, 202 if is_new else 200, {"Location": job.urls.get})

    async def _list_jobs(self, http: Request) -> Response:
        limit = read_number(http, "limit", MAX_LIMIT) or DEFAULT_LIMIT
        page = await self._jobs.service.page(limit, _parse_cursor(http.query_params.get("cursor")), owner_of(http))
        next_url = None
        if page.has_more:
            next_url = f"{base_url(http)}v1/jobs?limit={limit}&cursor={page.records[-1].seq:x}"
        return json_response(JobList([as_job(record) for record in page.records], next_url))

    async def _job(self, http: Request) -> Response:
        job_id, owner = job_id_of(http), owner_of(http)
        return json_response(as_job(await self._jobs.service.get(job_id, owner)))

    async def _cancel(self, http: Request) -> Response:
        job_id, owner, caller = job_id_of(http), owner_of(http), http.state.api_client.name
        if read_flag(http, "erase", False):
            await self._jobs.service.erase(job_id, owner, by=caller)
            return Response(status_code=204)
        return json_response(as_job(await self._jobs.service.cancel(job_id, owner, by=caller)))

    async def _image(self, http: Request) -> Response:
        job_id, index = job_id_of(http), http.path_params["index"]
        if not re.fullmatch(r"\d{1,6}", index, re.ASCII):
            raise JobNotFound(f"there is no image {short_repr(index)}; images are numbered from 0.")
        content, suffix = await self._jobs.service.image(job_id, int(index), owner_of(http))
        return Response(content, media_type=f"image/{suffix}")

    async def _events(self, http: Request) -> Response:
        job_id, after = job_id_of(http), _parse_last_event_id(http.headers)
        with contextlib.ExitStack() as held:
            held.enter_context(self._stream_limiter.hold(client_id_of(http)))  # first: it costs no query
            state = await self._jobs.service.state(job_id, owner_of(http))
            if state.status in TERMINAL_STATUSES and after >= state.last_event:
                return Response(status_code=204)  # there will be no more; on 204 an EventSource does not reconnect
            permit = held.pop_all()

        async def release() -> None:
            permit.close()

        frames = self._frames(job_id, state, after, http.state.request_id)
        return sse.EventStream(frames, release, self._jobs.draining)  # clients reconnect with their Last-Event-ID

    async def _frames(self, job_id: str, state: JobState, after: int, request_id: str) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(
                self._jobs.service.follow(job_id, state, after, sse.KEEP_ALIVE_INTERVAL_S)
            ) as followed:
                async for events in followed:
                    if not events:
                        yield sse.KEEP_ALIVE_COMMENT
                    for event in events:
                        yield sse.serialize_event(event.type, msgspec.Raw(event.data), str(event.seq))
        except NoriaError as error:
            yield sse.serialize_event("error", error_body(error, request_id))


def webhook_events(wanted: Collection[WantedEvent] | None) -> tuple[WebhookEvent, ...]:
    """Return those that are wanted, in order; None: all."""
    return tuple(name for name in WEBHOOK_EVENTS if wanted is None or name in wanted)


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """Return the header; raises InvalidField if it is malformed."""
    key = headers.get("idempotency-key")
    if key is not None and not re.fullmatch(IDEMPOTENCY_KEY_PATTERN, key):
        raise InvalidField(
            f"header Idempotency-Key is {short_repr(key)}; allowed are 1 to 255 characters of ASCII, without spaces.",
            field="Idempotency-Key",
        )
    return key


def job_id_of(http: Request) -> str:
    """Return the job id in the path; raises JobNotFound if it is malformed, so that the database gets no other."""
    job_id: str = http.path_params["id"]
    if not re.fullmatch(r"job_[0-9a-f]{1,64}", job_id):
        raise JobNotFound(
            f"there is no job {short_repr(job_id)}; a job id is job_ and 26 hexadecimal digits. GET /v1/jobs lists the "
            "jobs."
        )
    return job_id


def owner_of(http: Request) -> str | None:
    """Return the name of the request's API key, which sees its own jobs only; None (an admin, or no keys) sees all."""
    api_client: ApiClient = http.state.api_client
    return None if api_client.has_scope("admin") else api_client.name


def _parse_cursor(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(CURSOR_PATTERN, text):
        raise InvalidField(f"cursor is {short_repr(text)}; take it from `next` of the previous page.", field="cursor")
    return int(text, 16)


def _parse_last_event_id(headers: Mapping[str, str]) -> int:
    text = headers.get("last-event-id", "0")
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise InvalidField(
            f"header Last-Event-ID is {short_repr(text)}; allowed is the `id` of an event of this stream.",
            field="Last-Event-ID",
        )
    return int(text)
