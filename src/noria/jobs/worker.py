"""Executes jobs: claims them, renews their leases, stores their progress and their outcome.

Each claimed job has two tasks: one executes it, one concludes it. Only the execution is ever cancelled: when the claim
is void (a client cancelled the job, or the lease expired and another worker claimed it), or when this process stops.
The conclusion always completes, so files that were written are either recorded or deleted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.trace import Span, Tracer, get_current_span

from noria.errors import (
    EngineLost,
    EngineUnavailable,
    InternalError,
    JobNotFound,
    JobsUnavailable,
    NoriaError,
    QueueFull,
    RequestCancelled,
)
from noria.jobs.database.claims import LEASE_S
from noria.jobs.database.store import JobStore
from noria.jobs.periodic import run_periodically
from noria.jobs.records import TERMINAL_STATUSES, Claim, JobRecord, Metrics
from noria.jobs.results import ResultStore
from noria.jobs.thread_offloader import NUM_WORKER_THREADS, ThreadOffloader
from noria.jobs.tracing import execution_span, stored_trace_context
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.request_scope import RequestScope
from noria.observe.traces.tracer import GLOBAL_TRACER, fail
from noria.protocol.model_spec import ModelKey

TICK_S = 0.5  # the delay until a cancellation is noticed, and the minimum interval between two stored progress events
RENEW_EVERY_S = 5.0  # a third of a lease
# Each loss is an engine that was not restarted in time, or engines that were killed a dozen times. A request that
# crashes engines fails with another error.
MAX_ENGINE_LOSSES = 3
RESULTS_RETRY_S = 30.0  # the pause after a failed write to the results folder: each try costs the execution of a job

_MIN_DELAY_S, _MAX_DELAY_S = 1.0, 30.0  # until a job that found no engine may be claimed again

log = logging.getLogger("noria.jobs")


@dataclass(frozen=True)
class JobOutput:
    """The result of an executed job: files to save, or the names of those that the execution has saved itself."""

    files: Sequence[bytes]
    suffix: str  # suffix of the files, without a dot
    metrics: Metrics
    saved: Sequence[str] = ()


class JobExecutor(Protocol):
    """Executes jobs of one kind of model: the front end's, or a fake in tests."""

    def available_models(self) -> set[ModelKey]:
        """The models that an engine serves now."""

    def capacity(self) -> int:
        """The maximum number of jobs to execute at once, of all models: the oldest jobs may be of one model."""

    async def execute(
        self, record: JobRecord, report_progress: Callable[[bytes], None], log_record: RequestLogRecord
    ) -> JobOutput:
        """Execute one job; `report_progress` takes its progress as JSON, `log_record` what was measured.

        Raises:
            JobsUnavailable: a result could not be saved.
            NoriaError: it failed.
        """


@dataclass(frozen=True)
class Requeue:
    """The job goes back into the queue; any worker may claim it after `delay_s`."""

    delay_s: float
    engine_lost: bool = False


def retry_decision(error: NoriaError, num_engine_losses: int) -> Requeue | None:
    """Whether a job whose execution raised `error` is requeued; None means that it fails.

    A full queue and a missing or lost engine are not the job's fault. Unlike a synchronous request, an accepted job
    also outlasts an engine that takes long to restart.
    """
    if isinstance(error, QueueFull | EngineUnavailable):
        return Requeue(min(max(error.retry_after_s or 0.0, _MIN_DELAY_S), _MAX_DELAY_S))
    if isinstance(error, EngineLost) and num_engine_losses + 1 < MAX_ENGINE_LOSSES:
        return Requeue(_MIN_DELAY_S, engine_lost=True)
    return None


@dataclass(eq=False)
class _RunningJob:
    record: JobRecord
    claim: Claim
    lease_renewed_at: float  # event-loop time
    span: Span  # from the claim until the outcome is stored
    progress_written_at: float = 0.0  # event-loop time
    pending_progress: bytes | None = None  # the newest, not stored yet
    holds_claim: bool = True
    log_record: RequestLogRecord = field(default_factory=RequestLogRecord)  # filled in by the executor
    execution: asyncio.Task[JobOutput] = field(init=False)
    conclusion: asyncio.Task[None] = field(init=False)

    def report_progress(self, progress: bytes) -> None:
        self.pending_progress = progress


class JobWorker:
    """Claims and executes the jobs of one front end. `owner` is `server/front end/incarnation`.

    Files are written in the threads of `offload`; database calls have threads of their own, so that leases are renewed
    in time however slow the folder is and however many clients read.
    """

    def __init__(
        self,
        store: JobStore,
        results: ResultStore,
        executor: JobExecutor,
        offload: ThreadOffloader,
        owner: str,
        clock: Callable[[], float] = time.time,
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        self._store, self._results, self._executor, self._tracer = store, results, executor, tracer
        self._offload_files = offload
        self._offload_database = ThreadOffloader(NUM_WORKER_THREADS, outages=offload.outages)
        self._owner, self._clock = owner, clock
        self._running_jobs: set[_RunningJob] = set()
        self._wakeup = asyncio.Event()
        self._no_claims_before = 0.0  # event-loop time, for all models: the results folder is one
        self._resumes_at: dict[ModelKey, float] = {}  # event-loop time
        self._is_claiming = True
        self._has_reclaimed = False

    def wake(self) -> None:
        """Tick now: there may be a job to claim, or one that was cancelled."""
        self._wakeup.set()

    def stop_claiming(self) -> None:
        """Claim no more jobs."""
        self._is_claiming = False

    async def wait_until_idle(self) -> None:
        """Wait until no job runs here."""
        while self._running_jobs:
            await asyncio.wait([running_job.conclusion for running_job in self._running_jobs])

    async def run(self) -> None:
        """Execute jobs until cancelled; call `stop` afterwards."""
        await run_periodically(self._tick, self._pause)

    async def _pause(self) -> None:
        # `wait_for` would swallow a cancellation that arrives together with the event (Python 3.11).
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._wakeup.wait()
        self._wakeup.clear()

    async def stop(self) -> None:
        """Requeue running jobs at once, and close. Call it after `run` has ended."""
        running_jobs = list(self._running_jobs)
        for running_job in running_jobs:
            running_job.execution.cancel()
        await asyncio.gather(*(running_job.conclusion for running_job in running_jobs))
        self._offload_database.close()

    async def _tick(self) -> None:
        if not self._has_reclaimed:
            reclaimed = await self._offload_database(self._store.reclaim, self._owner, self._clock())
            self._has_reclaimed = True
            for record in reclaimed:
                with RequestScope(record.id, get_current_span(stored_trace_context(record.request))):
                    _log_requeued(record, "the process that ran it died", 0.0)
        await self._heartbeat()
        num_free = self._executor.capacity() - len(self._running_jobs)
        now = asyncio.get_running_loop().time()
        if num_free < 1 or not self._is_claiming or now < self._no_claims_before:
            return
        self._resumes_at = {model: resumes_at for model, resumes_at in self._resumes_at.items() if resumes_at > now}
        if models := self._executor.available_models() - self._resumes_at.keys():
            claim_task = asyncio.ensure_future(
                self._offload_database(self._store.claim, self._owner, models, num_free, self._clock())
            )
            try:
                await asyncio.wait([claim_task])
            except asyncio.CancelledError:  # `run` ends; `stop` requeues what was claimed meanwhile
                await asyncio.wait([claim_task])
                if claim_task.exception() is None:
                    self._start_all(claim_task.result())
                raise
            self._start_all(claim_task.result())

    def _start_all(self, records: list[JobRecord]) -> None:
        now = asyncio.get_running_loop().time()
        for record in records:
            claim, span = Claim(record.id, self._owner, record.attempt), execution_span(self._tracer, record)
            running_job = _RunningJob(record, claim, lease_renewed_at=now, span=span)
            self._start(running_job)
            self._running_jobs.add(running_job)

    def _start(self, running_job: _RunningJob) -> None:
        record = running_job.record
        # Tasks keep the scope in which they were created.
        with RequestScope(record.id, running_job.span):
            log.debug("%s is claimed", record.id, extra=fields(event="job_claimed", attempt=record.attempt))
            running_job.execution = asyncio.create_task(
                self._executor.execute(record, running_job.report_progress, running_job.log_record),
                name=f"execute {record.id}",
            )
            running_job.conclusion = asyncio.create_task(self._conclude(running_job), name=f"conclude {record.id}")

    async def _heartbeat(self) -> None:
        """Renew leases and store progress where due; cancel the execution of jobs whose claim is void."""
        if not self._running_jobs:
            return
        now = asyncio.get_running_loop().time()
        running_jobs = {running_job.claim: running_job for running_job in self._running_jobs}
        renewals: dict[Claim, bytes | None] = {}
        for claim, running_job in running_jobs.items():
            progress = running_job.pending_progress if now - running_job.progress_written_at >= TICK_S else None
            if progress is not None or now - running_job.lease_renewed_at >= RENEW_EVERY_S:
                renewals[claim] = progress
        lost = await self._offload_database(self._store.renew, renewals, self._clock())
        for claim, progress in renewals.items():
            running_job = running_jobs[claim]
            running_job.lease_renewed_at = now
            if progress is not None:
                running_job.progress_written_at = now
                if running_job.pending_progress is progress:
                    running_job.pending_progress = None
        unrenewed = running_jobs.keys() - renewals.keys()
        if unrenewed:
            lost |= unrenewed - await self._offload_database(self._store.still_held, unrenewed)
        for claim in lost:
            running_jobs[claim].holds_claim = False
            running_jobs[claim].execution.cancel()

    async def _conclude(self, running_job: _RunningJob) -> None:
        """Wait until the execution has ended, and store its outcome."""
        await asyncio.wait([running_job.execution])
        try:
            if running_job.execution.cancelled():
                fail(running_job.span, RequestCancelled.code)
                if running_job.holds_claim:
                    await self._requeue(running_job, "the front end is stopping", 0.0)
                else:
                    await self._abandon(running_job)
            elif (error := running_job.execution.exception()) is None:
                await self._succeed(running_job, running_job.execution.result())
            else:
                await self._fail(running_job, error)
        except Exception:  # the lease expires, and another attempt follows
            log.exception("the outcome of %s could not be stored", running_job.claim.job_id)
            fail(running_job.span, InternalError.code)
        finally:
            running_job.span.end()
            self._running_jobs.discard(running_job)
            self.wake()

    async def _succeed(self, running_job: _RunningJob, output: JobOutput) -> None:
        claim = running_job.claim
        try:
            names = output.saved or await self._offload_files(
                self._results.save, claim.job_id, claim.attempt, output.files, output.suffix
            )
        except Exception as error:  # object stores share no base class of errors
            if await self._offload_database(self._store.still_held, [claim]):
                await self._requeue_unsaved(running_job, error)
            else:  # it was erased, with the folder of its files
                await self._discard_files(claim)
                fail(running_job.span, RequestCancelled.code)
                await self._abandon(running_job)
            return
        # If this raises, the job may have succeeded or not: keep its files, which are deleted together with the job.
        if not await self._offload_database(
            self._store.finish, claim, names, output.metrics, self._clock(), running_job.log_record
        ):
            await self._offload_files(self._results.discard, claim.job_id, claim.attempt)
            fail(running_job.span, RequestCancelled.code)
            await self._abandon(running_job)

    async def _requeue_unsaved(self, running_job: _RunningJob, error: Exception) -> None:
        """Requeue a job whose files could not be written. This is not the job's fault: it counts as no loss."""
        claim = running_job.claim
        fail(running_job.span, JobsUnavailable.code)
        log.warning(
            "the results of %s could not be written; no job of this kind is claimed for %g s (%s)",
            claim.job_id,
            RESULTS_RETRY_S,
            error.__cause__ or error,
        )
        self._no_claims_before = asyncio.get_running_loop().time() + RESULTS_RETRY_S
        await self._discard_files(claim)
        await self._requeue(running_job, "its results could not be written", RESULTS_RETRY_S)

    async def _discard_files(self, claim: Claim) -> None:
        """Delete what was written of a job's files; what cannot be deleted now is deleted together with the job."""
        try:
            await self._offload_files(self._results.discard, claim.job_id, claim.attempt)
        except Exception as error:
            log.debug("the results of %s could not be deleted either: %s", claim.job_id, error.__cause__ or error)

    async def _fail(self, running_job: _RunningJob, error: BaseException) -> None:
        claim = running_job.claim
        if not isinstance(error, NoriaError):
            log.error("the execution of %s raised an unexpected error", claim.job_id, exc_info=error)
            error = InternalError(
                f"the server failed on this job; the server's log has the details under {claim.job_id}."
            )
        if isinstance(error, JobsUnavailable):
            await self._requeue_unsaved(running_job, error)
            return
        fail(running_job.span, error.code)
        decision = retry_decision(error, running_job.record.num_engine_losses)
        if decision is None:
            if not await self._offload_database(self._store.fail, claim, error, self._clock(), running_job.log_record):
                await self._abandon(running_job)
            return
        model = ModelKey(running_job.record.model, running_job.record.version)
        resumes_at = asyncio.get_running_loop().time() + decision.delay_s
        self._resumes_at[model] = max(self._resumes_at.get(model, 0.0), resumes_at)
        await self._requeue(running_job, error.message, decision.delay_s, engine_lost=decision.engine_lost)

    async def _requeue(
        self, running_job: _RunningJob, reason: str, delay_s: float, *, engine_lost: bool = False
    ) -> None:
        """Put the job back into the queue, claimable after `delay_s`, unless the claim is void."""
        if not await self._offload_database(
            self._store.requeue, running_job.claim, self._clock(), delay_s=delay_s, engine_lost=engine_lost
        ):
            await self._abandon(running_job)
            return
        _log_requeued(running_job.record, reason, delay_s)

    async def _abandon(self, running_job: _RunningJob) -> None:
        """Log why the result of an execution is dropped: another process ended the job and reported it, or runs it."""
        job_id = running_job.claim.job_id
        try:
            record = await self._offload_database(self._store.get, job_id)
        except JobNotFound:  # it was erased, perhaps before the last file was saved
            await self._offload_files(self._results.delete, job_id)
            return
        has_ended = record.status in TERMINAL_STATUSES
        if record.status == "canceled":
            await self._offload_files(self._results.delete, job_id)
        log.log(
            logging.DEBUG if has_ended else logging.WARNING,
            "%s is abandoned: %s",
            record.id,
            f"it is {record.status}" if has_ended else f"its lease of {LEASE_S:g} s expired, and another worker has it",
            extra=fields(event="job_abandoned", attempt=running_job.claim.attempt),
        )


def _log_requeued(record: JobRecord, reason: str, delay_s: float) -> None:
    log.info(
        "%s is requeued: %s",
        record.id,
        reason,
        extra=fields(event="job_requeued", attempt=record.attempt, delay_s=delay_s),
    )
