"""The database of jobs: accepts, claims, renews, ends and deletes them.

**Leases and fencing.** A worker holds a lease of `LEASE_S` on each job that it executes, and extends it with `renew`.
After the lease expires, any worker may claim the job; this increments `attempt`. The former holder may still be
executing, but its statements name its own attempt and match no row. So clocks that differ between machines, or jump,
cost at worst a second execution, never a second end.

Calls block: run them in threads. Any number of processes may call at once. `now` is Unix time in seconds.
"""

import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy import ColumnElement, Engine
from sqlalchemy.exc import IntegrityError

from noria.errors import (
    EngineLost,
    IdempotencyConflict,
    JobExpired,
    JobNotFound,
    NoriaError,
    QueueFull,
    RateLimited,
    short_repr,
)
from noria.jobs.completion import JobCompletionReporter
from noria.jobs.records import (
    TERMINAL_STATUSES,
    Claim,
    JobEvent,
    JobRecord,
    JobState,
    JobStatus,
    NewJob,
    queue_order,
)
from noria.jobs.schema import deliveries, events, jobs
from noria.jobs.transitions import publish_status, transition, write_event
from noria.jobs.turns import QueuedJob, Turns
from noria.observe.logs.request_log import RequestLogRecord
from noria.storage.database import interrupt, write_transaction

LEASE_S = 15.0
# A job that crashes its process costs a restart for each loss. A harmless job does not lose 20 processes in a row,
# however many are killed.
MAX_LOSSES = 20


# Of the texts of the jobs of one page, unless a single one is longer. Only jobs of older versions, and those whose prompts
# are longer than by default, have more than 10,000 characters.
MAX_PAGE_CHARS = 1_048_576


class Page(NamedTuple):
    """Some jobs of a list, and whether more follow."""

    records: list[JobRecord]
    has_more: bool


class JobStore:
    """The jobs of a database opened by `schema.open_jobs_database`. Passes each job that it ends to `reporter`."""

    def __init__(self, engine: Engine, reporter: JobCompletionReporter | None = None) -> None:
        self._engine, self._reporter, self._turns = engine, reporter or JobCompletionReporter(), Turns()

    def interrupt(self) -> None:
        """Fail all calls that wait for PostgreSQL, and all later ones."""
        interrupt(self._engine)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # ── For clients ───────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(
        self, new_job: NewJob, max_queued: int, now: float, max_queued_per_key: int | None = None
    ) -> tuple[JobRecord, bool]:
        """Store `new_job`, or find the job that its idempotency key created before.

        Returns the job and whether it is new. When this returns, the job is durable.

        Raises:
            IdempotencyConflict: the key was used with another body before.
            RateLimited: the API key has `max_queued_per_key` queued jobs.
            QueueFull: `max_queued` jobs are queued. Front ends that accept at the same moment may each exceed it by
                one.

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
                row = connection.execute(jobs.insert().values(**_new_row(new_job, now)).returning(jobs)).one()
                record = JobRecord(**row._mapping)
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
                f"the Idempotency-Key {short_repr(new_job.idempotency_key)} was used before with another body, for job "
                f"{existing.id}. "
                "Send the same body, or another key.",
                field="Idempotency-Key",
            )
        return existing

    def get(self, job_id: str, made_by: str | None = None) -> JobRecord:
        """One job.

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

    def states(self, job_ids: Collection[str]) -> dict[str, JobState]:
        """The states of those of the jobs that exist."""
        query = sa.select(jobs.c.id, jobs.c.status, jobs.c.last_event).where(jobs.c.id.in_(job_ids))
        with self._engine.connect() as connection:
            return {row.id: JobState(row.status, row.last_event) for row in connection.execute(query)}

    # ── For workers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, owner: str, models: Collection[tuple[str, str]], limit: int, now: float) -> list[JobRecord]:
        """Claim up to `limit` jobs for `owner`, of any (model, version) in `models`.

        API keys take turns. Fails a job that was lost `MAX_LOSSES` times instead of claiming it.
        """
        if limit < 1 or not models:
            return []
        is_claimable = sa.or_(
            sa.and_(jobs.c.status == "starting", jobs.c.not_before <= now),
            sa.and_(jobs.c.status == "processing", jobs.c.lease_until < now),
        )
        is_executable = sa.or_(
            *(sa.and_(jobs.c.model == model, jobs.c.version == version) for model, version in models)
        )
        claimed = []
        for candidate in self._next_jobs(sa.and_(is_claimable, is_executable), limit, now):
            is_unchanged = sa.and_(jobs.c.id == candidate.id, jobs.c.attempt == candidate.attempt, is_claimable)
            num_losses = candidate.num_losses + (candidate.status == "processing")
            if num_losses >= MAX_LOSSES:
                self._commit_transition(is_unchanged, "failed", now, **_error_columns(_too_many_losses(num_losses)))
                continue
            with write_transaction(self._engine) as connection:
                record = transition(
                    connection,
                    is_unchanged,
                    "processing",
                    now,
                    releases_lease=False,
                    attempt=candidate.attempt + 1,
                    num_losses=num_losses,
                    owner=owner,
                    lease_until=now + LEASE_S,
                    # It may have been accepted after `now` was read, or by another clock.
                    started_at=sa.case((jobs.c.created_at > now, jobs.c.created_at), else_=now),
                )
            if record is not None:
                claimed.append(record)
        return claimed

    def _next_jobs(self, condition: ColumnElement[bool], limit: int, now: float) -> list[QueuedJob]:
        """Up to `limit` jobs that fulfil `condition`, in the order in which they are to be claimed."""
        place = sa.func.row_number().over(partition_by=jobs.c.made_by, order_by=(jobs.c.order_at, jobs.c.seq))
        columns = [jobs.c[name] for name in QueuedJob._fields]
        placed = sa.select(*columns, place.label("place")).where(condition).subquery()
        first_of_each_key = sa.select(*(placed.c[name] for name in QueuedJob._fields)).where(placed.c.place <= limit)
        running = (
            sa.select(jobs.c.made_by, sa.func.count())
            .where(jobs.c.status == "processing", jobs.c.lease_until >= now)
            .group_by(jobs.c.made_by)
        )
        with self._engine.connect() as connection:
            queued = [QueuedJob(*row) for row in connection.execute(first_of_each_key)]
            num_running = {row[0]: row[1] for row in connection.execute(running)}
        return self._turns.take(queued, num_running, limit)

    def renew(self, claims: Mapping[Claim, bytes | None], now: float) -> set[Claim]:
        """Renew the leases of `claims` and store the progress (JSON) of those that made any.

        Returns the claims that are void.
        """
        lost: set[Claim] = set()
        if not claims:
            return lost
        with write_transaction(self._engine) as connection:
            in_lock_order = sorted(claims.items(), key=lambda pair: pair[0].job_id)  # one order everywhere: no deadlock
            for claim, progress in in_lock_order:
                values: dict[str, Any] = {"lease_until": now + LEASE_S}
                if progress is not None:
                    values["last_event"] = jobs.c.last_event + 1
                row = connection.execute(
                    jobs.update().where(_is_held(claim)).values(**values).returning(jobs.c.last_event)
                ).first()
                if row is None:
                    lost.add(claim)
                elif progress is not None:
                    write_event(connection, claim.job_id, row.last_event, now, "progress", progress)
        return lost

    def still_held(self, claims: Collection[Claim]) -> set[Claim]:
        """The `claims` that are still valid; one read, no write."""
        by_id = {claim.job_id: claim for claim in claims}
        query = sa.select(jobs.c.id, jobs.c.owner, jobs.c.attempt, jobs.c.status).where(jobs.c.id.in_(by_id))
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        held = {Claim(row.id, row.owner, row.attempt) for row in rows if row.status == "processing"}
        return held & set(claims)

    def finish(
        self,
        claim: Claim,
        output: Collection[str],
        metrics: Mapping[str, float],
        now: float,
        log_record: RequestLogRecord | None = None,
    ) -> bool:
        """End the job as succeeded, with the names of its files.

        Returns False, and changes nothing, if the claim is void. `log_record`, here and below, holds what the executor
        measured, for the log.
        """
        values: dict[str, Any] = {"output": ",".join(output), "metrics": msgspec.json.encode(metrics).decode()}
        return self._end(claim, "succeeded", now, log_record, **values)

    def fail(self, claim: Claim, error: NoriaError, now: float, log_record: RequestLogRecord | None = None) -> bool:
        """End the job as failed. Returns False, and changes nothing, if the claim is void."""
        return self._end(claim, "failed", now, log_record, **_error_columns(error))

    def requeue(
        self, claim: Claim, now: float, *, delay_s: float = 0.0, process_lost: bool = False, engine_lost: bool = False
    ) -> bool:
        """Put the job back into the queue, claimable after `delay_s`.

        Returns False, and changes nothing, if the claim is void. `process_lost` counts a dead worker process,
        `engine_lost` a dead engine.
        """
        values: dict[str, Any] = {
            "not_before": now + delay_s,
            "num_losses": jobs.c.num_losses + int(process_lost),
            "num_engine_losses": jobs.c.num_engine_losses + int(engine_lost),
        }
        return self._end(claim, "starting", now, **values)

    def reclaim(self, owner: str, now: float) -> list[JobRecord]:
        """Requeue the jobs of earlier incarnations of `owner`, which are dead, before their leases expire.

        Returns these jobs as they were before.
        """
        worker_id, _, _ = owner.rpartition("/")
        held = sa.and_(jobs.c.owner.startswith(f"{worker_id}/", autoescape=True), jobs.c.owner != owner)
        reclaimed = []
        for record in self._all(sa.select(jobs).where(held, jobs.c.status == "processing")):
            assert record.owner is not None
            if self.requeue(Claim(record.id, record.owner, record.attempt), now, process_lost=True):
                reclaimed.append(record)
        return reclaimed

    def _end(
        self, claim: Claim, status: JobStatus, now: float, log_record: RequestLogRecord | None = None, **values: Any
    ) -> bool:
        return self._commit_transition(_is_held(claim), status, now, log_record, **values) is not None

    def _commit_transition(
        self,
        condition: ColumnElement[bool],
        status: JobStatus,
        now: float,
        log_record: RequestLogRecord | None = None,
        **values: Any,
    ) -> JobRecord | None:
        """Run `transition` in a transaction of its own, and report the job after the commit if it has ended."""
        with write_transaction(self._engine) as connection:
            record = transition(connection, condition, status, now, **values)
        if record is not None and record.status in TERMINAL_STATUSES:
            self._reporter.report(record, log_record)
        return record

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
            expired += self._commit_transition(is_unchanged, "failed", now, **_error_columns(error)) is not None
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

    def _all(self, query: sa.Select[Any]) -> list[JobRecord]:
        with self._engine.connect() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(query)]


def _new_row(new_job: NewJob, now: float) -> dict[str, Any]:
    return {
        "id": new_job.id,
        "status": "starting",
        "model": new_job.model,
        "version": new_job.version,
        "input": new_job.input.decode(),
        "request": new_job.request.decode(),
        "base_url": new_job.base_url,
        "webhook": new_job.webhook,
        "webhook_events": ",".join(new_job.webhook_events),
        "made_by": new_job.made_by,
        "idempotency_key": new_job.idempotency_key,
        "body_digest": new_job.body_digest,
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


def _is_held(claim: Claim) -> ColumnElement[bool]:
    """The condition that the claim is still valid."""
    return sa.and_(
        jobs.c.id == claim.job_id,
        jobs.c.owner == claim.owner,
        jobs.c.attempt == claim.attempt,
        jobs.c.status == "processing",
    )


def _error_columns(error: NoriaError) -> dict[str, Any]:
    return {"error": error.message, "error_code": error.code}


def _too_many_losses(times: int) -> EngineLost:
    return EngineLost(f"the process that ran the job died {times} times; the job is not retried.")
