"""Changes a job's status: one conditional UPDATE, so each job ends exactly once, whatever races.

The event of the new status and its webhook delivery are written in the same transaction, which is the caller's; the
texts and the start image of a job that ends are deleted in it.
"""

import uuid
from typing import Any
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import ColumnElement, Connection

from noria.jobs.database.schema import deliveries, events, jobs, texts
from noria.jobs.records import (
    TERMINAL_STATUSES,
    JobEventType,
    JobRecord,
    JobStatus,
    StatusEventData,
    allowed_previous,
    as_job,
    output_urls,
    webhook_event_for,
)


def transition(
    connection: Connection,
    condition: ColumnElement[bool],
    status: JobStatus,
    now: float,
    *,
    releases_lease: bool = True,
    **values: Any,
) -> JobRecord | None:
    """Set the status of one job, if `condition` holds and the life cycle allows it. Returns its new record, or None.

    `processing` may follow itself: a claim after an expired lease.
    """
    previous = allowed_previous(status) | ({"processing"} if status == "processing" else set())
    if releases_lease:
        values |= {"owner": None, "lease_until": None}
    if status in TERMINAL_STATUSES:
        values["completed_at"] = now
    row = connection.execute(
        jobs.update()
        .where(condition, jobs.c.status.in_(previous))
        .values(status=status, last_event=jobs.c.last_event + 1, **values)
        .returning(jobs)
    ).first()
    if row is None:
        return None
    record = JobRecord(**row._mapping)
    if status in TERMINAL_STATUSES and (record.text_bytes or record.image_bytes):
        connection.execute(texts.delete().where(texts.c.job_id == record.id))
    publish_status(connection, record, now)
    return record


def publish_status(connection: Connection, record: JobRecord, now: float) -> None:
    """Add the event of the new status, and a webhook delivery if one is due, in the transaction of the status."""
    event_data = StatusEventData(record.status, output_urls(record), record.error, record.error_code)
    write_event(connection, record.id, record.last_event, now, "status", msgspec.json.encode(event_data))
    event_name = webhook_event_for(record)
    if record.webhook is not None and event_name in record.webhook_events.split(","):
        connection.execute(
            deliveries.insert().values(
                id=f"msg_{uuid.uuid4().hex}",
                url=record.webhook,
                body=msgspec.json.encode(as_job(record)).decode(),
                num_tries=0,
                due_at=now,
                host=(urlsplit(record.webhook).hostname or "").rstrip("."),
                made_by=record.made_by,
                client=record.client,
                created_at=now,
            )
        )


def write_event(
    connection: Connection, job_id: str, seq: int, now: float, event_type: JobEventType, data: bytes
) -> None:
    """Add event number `seq` of a job; `data` is JSON."""
    connection.execute(events.insert().values(job_id=job_id, seq=seq, at=now, type=event_type, data=data.decode()))
