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

from noria.errors import EngineLost, IdempotencyConflict, JobExpired, JobNotFound, NoriaError, QueueFull, shown
from noria.jobs.ends import Ends
from noria.jobs.records import (
    ENDED,
    Claim,
    Event,
    EventType,
    JobRecord,
    NewJob,
    Status,
    StatusNote,
    as_job,
    before,
    order_of,
    output_urls,
    webhook_event,
)
from noria.jobs.schema import deliveries, events, jobs, writing
from noria.observe.requests import Note

LEASE_S = 15.0
# Of a job that ends whatever draws it, each loss costs a restart; of an innocent one, 20 in a row happen in no storm of kills.
MAX_LOSSES = 20


class Store:
    """The jobs of one database, as `schema.open_database` has opened it. What ends here is told by `ends`."""

    def __init__(self, engine: Engine, ends: Ends | None = None) -> None:
        self._engine, self._ends = engine, ends or Ends()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # ── The clients' side ───────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(self, new: NewJob, max_queued: int, now: float) -> tuple[JobRecord, bool]:
        """Keep `new`, or find the job that its key has made before; and whether it is new. Once this returns, the job is safe.

        Raises:
            IdempotencyConflict: the key came with another body before.
            QueueFull: `max_queued` jobs wait. Front ends that accept at the same moment may exceed it by one each.

        """
        if (known := self._with_key(new)) is not None:
            return known, False
        try:
            with writing(self._engine) as connection:
                waiting = connection.scalar(
                    sa.select(sa.func.count()).select_from(jobs).where(jobs.c.status == "starting")
                )
                assert waiting is not None
                if waiting >= max_queued:
                    raise QueueFull(
                        f"{waiting} jobs wait; at most {max_queued} may. Try again later.", retry_after_s=60.0
                    )
                row = connection.execute(jobs.insert().values(**_columns(new, now)).returning(jobs)).one()
                record = JobRecord(**row._mapping)
                _tell(connection, record, now)
                return record, True
        except IntegrityError:  # the same key, at the same moment
            known = self._with_key(new)
            if known is None:
                raise
            return known, False

    def _with_key(self, new: NewJob) -> JobRecord | None:
        if new.idempotency_key is None:
            return None
        known = self._first(sa.and_(jobs.c.made_by == new.made_by, jobs.c.idempotency_key == new.idempotency_key))
        if known is not None and known.body_digest != new.body_digest:
            raise IdempotencyConflict(
                f"the Idempotency-Key {shown(new.idempotency_key)} came before with another body, for job {known.id}. Send that body again, "
                "or another key.",
                field="Idempotency-Key",
            )
        return known

    def get(self, job_id: str, made_by: str | None = None) -> JobRecord:
        """One job; with `made_by`, if that is who made it. Raises JobNotFound."""
        found = self._first(sa.and_(jobs.c.id == job_id, _of(made_by)))
        if found is None:
            raise JobNotFound(
                f"there is no job {shown(job_id)}: it never was, or its time to live is over. GET /v1/jobs lists the jobs."
            )
        return found

    def page(self, limit: int, before_seq: int | None = None, made_by: str | None = None) -> list[JobRecord]:
        """The newest `limit` jobs, or those accepted before `before_seq`; newest first. New jobs move nobody to another page.

        With `made_by` those that it has made, else all.
        """
        query = sa.select(jobs).where(_of(made_by)).order_by(jobs.c.seq.desc()).limit(limit)
        if before_seq is not None:
            query = query.where(jobs.c.seq < before_seq)
        return self._all(query)

    def cancel(self, job_id: str, now: float, made_by: str | None = None) -> JobRecord:
        """End the job as canceled, unless it has ended; its record after that. Who draws it learns so at the next `beat`.

        With `made_by`, if that is who made it. Raises JobNotFound.
        """
        self._change(sa.and_(jobs.c.id == job_id, _of(made_by)), "canceled", now)
        return self.get(job_id, made_by)

    def events(self, job_id: str, after: int, limit: int = 1000) -> list[Event]:
        """What happened to a job after event number `after`, in order."""
        query = (
            sa.select(events.c.seq, events.c.at, events.c.type, events.c.data)
            .where(events.c.job_id == job_id, events.c.seq > after)
            .order_by(events.c.seq)
            .limit(limit)
        )
        with self._engine.connect() as connection:
            return [Event(**row._mapping) for row in connection.execute(query)]

    # ── The runners' side ───────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, owner: str, serves: Collection[tuple[str, str]], limit: int, now: float) -> list[JobRecord]:
        """Up to `limit` jobs, from now on `owner`'s to draw, that are of one of the (model, version) in `serves`.

        A job that was lost `MAX_LOSSES` times is failed here instead.
        """
        if limit < 1 or not serves:
            return []
        free = sa.or_(
            sa.and_(jobs.c.status == "starting", jobs.c.not_before <= now),
            sa.and_(jobs.c.status == "processing", jobs.c.lease_until < now),
        )
        served = sa.or_(*(sa.and_(jobs.c.model == model, jobs.c.version == version) for model, version in serves))
        candidates = self._all(sa.select(jobs).where(free, served).order_by(jobs.c.order_at, jobs.c.seq).limit(limit))
        claimed = []
        for candidate in candidates:
            unchanged = sa.and_(jobs.c.id == candidate.id, jobs.c.attempt == candidate.attempt, free)
            num_losses = candidate.num_losses + (candidate.status == "processing")
            if num_losses >= MAX_LOSSES:
                self._change(unchanged, "failed", now, **_error(_lost_too_often(num_losses)))
                continue
            with writing(self._engine) as connection:
                mine = _move(
                    connection,
                    unchanged,
                    "processing",
                    now,
                    frees=False,
                    attempt=candidate.attempt + 1,
                    num_losses=num_losses,
                    owner=owner,
                    lease_until=now + LEASE_S,
                    started_at=now,
                )
            if mine is not None:
                claimed.append(mine)
        return claimed

    def beat(self, claims: Mapping[Claim, bytes | None], now: float) -> set[Claim]:
        """Renew the leases of `claims` and write down the progress that some of them made (JSON). Returns those that are lost."""
        lost: set[Claim] = set()
        if not claims:
            return lost
        with writing(self._engine) as connection:
            for claim, progress in sorted(
                claims.items(), key=lambda pair: pair[0].job_id
            ):  # one order: no two block each other
                values: dict[str, Any] = {"lease_until": now + LEASE_S}
                if progress is not None:
                    values["last_event"] = jobs.c.last_event + 1
                row = connection.execute(
                    jobs.update().where(_held(claim)).values(**values).returning(jobs.c.last_event)
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
        self, claim: Claim, output: Collection[str], metrics: Mapping[str, float], now: float, note: Note | None = None
    ) -> bool:
        """End the job as succeeded, with its files' names. False, and nothing done, if it is no longer the claim's.

        `note`, here and below, is what the log is to say of its drawing.
        """
        values: dict[str, Any] = {"output": ",".join(output), "metrics": msgspec.json.encode(metrics).decode()}
        return self._end(claim, "succeeded", now, note, **values)

    def fail(self, claim: Claim, error: NoriaError, now: float, note: Note | None = None) -> bool:
        """End the job as failed. False, and nothing done, if it is no longer the claim's."""
        return self._end(claim, "failed", now, note, **_error(error))

    def hand_back(
        self, claim: Claim, now: float, *, delay_s: float = 0.0, lost: bool = False, engine_lost: bool = False
    ) -> bool:
        """Let others draw the job, after `delay_s`; False if it is no longer the claim's.

        `lost` counts the end of the process that drew it, `engine_lost` that of its engines.
        """
        values: dict[str, Any] = {
            "not_before": now + delay_s,
            "num_losses": jobs.c.num_losses + int(lost),
            "num_engine_losses": jobs.c.num_engine_losses + int(engine_lost),
        }
        return self._end(claim, "starting", now, **values)

    def take_back(self, owner: str, now: float) -> list[JobRecord]:
        """Free what `owner`'s dead predecessors of the same server and name held, without waiting for their leases.

        Returns the jobs that wait again, as they were before.
        """
        place, _, _ = owner.rpartition("/")
        held = sa.and_(jobs.c.owner.startswith(f"{place}/", autoescape=True), jobs.c.owner != owner)
        freed = []
        for record in self._all(sa.select(jobs).where(held, jobs.c.status == "processing")):
            assert record.owner is not None
            if self.hand_back(Claim(record.id, record.owner, record.attempt), now, lost=True):
                freed.append(record)
        return freed

    def _end(self, claim: Claim, status: Status, now: float, note: Note | None = None, **values: Any) -> bool:
        return self._change(_held(claim), status, now, note, **values) is not None

    def _change(
        self, condition: ColumnElement[bool], status: Status, now: float, note: Note | None = None, **values: Any
    ) -> JobRecord | None:
        """`_move` as a transaction of its own; what ended is told of once that is safe."""
        with writing(self._engine) as connection:
            record = _move(connection, condition, status, now, **values)
        if record is not None and record.status in ENDED:
            self._ends.tell(record, note)
        return record

    # ── Housekeeping ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self, ttl_s: float, now: float) -> int:
        """Fail the jobs that nobody has drawn within their time to live; how many those were."""
        waiting = sa.select(jobs).where(jobs.c.status == "starting", jobs.c.created_at < now - ttl_s)
        error = JobExpired(f"no engine could draw it within {ttl_s:g} s. Post it again when its model is served.")
        expired = 0
        for record in self._all(waiting):
            unchanged = sa.and_(jobs.c.id == record.id, jobs.c.attempt == record.attempt, jobs.c.status == "starting")
            expired += self._change(unchanged, "failed", now, **_error(error)) is not None
        return expired

    def past_their_time(self, ttl_s: float, now: float, limit: int) -> list[str]:
        """The jobs that ended more than `ttl_s` ago. Delete their files first, then them: so no file is left without its job."""
        query = sa.select(jobs.c.id).where(jobs.c.completed_at < now - ttl_s).order_by(jobs.c.completed_at).limit(limit)
        with self._engine.connect() as connection:
            return list(connection.scalars(query))

    def delete(self, job_id: str) -> None:
        """Forget an ended job and its events."""
        with writing(self._engine) as connection:
            gone = connection.execute(jobs.delete().where(jobs.c.id == job_id, jobs.c.status.in_(ENDED)))
            if gone.rowcount:
                connection.execute(events.delete().where(events.c.job_id == job_id))

    def _first(self, condition: ColumnElement[bool]) -> JobRecord | None:
        found = self._all(sa.select(jobs).where(condition))
        return found[0] if found else None

    def _all(self, query: sa.Select[Any]) -> list[JobRecord]:
        with self._engine.connect() as connection:
            return [JobRecord(**row._mapping) for row in connection.execute(query)]


def _columns(new: NewJob, now: float) -> dict[str, Any]:
    return {
        "id": new.id,
        "status": "starting",
        "model": new.model,
        "version": new.version,
        "input": new.input.decode(),
        "request": new.request.decode(),
        "base_url": new.base_url,
        "webhook": new.webhook,
        "webhook_events": ",".join(new.webhook_events),
        "made_by": new.made_by,
        "idempotency_key": new.idempotency_key,
        "body_digest": new.body_digest,
        "created_at": now,
        "order_at": order_of(now, new.priority),
        "not_before": 0.0,
        "attempt": 0,
        "num_losses": 0,
        "num_engine_losses": 0,
        "last_event": 1,
        "metrics": "{}",
    }


def _of(made_by: str | None) -> ColumnElement[bool]:
    return sa.true() if made_by is None else jobs.c.made_by == made_by


def _held(claim: Claim) -> ColumnElement[bool]:
    """The job is still the claim's."""
    return sa.and_(
        jobs.c.id == claim.job_id,
        jobs.c.owner == claim.owner,
        jobs.c.attempt == claim.attempt,
        jobs.c.status == "processing",
    )


def _move(
    connection: Connection,
    condition: ColumnElement[bool],
    status: Status,
    now: float,
    *,
    frees: bool = True,
    **values: Any,
) -> JobRecord | None:
    """Give one job another status, if `condition` holds and the life cycle allows it; its record then, else None.

    `processing` may follow itself: a claim after a lease that has run out.
    """
    earlier = before(status) | ({"processing"} if status == "processing" else set())
    if frees:
        values |= {"owner": None, "lease_until": None}
    if status in ENDED:
        values["completed_at"] = now
    row = connection.execute(
        jobs.update()
        .where(condition, jobs.c.status.in_(earlier))
        .values(status=status, last_event=jobs.c.last_event + 1, **values)
        .returning(jobs)
    ).first()
    if row is None:
        return None
    record = JobRecord(**row._mapping)
    _tell(connection, record, now)
    return record


def _tell(connection: Connection, record: JobRecord, now: float) -> None:
    """Write the new status down for those who watch, and for the webhook; in the same transaction as the status itself."""
    note = StatusNote(record.status, output_urls(record), record.error, record.error_code)
    _write_event(connection, record.id, record.last_event, now, "status", msgspec.json.encode(note))
    what = webhook_event(record)
    if record.webhook is not None and what in record.webhook_events.split(","):
        connection.execute(
            deliveries.insert().values(
                id=f"msg_{uuid.uuid4().hex}",
                url=record.webhook,
                body=msgspec.json.encode(as_job(record)).decode(),
                num_tries=0,
                due_at=now,
            )
        )


def _write_event(connection: Connection, job_id: str, seq: int, now: float, kind: EventType, data: bytes) -> None:
    connection.execute(events.insert().values(job_id=job_id, seq=seq, at=now, type=kind, data=data.decode()))


def _error(error: NoriaError) -> dict[str, Any]:
    return {"error": error.message, "error_code": error.code}


def _lost_too_often(times: int) -> EngineLost:
    return EngineLost(f"the processes that drew it ended {times} times; it is not tried again.")
