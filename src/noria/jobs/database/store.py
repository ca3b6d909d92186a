"""The database of jobs: accepts, lists, cancels, expires and deletes them. `claims.py` is what workers do.

Calls block: run them in threads. Any number of processes may call at once. `now` is Unix time in seconds.
"""

import itertools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Engine
from sqlalchemy.exc import IntegrityError

from noria.errors import IdempotencyConflict, JobExpired, JobNotFound, QueueFull, RateLimited, short_repr
from noria.jobs.database.claims import ClaimStore, error_columns
from noria.jobs.database.schema import deliveries, events, jobs, texts
from noria.jobs.database.transitions import publish_status
from noria.jobs.records import TERMINAL_STATUSES, JobEvent, JobRecord, JobState, NewJob, queue_order
from noria.protocol.model_spec import ModelKey
from noria.storage.database import interrupt, write_transaction

# Bound of the texts of the jobs of one page, unless a single one is longer. Only jobs whose prompts are longer than by
# default have more than 10,000 characters.
MAX_PAGE_CHARS = 1_048_576


class Page(NamedTuple):
    """Some jobs of a list, and whether more follow."""

    records: list[JobRecord]
    has_more: bool


class JobStore(ClaimStore):
    """The jobs of a database opened by `schema.open_jobs_database`, and the claims on them."""

    def interrupt(self) -> None:
        """Fail all calls that wait for PostgreSQL, and all later ones."""
        interrupt(self._engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # ── For clients ───────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(
        self,
        new_job: NewJob,
        max_queued: int,
        now: float,
        max_queued_per_key: int | None = None,
        max_pending_webhooks: int | None = None,
        max_queued_bytes: int | None = None,
    ) -> tuple[JobRecord, bool]:
        """Store `new_job`, or find the job that its idempotency key created before.

        Returns the job and whether it is new. When this returns, the job is durable.

        Raises:
            IdempotencyConflict: the key was used with another body before.
            RateLimited: the API key has `max_queued_per_key` queued jobs, or the job has a webhook and the client a
                quarter of `max_pending_webhooks`, or texts or a start image and the key's would be more than a quarter
                of `max_queued_bytes`.
            QueueFull: `max_queued` jobs are queued, or the job has a webhook and `max_pending_webhooks` are pending, or
                texts or a start image and all would be more than `max_queued_bytes`. Front ends that accept at the same
                moment may each exceed it by one.
        """
        if (existing := self._find_by_idempotency_key(new_job)) is not None:
            return existing, False
        try:
            with write_transaction(self._engine) as connection:
                of_this_key = sa.func.count().filter(jobs.c.made_by == new_job.made_by)
                num_waiting, num_of_key = connection.execute(
                    sa.select(sa.func.count(), of_this_key).select_from(jobs).where(jobs.c.status == "starting")
                ).one()
                if new_job.made_by and max_queued_per_key is not None and num_of_key >= max_queued_per_key:
                    raise RateLimited(
                        f"the key {new_job.made_by!r} has {num_of_key} queued jobs; at most {max_queued_per_key} are "
                        "allowed. Try again later.",
                        retry_after_s=60.0,
                    )
                if num_waiting >= max_queued:
                    raise QueueFull(
                        f"{num_waiting} jobs are queued; at most {max_queued} are allowed. Try again later.",
                        retry_after_s=60.0,
                    )
                if new_job.webhook is not None and max_pending_webhooks is not None:
                    _check_pending_webhooks(connection, new_job.client, max_pending_webhooks)
                if (new_job.text_bytes or new_job.image_bytes) and max_queued_bytes is not None:
                    _check_queued_bytes(connection, new_job, max_queued_bytes)
                row = connection.execute(jobs.insert().values(**_new_row(new_job, now)).returning(jobs)).one()
                record = JobRecord(**row._mapping)
                for number, chunk in enumerate(new_job.chunks):
                    connection.execute(texts.insert().values(job_id=record.id, number=number, chunk=chunk.decode()))
                publish_status(connection, record, now)
                return record, True
        except IntegrityError:  # another request with the same key was accepted at the same moment
            existing = self._find_by_idempotency_key(new_job)
            if existing is None:
                raise
            return existing, False

    def _find_by_idempotency_key(self, new_job: NewJob) -> JobRecord | None:
        if new_job.idempotency_key is None:
            return None
        existing = self._first(
            sa.and_(jobs.c.made_by == new_job.made_by, jobs.c.idempotency_key == new_job.idempotency_key)
        )
        if existing is not None and existing.body_digest != new_job.body_digest:
            raise IdempotencyConflict(
                f"the Idempotency-Key {short_repr(new_job.idempotency_key)} was used before with another body, for "
                f"job {existing.id}. Send the same body, or another key.",
                field="Idempotency-Key",
            )
        return existing

    def get(self, job_id: str, made_by: str | None = None) -> JobRecord:
        """Return a job.

        Raises JobNotFound, here and below also if `made_by` is given and another API key created the job.
        """
        found = self._first(sa.and_(jobs.c.id == job_id, _is_made_by(made_by)))
        if found is None:
            raise JobNotFound(
                f"there is no job {short_repr(job_id)}: it never existed, or it was deleted after jobs.ttl_s. GET "
                "/v1/jobs lists the jobs."
            )
        return found

    def page(self, limit: int, before_seq: int | None = None, made_by: str | None = None) -> Page:
        """The newest `limit` jobs, newest first; with `before_seq`, of those accepted before it.

        Fewer, but at least one, if they are longer than `MAX_PAGE_CHARS` together. New jobs do not shift later pages.
        With `made_by`, only the jobs of that API key.
        """
        num_chars = sa.func.length(jobs.c.input) + sa.func.length(jobs.c.request)
        sizes = (
            sa.select(jobs.c.seq, num_chars).where(_is_made_by(made_by)).order_by(jobs.c.seq.desc()).limit(limit + 1)
        )
        if before_seq is not None:
            sizes = sizes.where(jobs.c.seq < before_seq)
        with self._engine.connect() as connection:
            rows = connection.execute(sizes).all()
            totals = itertools.accumulate(size for _, size in rows[:limit])
            num_jobs = max(1, sum(total <= MAX_PAGE_CHARS for total in totals))
            seqs = [seq for seq, _ in rows[:num_jobs]]
            found = connection.execute(sa.select(jobs).where(jobs.c.seq.in_(seqs)).order_by(jobs.c.seq.desc()))
            return Page([JobRecord(**row._mapping) for row in found], len(rows) > num_jobs)

    def cancel(self, job_id: str, now: float, made_by: str | None = None) -> JobRecord:
        """Cancel the job unless it has ended. Returns its record.

        The worker that executes it notices at its next `renew`.
        """
        self._commit_transition(sa.and_(jobs.c.id == job_id, _is_made_by(made_by)), "canceled", now)
        return self.get(job_id, made_by)

    def events(self, job_id: str, after: int, limit: int = 1000) -> list[JobEvent]:
        """The events of a job after event number `after`, in order."""
        query = (
            sa.select(events.c.seq, events.c.at, events.c.type, events.c.data)
            .where(events.c.job_id == job_id, events.c.seq > after)
            .order_by(events.c.seq)
            .limit(limit)
        )
        with self._engine.connect() as connection:
            return [JobEvent(**row._mapping) for row in connection.execute(query)]

    def chunk(self, job_id: str, number: int) -> str | None:
        """A chunk of the texts of a job, or as chunk 0 its start image; None if the job has ended."""
        query = sa.select(texts.c.chunk).where(texts.c.job_id == job_id, texts.c.number == number)
        with self._engine.connect() as connection:
            found: str | None = connection.scalar(query)
        return found

    def states(self, job_ids: Collection[str]) -> dict[str, JobState]:
        """The states of those of the jobs that exist."""
        query = sa.select(jobs.c.id, jobs.c.status, jobs.c.last_event, jobs.c.made_by).where(jobs.c.id.in_(job_ids))
        with self._engine.connect() as connection:
            return {row.id: JobState(row.status, row.last_event, row.made_by) for row in connection.execute(query)}

    # ── Housekeeping ──────────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self, ttl_s: float, now: float) -> int:
        """Fail the jobs that were not started within `ttl_s`. Returns their number."""
        waiting = sa.select(jobs.c.id, jobs.c.attempt).where(
            jobs.c.status == "starting", jobs.c.created_at < now - ttl_s
        )
        error = JobExpired(f"no engine could run the job within {ttl_s:g} s. Post it again when its model is served.")
        expired = 0
        with self._engine.connect() as connection:
            rows = connection.execute(waiting).all()
        for row in rows:
            is_unchanged = sa.and_(jobs.c.id == row.id, jobs.c.attempt == row.attempt, jobs.c.status == "starting")
            expired += self._commit_transition(is_unchanged, "failed", now, **error_columns(error)) is not None
        return expired

    def expired(self, ttl_s: float, now: float, limit: int) -> list[str]:
        """Ids of jobs that ended more than `ttl_s` ago.

        Delete the files of a job before its record, so that no file is orphaned.
        """
        query = sa.select(jobs.c.id).where(jobs.c.completed_at < now - ttl_s).order_by(jobs.c.completed_at).limit(limit)
        with self._engine.connect() as connection:
            return list(connection.scalars(query))

    def delete(self, job_id: str, *, with_deliveries: bool = False) -> None:
        """Delete an ended job and its events; its webhooks that are still to be delivered, which hold it, on demand."""
        with write_transaction(self._engine) as connection:
            deleted = connection.execute(jobs.delete().where(jobs.c.id == job_id, jobs.c.status.in_(TERMINAL_STATUSES)))
            if deleted.rowcount:
                connection.execute(events.delete().where(events.c.job_id == job_id))
                if with_deliveries:
                    is_of_job = deliveries.c.body.startswith(f'{{"id":"{job_id}"', autoescape=True)
                    connection.execute(deliveries.delete().where(is_of_job))

    def _first(self, condition: ColumnElement[bool]) -> JobRecord | None:
        found = self._all(sa.select(jobs).where(condition))
        return found[0] if found else None


def _check_pending_webhooks(connection: Connection, client: str, maximum: int) -> None:
    """Raises RateLimited if the client has its quarter of pending webhooks, and QueueFull if all have the maximum."""
    of_client = sa.func.count().filter(deliveries.c.client == client)
    num_pending, num_of_client = connection.execute(sa.select(sa.func.count(), of_client).select_from(deliveries)).one()
    explanation = (
        "(jobs.max_pending_webhooks). Receivers have not accepted them yet. Try again when they do, post the job "
        "without a webhook, or erase jobs with DELETE /v1/jobs/ID?erase=true."
    )
    max_of_client = math.ceil(maximum / 4)
    if num_of_client >= max_of_client:
        raise RateLimited(
            f"{client} has {num_of_client} pending webhooks; at most {max_of_client} are allowed {explanation}",
            retry_after_s=60.0,
        )
    if num_pending >= maximum:
        raise QueueFull(
            f"{num_pending} webhooks are pending; at most {maximum} are allowed {explanation}", retry_after_s=60.0
        )


def _check_queued_bytes(connection: Connection, new_job: NewJob, maximum: int) -> None:
    """Raises RateLimited if the API key's data would be more than its quarter, and QueueFull if all would be more.

    Data are texts and start images.
    """
    num_bytes, num_new_bytes = jobs.c.text_bytes + jobs.c.image_bytes, new_job.text_bytes + new_job.image_bytes
    of_this_key = sa.func.sum(num_bytes).filter(jobs.c.made_by == new_job.made_by)
    is_open = jobs.c.status.not_in(TERMINAL_STATUSES)
    row = connection.execute(sa.select(sa.func.sum(num_bytes), of_this_key).where(is_open)).one()
    total, total_of_key = (int(each or 0) for each in row)
    max_of_key = math.ceil(maximum / 4)
    if new_job.made_by and total_of_key + num_new_bytes > max_of_key:
        raise RateLimited(
            f"the jobs of the key {new_job.made_by!r} have {total_of_key} bytes of texts and start images; with these "
            f"{num_new_bytes} they would have more than {max_of_key}, a quarter of jobs.max_queued_bytes. Try "
            "again when one has ended.",
            retry_after_s=60.0,
        )
    if total + num_new_bytes > maximum:
        raise QueueFull(
            f"the jobs have {total} bytes of texts and start images; with these {num_new_bytes} they would have "
            f"more than {maximum} (jobs.max_queued_bytes). Try again when one has ended.",
            retry_after_s=60.0,
        )


def _new_row(new_job: NewJob, now: float) -> dict[str, Any]:
    return {name: value for name, value in vars(new_job).items() if name in jobs.c} | {
        "status": "starting",
        "input": new_job.input.decode(),
        "request": new_job.request.decode(),
        "webhook_events": ",".join(new_job.webhook_events),
        "created_at": now,
        "order_at": queue_order(now, new_job.priority),
        "not_before": 0.0,
        "attempt": 0,
        "num_losses": 0,
        "num_engine_losses": 0,
        "last_event": 1,
        "metrics": "{}",
    }


def _is_made_by(made_by: str | None) -> ColumnElement[bool]:
    return sa.true() if made_by is None else jobs.c.made_by == made_by


def is_version_needed(engine: Engine, key: ModelKey) -> bool:
    """Whether a job that has not ended runs on this version of a model."""
    is_needed = sa.and_(
        jobs.c.model == key.name, jobs.c.version == key.version, jobs.c.status.not_in(TERMINAL_STATUSES)
    )
    with engine.connect() as connection:
        return connection.execute(sa.select(jobs.c.id).where(is_needed).limit(1)).first() is not None
