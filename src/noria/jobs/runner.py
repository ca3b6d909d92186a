"""Has jobs drawn: claims them, keeps their leases, writes down their progress and their end.

Each job that is claimed is a *flight*: a task that draws, and one that concludes. Only drawing is ever cancelled: when the job turns out
to be somebody else's by now (cancelled by a client, or claimed after a lease that ran out), or when this process stops. Concluding
runs to its end, so what has been written is either told of or deleted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from noria.errors import (
    EngineLost,
    EngineUnavailable,
    InternalError,
    JobsUnavailable,
    NoriaError,
    QueueFull,
    RequestCancelled,
)
from noria.jobs.blocking import NUM_RUNNERS_THREADS, Blocking
from noria.jobs.loops import forever
from noria.jobs.records import ENDED, Claim, JobRecord
from noria.jobs.results import Results
from noria.jobs.store import LEASE_S, Store
from noria.jobs.tracing import drawing_span, trace_of
from noria.observe.lines import fields
from noria.observe.requests import Note, noting
from noria.observe.traces import NO_TRACER, NoSpan, Span, Tracer, working_for

TICK_S = 0.5  # so soon is a cancellation noticed, and so often at most a progress written down
RENEW_S = 5.0  # of a lease; it lasts three times as long
# Each is an engine that did not come back in time, or engines that were killed a dozen times. What crashes them is another error.
MAX_ENGINE_LOSSES = 3
RESULTS_OUT_S = 30.0  # how long a results folder that fails is left alone: each try costs the drawing of a job

_LEAST_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0  # of a job that found no engine

log = logging.getLogger("noria.jobs")


@dataclass(frozen=True)
class Drawn:
    """The files of a job."""

    files: list[bytes]
    suffix: str
    metrics: dict[str, float]


class Painter(Protocol):
    """Who draws: the front end's studio, or a test."""

    def serves(self) -> set[tuple[str, str]]:
        """The (model, version) that can be drawn now."""

    def room(self) -> int:
        """How many jobs shall be drawn at once."""

    async def draw(self, record: JobRecord, tell: Callable[[bytes], None]) -> Drawn:
        """Draw one job; `tell` takes its progress, as JSON. Raises NoriaError."""


@dataclass(frozen=True)
class PutBack:
    """Let it be drawn later, by whomever."""

    delay_s: float
    lost: bool = False


def verdict(error: NoriaError, num_engine_losses: int) -> PutBack | None:
    """What becomes of a job whose drawing failed; None: it fails. The load's and the engines' troubles are not its own.

    Unlike a request that somebody waits for, it outlasts an engine that is long in coming back: a job is a promise.
    """
    if isinstance(error, QueueFull | EngineUnavailable):
        return PutBack(min(max(error.retry_after_s or 0.0, _LEAST_DELAY_S), _LONGEST_DELAY_S))
    if isinstance(error, EngineLost) and num_engine_losses + 1 < MAX_ENGINE_LOSSES:
        return PutBack(_LEAST_DELAY_S, lost=True)
    return None


@dataclass(eq=False)
class _Flight:
    record: JobRecord
    claim: Claim
    renewed_at: float  # by the loop's clock
    span: Span  # from its claim until its end is written down
    written_at: float = 0.0  # its last progress
    progress: bytes | None = None  # the newest, not written down yet
    is_ours: bool = True
    note: Note = field(init=False)  # filled in by whoever draws
    drawing: asyncio.Task[Drawn] = field(init=False)
    concluding: asyncio.Task[None] = field(init=False)

    def tell(self, progress: bytes) -> None:
        self.progress = progress


class Runner:
    """One front end's hands for jobs. `owner` is `server/front end/incarnation`.

    Files are written in the threads of `blocking`, the database is asked in the runner's own: a lease is renewed in time, however slow
    the folder is and however many callers read.
    """

    def __init__(
        self,
        store: Store,
        results: Results,
        painter: Painter,
        blocking: Blocking,
        owner: str,
        clock: Callable[[], float] = time.time,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._store, self._results, self._painter, self._tracer = store, results, painter, tracer
        self._on_results, self._on_database = blocking, Blocking(NUM_RUNNERS_THREADS)
        self._owner, self._clock = owner, clock
        self._flights: set[_Flight] = set()
        self._awake = asyncio.Event()
        self._no_claims_before = 0.0  # by the loop's clock
        self._claiming = True
        self._has_taken_back = False

    def wake(self) -> None:
        """There may be a job to claim, or one to drop."""
        self._awake.set()

    def rest(self) -> None:
        """Claim no more jobs."""
        self._claiming = False

    async def run(self) -> None:
        """Draw jobs until cancelled; `stop` has to follow."""
        await forever(self._tick, self._pause)

    async def _pause(self) -> None:
        with contextlib.suppress(
            TimeoutError
        ):  # `wait_for` would swallow a cancellation that comes with the event (Python 3.11)
            async with asyncio.timeout(TICK_S):
                await self._awake.wait()
        self._awake.clear()

    async def stop(self) -> None:
        """Hand back, at once, what is being drawn, and close. To be called when `run` has ended."""
        flights = list(self._flights)
        for flight in flights:
            flight.drawing.cancel()
        await asyncio.gather(*(flight.concluding for flight in flights))
        self._on_database.close()

    async def _tick(self) -> None:
        if not self._has_taken_back:
            freed = await self._on_database(self._store.take_back, self._owner, self._clock())
            self._has_taken_back = True
            for record in freed:
                with working_for(record.id, NoSpan(trace_of(record.request))):
                    _tell_handed_back(record, "the process that drew it ended", 0.0)
        await self._beat()
        room = self._painter.room() - len(self._flights)
        if room < 1 or not self._claiming or asyncio.get_running_loop().time() < self._no_claims_before:
            return
        if served := self._painter.serves():
            claiming = asyncio.ensure_future(
                self._on_database(self._store.claim, self._owner, served, room, self._clock())
            )
            try:
                claimed = await asyncio.shield(claiming)
            except asyncio.CancelledError:  # `run` ends; what was claimed meanwhile is handed back by `stop`
                claimed = await claiming
                self._take_off(claimed)
                raise
            self._take_off(claimed)

    def _take_off(self, records: list[JobRecord]) -> None:
        now = asyncio.get_running_loop().time()
        for record in records:
            claim, span = Claim(record.id, self._owner, record.attempt), drawing_span(self._tracer, record)
            flight = _Flight(record, claim, renewed_at=now, span=span)
            self._begin(flight)
            self._flights.add(flight)

    def _begin(self, flight: _Flight) -> None:
        record = flight.record
        with working_for(record.id, flight.span), noting() as flight.note:  # tasks keep what they were made in
            log.debug("%s is drawn", record.id, extra=fields(event="job_claimed", attempt=record.attempt))
            flight.drawing = asyncio.create_task(self._painter.draw(record, flight.tell), name=f"draw {record.id}")
            flight.concluding = asyncio.create_task(self._conclude(flight), name=f"conclude {record.id}")

    async def _beat(self) -> None:
        """Renew leases and write down progress where it is time; drop what is no longer ours."""
        now = asyncio.get_running_loop().time()
        flights = {flight.claim: flight for flight in self._flights}
        due: dict[Claim, bytes | None] = {}
        for claim, flight in flights.items():
            progress = flight.progress if now - flight.written_at >= TICK_S else None
            if progress is not None or now - flight.renewed_at >= RENEW_S:
                due[claim] = progress
        lost = await self._on_database(self._store.beat, due, self._clock())
        for claim, progress in due.items():
            flight = flights[claim]
            flight.renewed_at = now
            if progress is not None:
                flight.written_at = now
                if flight.progress is progress:
                    flight.progress = None
        others = flights.keys() - due.keys()
        if others:
            lost |= others - await self._on_database(self._store.still_held, others)
        for claim in lost:
            flights[claim].is_ours = False
            flights[claim].drawing.cancel()

    async def _conclude(self, flight: _Flight) -> None:
        """Wait until the drawing has ended, one way or another, and write down which."""
        await asyncio.wait([flight.drawing])
        try:
            if flight.drawing.cancelled():
                flight.span.fail(RequestCancelled.code)
                if flight.is_ours:
                    await self._hand_back(flight, "the front end stops", 0.0)
                else:
                    await self._let_go(flight)
            elif (error := flight.drawing.exception()) is None:
                await self._succeed(flight, flight.drawing.result())
            else:
                await self._fail(flight, error)
        except Exception:  # the lease runs out, and the job is drawn again
            log.exception("the end of %s could not be written down", flight.claim.job_id)
            flight.span.fail(InternalError.code)
        finally:
            flight.span.end()
            self._flights.discard(flight)
            self.wake()

    async def _succeed(self, flight: _Flight, drawn: Drawn) -> None:
        claim = flight.claim
        try:
            names = await self._on_results(self._results.save, claim.job_id, claim.attempt, drawn.files, drawn.suffix)
        except Exception as error:  # stores of objects share no error of their own
            await self._wait_for_results(flight, error)
            return
        # When this raises, nobody knows whether the job has succeeded: its files stay, and go with it.
        if not await self._on_database(self._store.finish, claim, names, drawn.metrics, self._clock(), flight.note):
            await self._on_results(self._results.discard, claim.job_id, claim.attempt)
            flight.span.fail(RequestCancelled.code)
            await self._let_go(flight)

    async def _wait_for_results(self, flight: _Flight, error: Exception) -> None:
        """Hand a job back whose files could not be written. That is not its own trouble: it is counted nowhere."""
        claim = flight.claim
        flight.span.fail(JobsUnavailable.code)
        log.warning(
            "the images of %s could not be written; no job is claimed for %g s (%s)",
            claim.job_id,
            RESULTS_OUT_S,
            error.__cause__ or error,
        )
        self._claim_none_for(RESULTS_OUT_S)
        try:
            await self._on_results(self._results.discard, claim.job_id, claim.attempt)
        except Exception as also:  # what is left goes with the job
            log.debug("the images of %s could not be deleted either: %s", claim.job_id, also.__cause__ or also)
        await self._hand_back(flight, "its images could not be written", RESULTS_OUT_S)

    def _claim_none_for(self, delay_s: float) -> None:
        self._no_claims_before = max(self._no_claims_before, asyncio.get_running_loop().time() + delay_s)

    async def _fail(self, flight: _Flight, error: BaseException) -> None:
        claim = flight.claim
        if not isinstance(error, NoriaError):
            log.error("%s broke", claim.job_id, exc_info=error)
            error = InternalError(f"the server failed on this job; its log has the details under {claim.job_id}.")
        flight.span.fail(error.code)
        decision = verdict(error, flight.record.num_engine_losses)
        if decision is None:
            if not await self._on_database(self._store.fail, claim, error, self._clock(), flight.note):
                await self._let_go(flight)
            return
        self._claim_none_for(decision.delay_s)
        await self._hand_back(flight, error.message, decision.delay_s, engine_lost=decision.lost)

    async def _hand_back(self, flight: _Flight, reason: str, delay_s: float, *, engine_lost: bool = False) -> None:
        """Let others draw the job, after `delay_s`, unless it has ended or is drawn elsewhere by now."""
        if not await self._on_database(
            self._store.hand_back, flight.claim, self._clock(), delay_s=delay_s, engine_lost=engine_lost
        ):
            await self._let_go(flight)
            return
        _tell_handed_back(flight.record, reason, delay_s)

    async def _let_go(self, flight: _Flight) -> None:
        """Say why nothing comes of a drawing: whoever ended the job has told of its end; if nobody has, somebody else draws it."""
        record = await self._on_database(self._store.get, flight.claim.job_id)
        has_ended = record.status in ENDED
        log.log(
            logging.DEBUG if has_ended else logging.WARNING,
            "%s is let go: %s",
            record.id,
            f"it is {record.status}" if has_ended else f"its lease of {LEASE_S:g} s ran out, and others have it",
            extra=fields(event="job_let_go", attempt=flight.claim.attempt),
        )


def _tell_handed_back(record: JobRecord, reason: str, delay_s: float) -> None:
    log.info(
        "%s is handed back, to be drawn later: %s",
        record.id,
        reason,
        extra=fields(event="job_handed_back", attempt=record.attempt, delay_s=delay_s),
    )
