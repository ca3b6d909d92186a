"""The jobs in their database. Every change of a status is one conditional UPDATE, so whoever races, a job ends exactly once.

**Leases and fences.** Who draws a job holds a lease of `LEASE_S`, renewed by `beat`. When it has run out, anybody may claim the job,
with an `attempt` that is one higher; whoever held the older one still draws, perhaps, but every statement of its asks for its own
attempt and finds nothing. So clocks that differ between machines, or jump, cost a second drawing at worst, never a second end.

Calls block: they belong into threads. They may be made by any number of processes at once. `now` is seconds since 1970.
"""

import uuid
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Engine
from sqlalchemy.exc import IntegrityError

from noria.errors import EngineLost, IdempotencyConflict, JobExpired, JobNotFound, NoriaError, QueueFull, short_repr
from noria.jobs.completion import JobCompletionReporter
from noria.jobs.records import (
    TERMINAL_STATUSES,
    Claim,
    JobEvent,
    JobEventType,
    JobRecord,
    JobStatus,
    NewJob,
    StatusEventData,
    allowed_previous,
    as_job,
    output_urls,
    queue_order,
    webhook_event_for,
)
from noria.jobs.schema import deliveries, events, jobs, write_transaction
from noria.observe.logs.request_log import RequestLogRecord

LEASE_S = 15.0
# Of a job that ends whatever draws it, each loss costs a restart; of an innocent one, 20 in a row happen in no storm of kills.
MAX_LOSSES = 20


class JobStore:
    """The jobs of one database, as `schema.open_database` has opened it. What ends here is told by `ends`."""

    def __init__(self, engine: Engine, reporter: JobCompletionReporter | None = None) -> None:
        self._engine, self._reporter = engine, reporter or JobCompletionReporter()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # ── The clients' side ───────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(self, new_job: NewJob, max_queued: int, now: float) -> tuple[JobRecord, bool]:
        """Keep `new`, or find the job that its key has made before; and whether it is new. Once this returns, the job is safe.

        Raises:
            IdempotencyConflict: the key came with another body before.
            QueueFull: `max_queued` jobs wait. Front ends that accept at the same moment may exceed it by one each.

        """
        if (existing := self._find_by_idempotency_key(new_job)) is not None:
            return existing, False
        try:
            with write_transaction(self._engine) as connection:
                num_waiting = connection.scalar(
                    sa.select(sa.func.count()).select_from(jobs).where(jobs.c.status == "starting")
                )
                assert num_waiting is not None
                if num_waiting >= max_queued:
                    raise QueueFull(
                        f"{num_waiting} jobs wait; at most {max_queued} may. Try again later.", retry_after_s=60.0
                    )
                row = connection.execute(jobs.insert().values(**_new_row(new_job, now)).returning(jobs)).one()
                record = JobRecord(**row._mapping)
                _publish_status(connection, record, now)
                return record, True
        except IntegrityError:  # the same key, at the same moment
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
                f"the Idempotency-Key {short_repr(new_job.idempotency_key)} came before with another body, for job {existing.id}. Send that body again, "
                "or another key.",
                field="Idempotency-Key",
            )
        return existing

    def get(self, job_id: str, made_by: str | None = None) -> JobRecord:
        """One job; with `made_by`, if that is who made it. Raises JobNotFound."""
        found = self._first(sa.and_(jobs.c.id == job_id, _is_made_by(made_by)))
        if found is None:
            raise JobNotFound(
                f"there is no job {short_repr(job_id)}: it never was, or its time to live is over. GET /v1/jobs lists the jobs."
            )
        return found

    def page(self, limit: int, before_seq: int | None = None, made_by: str | None = None) -> list[JobRecord]:
        """The newest `limit` jobs, or those accepted before `before_seq`; newest first. New jobs move nobody to another page.

        With `made_by` those that it has made, else all.
        """
        query = sa.select(jobs).where(_is_made_by(made_by)).order_by(jobs.c.seq.desc()).limit(limit)
        if before_seq is not None:
            query = query.where(jobs.c.seq < before_seq)
        return self._all(query)

    def cancel(self, job_id: str, now: float, made_by: str | None = None) -> JobRecord:
        """End the job as canceled, unless it has ended; its record after that. Who draws it learns so at the next `beat`.

        With `made_by`, if that is who made it. Raises JobNotFound.
        """
        self._commit_transition(sa.and_(jobs.c.id == job_id, _is_made_by(made_by)), "canceled", now)
        return self.get(job_id, made_by)

    def events(self, job_id: str, after: int, limit: int = 1000) -> list[JobEvent]:
        """What happened to a job after event number `after`, in order."""
        query = (
            sa.select(events.c.seq, events.c.at, events.c.type, events.c.data)
            .where(events.c.job_id == job_id, events.c.seq > after)
            .order_by(events.c.seq)
            .limit(limit)
        )
        with self._engine.connect() as connection:
            return [JobEvent(**row._mapping) for row in connection.execute(query)]

    # ── The runners' side ───────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, owner: str, models: Collection[tuple[str, str]], limit: int, now: float) -> list[JobRecord]:
        """Up to `limit` jobs, from now on `owner`'s to draw, that are of one of the (model, version) in `serves`.

        A job that was lost `MAX_LOSSES` times is failed here instead.
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
        candidates = self._all(
            sa.select(jobs).where(is_claimable, is_executable).order_by(jobs.c.order_at, jobs.c.seq).limit(limit)
        )
        claimed = []
        for candidate in candidates:
            is_unchanged = sa.and_(jobs.c.id == candidate.id, jobs.c.attempt == candidate.attempt, is_claimable)
            num_losses = candidate.num_losses + (candidate.status == "processing")
            if num_losses >= MAX_LOSSES:
                self._commit_transition(is_unchanged, "failed", now, **_error_columns(_too_many_losses(num_losses)))
                continue
            with write_transaction(self._engine) as connection:
                record = _transition(
                    connection,
                    is_unchanged,
                    "processing",
                    now,
                    releases_lease=False,
                    attempt=candidate.attempt + 1,
                    num_losses=num_losses,
                    owner=owner,
                    lease_until=now + LEASE_S,
                    started_at=now,
                )
            if record is not None:
                claimed.append(record)
        return claimed

    def renew(self, claims: Mapping[Claim, bytes | None], now: float) -> set[Claim]:
        """Renew the leases of `claims` and write down the progress that some of them made (JSON). Returns those that are lost."""
        lost: set[Claim] = set()
        if not claims:
            return lost
        with write_transaction(self._engine) as connection:
            for claim, progress in sorted(
                claims.items(), key=lambda pair: pair[0].job_id
            ):  # one order: no two block each other
                values: dict[str, Any] = {"lease_until": now + LEASE_S}
                if progress is not None:
                    values["last_event"] = jobs.c.last_event + 1
                row = connection.execute(
                    jobs.update().where(_is_held(claim)).values(**values).returning(jobs.c.last_event)
                ).first()
                if row is None:
                    lost.add(claim)
                elif progress is not None:
                    _write_event(connection, claim.job_id, row.last_event, now, "progress", progress)
        return lost

    def still_held(self, claims: Collection[Claim]) -> set[Claim]:
        """Those of `claims` that nobody has taken or ended; a cheap read."""
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
        """End the job as succeeded, with its files' names. False, and nothing done, if it is no longer the claim's.

        `note`, here and below, is what the log is to say of its drawing.
        """
        values: dict[str, Any] = {"output": ",".join(output), "metrics": msgspec.json.encode(metrics).decode()}
        return self._end(claim, "succeeded", now, log_record, **values)

    def fail(self, claim: Claim, error: NoriaError, now: float, log_record: RequestLogRecord | None = None) -> bool:
        """End the job as failed. False, and nothing done, if it is no longer the claim's."""
        return self._end(claim, "failed", now, log_record, **_error_columns(error))

    def requeue(
        self, claim: Claim, now: float, *, delay_s: float = 0.0, process_lost: bool = False, engine_lost: bool = False
    ) -> bool:
        """Let others draw the job, after `delay_s`; False if it is no longer the claim's.

        `lost` counts the end of the process that drew it, `engine_lost` that of its engines.
        """
        values: dict[str, Any] = {
            "not_before": now + delay_s,
            "num_losses": jobs.c.num_losses + int(process_lost),
            "num_engine_losses": jobs.c.num_engine_losses + int(engine_lost),
        }
        return self._end(claim, "starting", now, **values)

    def reclaim(self, owner: str, now: float) -> list[JobRecord]:
        """Free what `owner`'s dead predecessors of the same server and name held, without waiting for their leases.

        Returns the jobs that wait again, as they were before.
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
        """`_move` as a transaction of its own; what ended is told of once that is safe."""
        with write_transaction(self._engine) as connection:
            record = _transition(connection, condition, status, now, **values)
        if record is not None and record.status in TERMINAL_STATUSES:
            self._reporter.report(record, log_record)
        return record

    # ── Housekeeping ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self, ttl_s: float, now: float) -> int:
        """Fail the jobs that nobody has drawn within their time to live; how many those were."""
        waiting = sa.select(jobs).where(jobs.c.status == "starting", jobs.c.created_at < now - ttl_s)
        error = JobExpired(f"no engine could draw it within {ttl_s:g} s. Post it again when its model is served.")
        expired = 0
        for record in self._all(waiting):
            is_unchanged = sa.and_(
                jobs.c.id == record.id, jobs.c.attempt == record.attempt, jobs.c.status == "starting"
            )
            expired += self._commit_transition(is_unchanged, "failed", now, **_error_columns(error)) is not None
        return expired

    def expired(self, ttl_s: float, now: float, limit: int) -> list[str]:
        """The jobs that ended more than `ttl_s` ago. Delete their files first, then them: so no file is left without its job."""
        query = sa.select(jobs.c.id).where(jobs.c.completed_at < now - ttl_s).order_by(jobs.c.completed_at).limit(limit)
        with self._engine.connect() as connection:
            return list(connection.scalars(query))

    def delete(self, job_id: str) -> None:
        """Forget an ended job and its events."""
        with write_transaction(self._engine) as connection:
            deleted = connection.execute(jobs.delete().where(jobs.c.id == job_id, jobs.c.status.in_(TERMINAL_STATUSES)))
            if deleted.rowcount:
                connection.execute(events.delete().where(events.c.job_id == job_id))

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
    """The job is still the claim's."""
    return sa.and_(
        jobs.c.id == claim.job_id,
        jobs.c.owner == claim.owner,
        jobs.c.attempt == claim.attempt,
        jobs.c.status == "processing",
    )


def _transition(
    connection: Connection,
    condition: ColumnElement[bool],
    status: JobStatus,
    now: float,
    *,
    releases_lease: bool = True,
    **values: Any,
) -> JobRecord | None:
    """Give one job another status, if `condition` holds and the life cycle allows it; its record then, else None.

    `processing` may follow itself: a claim after a lease that has run out.
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
    _publish_status(connection, record, now)
    return record


def _publish_status(connection: Connection, record: JobRecord, now: float) -> None:
    """Write the new status down for those who watch, and for the webhook; in the same transaction as the status itself."""
    event_data = StatusEventData(record.status, output_urls(record), record.error, record.error_code)
    _write_event(connection, record.id, record.last_event, now, "status", msgspec.json.encode(event_data))
    event_name = webhook_event_for(record)
    if record.webhook is not None and event_name in record.webhook_events.split(","):
        connection.execute(
            deliveries.insert().values(
                id=f"msg_{uuid.uuid4().hex}",
                url=record.webhook,
                body=msgspec.json.encode(as_job(record)).decode(),
                num_tries=0,
                due_at=now,
            )
        )


def _write_event(
    connection: Connection, job_id: str, seq: int, now: float, event_type: JobEventType, data: bytes
) -> None:
    connection.execute(events.insert().values(job_id=job_id, seq=seq, at=now, type=event_type, data=data.decode()))


def _error_columns(error: NoriaError) -> dict[str, Any]:
    return {"error": error.message, "error_code": error.code}


def _too_many_losses(times: int) -> EngineLost:
    return EngineLost(f"the processes that drew it ended {times} times; it is not tried again.")
