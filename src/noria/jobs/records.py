"""What a job is: its record, its life cycle, and the shape in which the world sees it. Pure.

The fields and statuses are those of Replicate's predictions, which most clients of job interfaces know; `error_code` is ours.

    starting ──▶ processing ──▶ succeeded
       ▲  │           │ │ └───▶ failed
       │  ├── failed, canceled  │
       └──┼───────────┘ └─────▶ canceled
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct

JobStatus = Literal["starting", "processing", "succeeded", "failed", "canceled"]
WebhookEvent = Literal["start", "completed"]
JobEventType = Literal["status", "progress"]

TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    "starting": frozenset({"processing", "failed", "canceled"}),
    "processing": frozenset({"starting", "succeeded", "failed", "canceled"}),  # starting: handed back to be drawn again
    "succeeded": frozenset(),
    "failed": frozenset(),
    "canceled": frozenset(),
}
TERMINAL_STATUSES = frozenset(status for status, next_statuses in TRANSITIONS.items() if not next_statuses)
WEBHOOK_EVENTS: tuple[WebhookEvent, ...] = ("start", "completed")

# A job of another priority goes in line as if it had come this much earlier or later, so that none waits for ever.
_PRIORITY_OFFSET_S: Mapping[str, float] = {"high": 600.0, "normal": 0.0, "low": -600.0}


def allowed_previous(status: JobStatus) -> frozenset[JobStatus]:
    """The statuses that `status` may follow."""
    return frozenset(previous for previous, next_statuses in TRANSITIONS.items() if status in next_statuses)


def queue_order(created_at: float, priority: str) -> float:
    """Where a job stands in line: the lowest is claimed first."""
    return created_at - _PRIORITY_OFFSET_S[priority]


def new_job_id() -> str:
    """A name that nobody can guess: without API keys, whoever knows it can read and cancel the job."""
    return f"job_{secrets.token_hex(13)}"


class JobUrls(Struct, frozen=True):
    """Where to ask on. `cancel` takes a DELETE."""

    get: str
    cancel: str
    stream: str


class Job(Struct, frozen=True):
    """A job as routes and webhooks tell it. Times are RFC 3339 in UTC, metrics seconds unless named otherwise."""

    id: str
    model: str
    version: str  # the model's fingerprint: a job is drawn by no other
    input: dict[str, Any]  # as it was posted, and the seed that was drawn
    output: list[str] | None  # the images' addresses, once succeeded
    logs: str
    error: str | None
    error_code: str | None  # of docs/errors.md
    status: JobStatus
    created_at: str
    started_at: str | None  # of the present drawing, or the last
    completed_at: str | None
    metrics: dict[str, float]  # predict_time and total_time as Replicate's; the rest are the request's timings
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
    """A job to be accepted. `request` is all it takes to draw it, the seed included; only `frontend/routes/jobs.py` looks into it."""

    id: str
    model: str
    version: str
    input: bytes  # JSON
    request: bytes  # JSON
    base_url: str  # with a slash at its end; where the client found the server
    priority: str = "normal"
    webhook: str | None = None
    webhook_events: tuple[WebhookEvent, ...] = WEBHOOK_EVENTS
    made_by: str = ""  # the name of the API key; empty where there are no keys
    idempotency_key: str | None = None
    body_digest: str = ""  # of the body that came with the key


@dataclass(frozen=True)
class JobRecord:
    """A job as the store keeps it. Times are seconds since 1970 by the clock of whoever wrote them."""

    seq: int  # counts up in order of acceptance
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
    order_at: float  # see `order_of`
    not_before: float  # not to be claimed before
    started_at: float | None
    completed_at: float | None
    owner: str | None  # `server/front end/incarnation`, while processing
    lease_until: float | None  # while processing: free to be claimed by others after
    attempt: int  # of claiming; a claim with an older one has no say any more
    num_losses: int  # claims that ended with the process that held them
    num_engine_losses: int  # claims that ended because the engines drawing it did
    last_event: int
    output: str | None  # names of files, comma-separated
    error: str | None
    error_code: str | None
    metrics: str  # JSON


@dataclass(frozen=True)
class Claim:
    """The right to draw a job, until somebody else has it."""

    job_id: str
    owner: str
    attempt: int


@dataclass(frozen=True)
class JobEvent:
    """One thing that happened to a job; `seq` counts from 1 without gaps."""

    seq: int
    at: float
    type: JobEventType
    data: str  # JSON


def as_job(record: JobRecord) -> Job:
    """`record` as the world sees it."""
    url = f"{record.base_url}v1/jobs/{record.id}"
    return Job(
        id=record.id,
        model=record.model,
        version=record.version,
        input=msgspec.json.decode(record.input),
        output=output_urls(record),
        logs="",
        error=record.error,
        error_code=record.error_code,
        status=record.status,
        created_at=_rfc3339(record.created_at),
        started_at=None if record.started_at is None else _rfc3339(record.started_at),
        completed_at=None if record.completed_at is None else _rfc3339(record.completed_at),
        metrics=_metrics(record),
        urls=JobUrls(get=url, cancel=url, stream=f"{url}/events"),
        webhook=record.webhook,
        webhook_events_filter=[name for name in WEBHOOK_EVENTS if name in record.webhook_events.split(",")],
    )


def output_urls(record: JobRecord) -> list[str] | None:
    """The addresses of a succeeded job's images."""
    if record.output is None:
        return None
    num_images = len(record.output.split(","))
    return [f"{record.base_url}v1/jobs/{record.id}/images/{index}" for index in range(num_images)]


def webhook_event_for(record: JobRecord) -> WebhookEvent | None:
    """What a webhook is told when a job has become `record`. A job that is drawn again has started already."""
    if record.status in TERMINAL_STATUSES:
        return "completed"
    return "start" if record.status == "processing" and record.attempt == 1 else None


def _metrics(record: JobRecord) -> dict[str, float]:
    metrics: dict[str, float] = msgspec.json.decode(record.metrics)
    if record.completed_at is not None:
        # Clocks of several machines meet here: a negative time would be nonsense.
        metrics["total_time"] = max(record.completed_at - record.created_at, 0.0)
        if record.started_at is not None:
            metrics["predict_time"] = max(record.completed_at - record.started_at, 0.0)
    return metrics


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
