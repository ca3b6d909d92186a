"""Workers' claims on jobs in the database: taken, renewed and ended.

**Leases and fencing.** A worker holds a lease of `LEASE_S` on each job that it executes, and extends it with `renew`.
After the lease expires, any worker may claim the job; this increments `attempt`. The former holder may still be
executing, but its statements name its own attempt and match no row. So clocks that differ between machines, or jump,
cost at worst a second execution, never a second end.

Calls block: run them in threads. Any number of processes may call at once. `now` is Unix time in seconds.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import ColumnElement, Engine

from noria.errors import EngineLost, NoriaError
from noria.jobs.completion import JobCompletionReporter
from noria.jobs.database.schema import jobs
from noria.jobs.database.transitions import transition, write_event
from noria.jobs.database.turns import QueuedJob, Turns
from noria.jobs.records import TERMINAL_STATUSES, Claim, JobRecord, JobStatus, Metrics
from noria.observe.logs.request_log import RequestLogRecord
from noria.storage.database import write_transaction

LEASE_S = 15.0
# A job that crashes its process costs a restart for each loss. A harmless job does not lose 20 processes in a row,
# however many are killed.
MAX_LOSSES = 20


class ClaimStore:
    """The claims on the jobs of a database. Passes each job that it ends to `reporter`."""

    def __init__(self, engine: Engine, reporter: JobCompletionReporter | None = None) -> None:
        self._engine, self._reporter, self._turns = engine, reporter or JobCompletionReporter(), Turns()

    def claim(self, owner: str, models: Collection[tuple[str, str]], limit: int, now: float) -> list[JobRecord]:
        """Claim up to `limit` jobs for `owner`, of any (model, version) in `models`.

        API keys take turns. Fails a job that was lost `MAX_LOSSES` times instead of claiming it.
        """
        if limit < 1 or not models:
            return []
        claimed = []
        for candidate in self._next_jobs(models, limit, now):
            is_unchanged = sa.and_(jobs.c.id == candidate.id, jobs.c.attempt == candidate.attempt, _is_claimable(now))
            num_losses = candidate.num_losses + (candidate.status == "processing")
            if num_losses >= MAX_LOSSES:
                error = EngineLost(f"the process that ran the job died {num_losses} times; the job is not retried.")
                self._commit_transition(is_unchanged, "failed", now, **error_columns(error))
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

    def _next_jobs(self, models: Collection[tuple[str, str]], limit: int, now: float) -> list[QueuedJob]:
        """Up to `limit` claimable jobs of `models`, in the order in which they are to be claimed."""
        with self._engine.connect() as connection:
            rows = connection.execute(_first_of_each_key(frozenset(models)), {"now": now, "limit": limit}).all()
            if not rows:  # most of the time
                return []
            num_running = {row[0]: row[1] for row in connection.execute(_NUM_RUNNING, {"now": now})}
        return self._turns.take([QueuedJob(*row) for row in rows], num_running, limit)

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
        metrics: Metrics,
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
        return self._end(claim, "failed", now, log_record, **error_columns(error))

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

    def _all(self, query: sa.Select[Any]) -> list[JobRecord]:
        with self._engine.connect() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(query)]


def _is_claimable(now: float | ColumnElement[float]) -> ColumnElement[bool]:
    """The condition that a job waits for a worker, or has lost its worker."""
    return sa.or_(
        sa.and_(jobs.c.status == "starting", jobs.c.not_before <= now),
        sa.and_(jobs.c.status == "processing", jobs.c.lease_until < now),
    )


@functools.lru_cache(maxsize=8)  # an idle front end asks twice a second, and making the query takes most of the time
def _first_of_each_key(models: frozenset[tuple[str, str]]) -> sa.Select[Any]:
    """The query for the first `limit` jobs of each API key that are claimable at `now` and of one of `models`."""
    is_executable = sa.or_(*(sa.and_(jobs.c.model == model, jobs.c.version == version) for model, version in models))
    place = sa.func.row_number().over(partition_by=jobs.c.made_by, order_by=(jobs.c.order_at, jobs.c.seq))
    placed = (
        sa.select(*(jobs.c[name] for name in QueuedJob._fields), place.label("place"))
        .where(_is_claimable(_NOW), is_executable)
        .subquery()
    )
    return sa.select(*(placed.c[name] for name in QueuedJob._fields)).where(placed.c.place <= sa.bindparam("limit"))


_NOW: ColumnElement[float] = sa.bindparam("now", type_=sa.Float)
_NUM_RUNNING = (
    sa.select(jobs.c.made_by, sa.func.count())
    .where(jobs.c.status == "processing", jobs.c.lease_until >= _NOW)
    .group_by(jobs.c.made_by)
)


def _is_held(claim: Claim) -> ColumnElement[bool]:
    """The condition that the claim is still valid."""
    return sa.and_(
        jobs.c.id == claim.job_id,
        jobs.c.owner == claim.owner,
        jobs.c.attempt == claim.attempt,
        jobs.c.status == "processing",
    )


def error_columns(error: NoriaError) -> dict[str, Any]:
    """The columns of a job that failed with `error`."""
    return {"error": error.message, "error_code": error.code}
