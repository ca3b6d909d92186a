"""A job: its record, its life cycle, and its public JSON form. Pure.

Fields and statuses follow Replicate's predictions, which most clients of such interfaces know; `error_code` is an
addition.

    starting ──▶ processing ──▶ succeeded
       ▲  │           │ │ └───▶ failed
       │  ├── failed, canceled  │
       └──┼───────────┘ └─────▶ canceled
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria.storage.field_copies import copy_fields

JobStatus = Literal["starting", "processing", "succeeded", "failed", "canceled"]
WebhookEvent = Literal["start", "completed"]
WantedEvent = Literal["start", "output", "logs", "completed"]
"""Replicate's names of events, of which `output` and `logs` never come here."""
Metrics = Mapping[str, float | list[float]]
"""Measurements of a job, by name: lists have a number for each image."""

JobEventType = Literal["status", "progress"]

TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    "starting": frozenset({"processing", "failed", "canceled"}),
    "processing": frozenset({"starting", "succeeded", "failed", "canceled"}),  # starting: requeued
    "succeeded": frozenset(),
    "failed": frozenset(),
    "canceled": frozenset(),
}
TERMINAL_STATUSES = frozenset(status for status, next_statuses in TRANSITIONS.items() if not next_statuses)
RESULT_FORMATS, RAGGED_FORMATS = ("npy", "jsonl"), ("npz", "jsonl")
"""Of the results of texts."""
WEBHOOK_EVENTS: tuple[WebhookEvent, ...] = ("start", "completed")

# A priority shifts a job's position in the queue by this much time, so that no job waits for ever.
_PRIORITY_OFFSET_S: Mapping[str, float] = {"high": 600.0, "normal": 0.0, "low": -600.0}


def allowed_previous(status: JobStatus) -> frozenset[JobStatus]:
    """The statuses that `status` may follow."""
    return frozenset(previous for previous, next_statuses in TRANSITIONS.items() if status in next_statuses)


def queue_order(created_at: float, priority: str) -> float:
    """The position of a job in the queue: the lowest is claimed first."""
    return created_at - _PRIORITY_OFFSET_S[priority]


def new_job_id() -> str:
    """A random id that cannot be guessed: without API keys, anyone who knows the id can read and cancel the job."""
    return f"job_{secrets.token_hex(13)}"


class JobUrls(Struct, frozen=True):
    """The routes of a job. `cancel` takes a DELETE."""

    get: str
    cancel: str
    stream: str


class Job(Struct, frozen=True):
    """A job as routes and webhooks serialize it.

    Times are RFC 3339 in UTC; metrics are seconds unless named otherwise.
    """

    id: str
    model: str
    version: str  # the model's fingerprint: a job runs on this version only
    input: dict[str, Any]  # as posted, with the seed filled in, and digests in place of images
    output: list[str] | None  # URLs of the images, or of the results of texts, once succeeded
    logs: str
    error: str | None
    error_code: str | None  # code of docs/errors.md
    status: JobStatus
    created_at: str
    started_at: str | None  # start of the current or last attempt
    completed_at: str | None
    metrics: Metrics  # predict_time and total_time as in Replicate's; the rest are the request's timings
    urls: JobUrls
    webhook: str | None
    webhook_events_filter: list[WebhookEvent]


class StatusEventData(Struct, frozen=True):
    """The data of a `status` event."""

    status: JobStatus
    output: list[str] | None = None
    error: str | None = None
    error_code: str | None = None


@dataclass(frozen=True)
class NewJob:
    """A job to be accepted. `request` holds all that executing it needs, the seed included."""

    id: str
    model: str
    version: str
    input: bytes  # JSON
    request: bytes  # JSON
    base_url: str  # URL of the server, as the client addressed it; ends with a slash
    priority: str = "normal"
    webhook: str | None = None
    webhook_events: tuple[WebhookEvent, ...] = WEBHOOK_EVENTS
    made_by: str = ""  # the name of the API key; empty if the server has no keys
    client: str = ""  # whose share its webhooks take, as messages name it: the key, or the address
    idempotency_key: str | None = None
    body_digest: str = ""  # digest of the body sent with the idempotency key
    text_bytes: int = 0  # bytes of the texts of a job of texts, as they are stored; 0: a job of images
    image_bytes: int = 0  # bytes of the start image of a job of images, as it is stored; 0: there is none
    chunks: Iterable[bytes] = ()  # its texts, JSON, or its start image; read once


@dataclass(frozen=True)
class JobRecord:
    """A job as the store keeps it. Times are Unix time in seconds, by the clock of the process that wrote them."""

    seq: int  # increases in order of acceptance
    id: str
    status: JobStatus
    model: str
    version: str
    input: str
    request: str
    base_url: str
    webhook: str | None
    webhook_events: str  # comma-separated
    made_by: str
    idempotency_key: str | None
    body_digest: str
    created_at: float
    order_at: float  # see `queue_order`
    not_before: float  # not claimable before
    started_at: float | None
    completed_at: float | None
    owner: str | None  # `server/front end/incarnation`, while processing
    lease_until: float | None  # while processing: claimable by others after this time
    attempt: int  # counts claims; a claim with an older attempt is void
    num_losses: int  # claims whose process died
    num_engine_losses: int  # claims whose engine died
    last_event: int
    output: str | None  # file names, comma-separated; of texts those of the parts
    error: str | None
    error_code: str | None
    metrics: str  # JSON
    text_bytes: int  # bytes of the texts of a job of texts, as they are stored; 0: a job of images
    image_bytes: int  # bytes of the start image of a job of images, as it is stored; 0: there is none
    client: str  # see `NewJob`


@dataclass(frozen=True)
class Claim:
    """The right of one worker to execute a job, until another worker claims it."""

    job_id: str
    owner: str
    attempt: int


@dataclass(frozen=True)
class JobState:
    """The part of a job that tells whether it has new events, and whose it is."""

    status: JobStatus
    last_event: int
    made_by: str


@dataclass(frozen=True)
class JobEvent:
    """An event of a job; `seq` counts from 1 without gaps."""

    seq: int
    at: float
    type: JobEventType
    data: str  # JSON


def as_job(record: JobRecord) -> Job:
    """The public form of `record`."""
    url = f"{record.base_url}v1/jobs/{record.id}"
    return copy_fields(
        Job,
        record,
        input=msgspec.json.decode(record.input),
        output=output_urls(record),
        logs="",
        created_at=_rfc3339(record.created_at),
        started_at=None if record.started_at is None else _rfc3339(record.started_at),
        completed_at=None if record.completed_at is None else _rfc3339(record.completed_at),
        metrics=_metrics(record),
        urls=JobUrls(get=url, cancel=url, stream=f"{url}/events"),
        webhook_events_filter=[name for name in WEBHOOK_EVENTS if name in record.webhook_events.split(",")],
    )


def output_urls(record: JobRecord) -> list[str] | None:
    """The URLs of a succeeded job's images, or of the results of its texts."""
    if record.output is None:
        return None
    url = f"{record.base_url}v1/jobs/{record.id}"
    if record.text_bytes:
        formats = RAGGED_FORMATS if record.output.endswith(".r32") else RESULT_FORMATS
        return [f"{url}/results.{result_format}" for result_format in formats]
    return [f"{url}/images/{index}" for index in range(len(record.output.split(",")))]


def webhook_event_for(record: JobRecord) -> WebhookEvent | None:
    """The webhook event of a job that has just become `record`, if any. Only the first attempt counts as a start."""
    if record.status in TERMINAL_STATUSES:
        return "completed"
    return "start" if record.status == "processing" and record.attempt == 1 else None


def _metrics(record: JobRecord) -> Metrics:
    metrics: dict[str, float | list[float]] = msgspec.json.decode(record.metrics)
    if record.completed_at is not None:
        # The times come from the clocks of several machines: clamp negative differences.
        metrics["total_time"] = max(record.completed_at - record.created_at, 0.0)
        if record.started_at is not None:
            metrics["predict_time"] = max(record.completed_at - record.started_at, 0.0)
    return metrics


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
