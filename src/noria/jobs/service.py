"""The jobs of one front end: what its routes call, and the background tasks that execute, deliver and clean up."""

import asyncio
import contextlib
import functools
import logging
import math
import os
import pathlib
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import IO

from opentelemetry.trace import Tracer, get_current_span

from noria.config import Config, JobsConfig
from noria.errors import JobNotFound
from noria.folders import data_folder
from noria.jobs.cleanup_clock import CleanupClock
from noria.jobs.completion import JobCompletionReporter
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore, Page
from noria.jobs.event_feed import JobEventFeed
from noria.jobs.periodic import run_periodically
from noria.jobs.records import JobEvent, JobRecord, JobState, NewJob
from noria.jobs.results import ResultStore
from noria.jobs.stored_request import unpack_start_image
from noria.jobs.text_parts import TextJobFiles, TextPart
from noria.jobs.thread_offloader import NUM_WORKER_THREADS, ThreadOffloader
from noria.jobs.tracing import stored_trace_context
from noria.jobs.webhooks.client import WebhookClient
from noria.jobs.webhooks.dispatcher import WebhookDispatcher
from noria.jobs.webhooks.outbox import Outbox
from noria.jobs.webhooks.resolver import Resolver
from noria.jobs.webhooks.signing import open_secrets
from noria.jobs.worker import JobExecutor, JobWorker
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import LogPrompts
from noria.observe.metrics import declarations
from noria.observe.request_scope import RequestScope
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.storage.private_files import make_private_folder, warn_if_open_to_others

# Then jobs that could not be requeued are left to their leases. A connection that is being made may take 4 s more; the
# supervisor kills a front end 8 s after it has begun to stop its jobs.
_STOP_TIMEOUT_S = 3.0
_CLEAN_EVERY_S = 30.0

log = logging.getLogger("noria.jobs")


class JobService:
    """The jobs of one database, and the workers for them, one for each kind of model.

    `worker_id` is `server/front end`; only one process uses it at a time. Call `start` first and `stop` last, in one
    event loop; call the other coroutines in between.

    Raises ConfigError: the database, the results folder or the webhook secret cannot be used.
    """

    def __init__(
        self,
        config: JobsConfig,
        data_folder: pathlib.Path,
        worker_id: str,
        clock: Callable[[], float] = time.time,
        tracer: Tracer = GLOBAL_TRACER,
        log_prompts: LogPrompts = "off",
    ) -> None:
        self._config, self._data_folder, self._clock, self._tracer = config, data_folder, clock, tracer
        if data_folder.exists():
            warn_if_open_to_others(data_folder)
        self._cleanup_clock = CleanupClock(config.ttl_s, clock)
        self._results = ResultStore(config.results, data_folder)
        engine = open_jobs_database(config.database, data_folder, config.database_timeout_s)
        secrets = open_secrets(config, data_folder)
        self._resolver = Resolver()
        self._webhook_client = WebhookClient(
            secrets, allow_private=config.webhook_allow_private, resolve=self._resolver, tracer=tracer
        )
        self._store, self._outbox = JobStore(engine, JobCompletionReporter(tracer, log_prompts)), Outbox(engine)
        self._owner = f"{worker_id}/{uuid.uuid4().hex}"
        self._offload = ThreadOffloader(max_wait_s=config.database_timeout_s)
        self._offload_files = ThreadOffloader(NUM_WORKER_THREADS, outages=self._offload.outages)
        self._feed = JobEventFeed(self._states, self.events)
        self._workers: list[JobWorker] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *executors: JobExecutor) -> None:
        """Start executing jobs, each kind with its own executor, delivering webhooks and cleaning up."""
        self._workers = [
            JobWorker(self._store, self._results, executor, self._offload_files, self._owner, self._clock, self._tracer)
            for executor in executors
        ]
        dispatcher = WebhookDispatcher(self._outbox, self._webhook_client, self._offload, self._clock)
        cleanup = run_periodically(self._clean_up, lambda: asyncio.sleep(_CLEAN_EVERY_S))
        workers = (worker.run() for worker in self._workers)
        self._tasks = [asyncio.create_task(work) for work in (*workers, dispatcher.run(), cleanup)]

    def drain(self) -> None:
        """Claim no more jobs: the process is about to stop. Running jobs continue until `stop`."""
        for worker in self._workers:
            worker.stop_claiming()

    async def wait_until_idle(self) -> None:
        """Wait, after `drain`, until no job runs here."""
        for worker in self._workers:
            await worker.wait_until_idle()

    async def stop(self) -> None:
        """Requeue running jobs and close everything, whether PostgreSQL answers or not."""
        interruption = threading.Timer(_STOP_TIMEOUT_S, self._store.interrupt)
        interruption.start()
        try:
            await self._stop()
        finally:
            interruption.cancel()
            interruption.join()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._feed.close()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        await self._webhook_client.close()
        self._resolver.close()
        self._offload.close()
        self._offload_files.close()
        self._store.close()

    @property
    def outage(self) -> str | None:
        """Why the database or the results could not be used, within the last minute."""
        return self._offload.outages.reason

    async def accept(self, new_job: NewJob) -> tuple[JobRecord, bool]:
        """Store a job; see `JobStore.accept`. Raises also InvalidField if its webhook URL is not allowed."""
        if new_job.webhook is not None:
            resolve = functools.partial(self._resolver, client=new_job.client)
            await self._webhook_client.check_url(new_job.webhook, resolve)
        max_queued, per_key = self._config.max_queued, self._config.max_queued_per_key
        record, is_new = await self._offload(
            self._store.accept,
            new_job,
            max_queued,
            self._clock(),
            max_queued_per_key=math.ceil(max_queued / 4) if per_key == "auto" else per_key,
            max_pending_webhooks=self._config.max_pending_webhooks,
            max_queued_bytes=self._config.max_queued_bytes,
        )
        if is_new:
            declarations.JOBS_ACCEPTED.inc()
        self._wake()
        return record, is_new

    async def get(self, job_id: str, made_by: str | None = None) -> JobRecord:
        """Return a job.

        Raises JobNotFound, here and below also if `made_by` is given and another API key created the job.
        """
        return await self._offload(self._store.get, job_id, made_by)

    async def page(self, limit: int, before_seq: int | None, made_by: str | None = None) -> Page:
        """See `JobStore.page`."""
        return await self._offload(self._store.page, limit, before_seq, made_by)

    async def cancel(self, job_id: str, made_by: str | None = None, by: str | None = None) -> JobRecord:
        """Cancel a job unless it has ended. Returns its record. Raises JobNotFound.

        `by` is the name of the caller's API key, for the log.
        """
        now = self._clock()
        record = await self._offload(self._store.cancel, job_id, now, made_by)
        self._wake()
        if (record.status, record.completed_at) == ("canceled", now):  # by this call
            with _scope_of(record):
                log_fields = fields(event="job_cancelled", key=by, owner=record.made_by or None)
                log.info("%s is cancelled", job_id, extra=log_fields)
        return record

    async def erase(self, job_id: str, made_by: str | None = None, by: str | None = None) -> None:
        """Delete a job, its results, events and pending webhooks, at once; cancels it before. Raises JobNotFound.

        `by` is as of `cancel`.
        """
        record = await self.cancel(job_id, made_by, by)
        await self._offload(self._results.delete, job_id)  # before its record, as in `clean_up`
        await self._offload(self._store.delete, job_id, with_deliveries=True)
        with _scope_of(record):
            log_fields = fields(event="job_erased", key=by, owner=record.made_by or None, job_status=record.status)
            log.info("%s is erased", job_id, extra=log_fields)

    async def events(self, job_id: str, after: int) -> list[JobEvent]:
        """The events of a job after event number `after`."""
        return await self._offload(self._store.events, job_id, after)

    async def state(self, job_id: str, made_by: str | None = None) -> JobState:
        """The state of a job; if it has streams already, as they know it: half a second old. Raises JobNotFound."""
        watched = self._feed.state(job_id)
        if watched is not None and made_by in (None, watched.made_by):
            return watched
        record = await self.get(job_id, made_by)
        return JobState(record.status, record.last_event, record.made_by)

    def follow(self, job_id: str, state: JobState, after: int, idle_s: float) -> AsyncGenerator[list[JobEvent], None]:
        """The events of a job after event number `after` as they come; see `JobEventFeed.follow`."""
        return self._feed.follow(job_id, state, after, idle_s)

    async def image(self, job_id: str, index: int, made_by: str | None = None) -> tuple[bytes, str]:
        """Image `index` of a job, and the suffix of its file. Raises JobNotFound."""
        record = await self.get(job_id, made_by)
        names = record.output.split(",") if record.output is not None and not record.text_bytes else []
        if index >= len(names):
            explanation = (
                f"its images are 0 to {len(names) - 1}" if names else f"it is {record.status} and has no images"
            )
            raise JobNotFound(f"job {job_id} has no image {index}: {explanation}.")
        content = await self._offload(self._results.read, job_id, names[index])
        if content is None:
            raise JobNotFound(f"image {index} of job {job_id} no longer exists.")
        return content, names[index].rpartition(".")[2]

    async def parts(self, job_id: str, made_by: str | None = None) -> tuple[JobRecord, list[TextPart]]:
        """A job of texts that has succeeded, and the parts of its results. Raises JobNotFound."""
        record = await self.get(job_id, made_by)
        if record.output is None or not record.text_bytes:
            explanation = "it is of images" if not record.text_bytes else f"it is {record.status}"
            raise JobNotFound(f"job {job_id} has no results of texts: {explanation}.")
        return record, [TextPart.parse(name) for name in record.output.split(",")]

    async def read_part(self, job_id: str, part: TextPart) -> bytes:
        """Return a part of the results of a job. Raises JobNotFound if it was deleted."""
        content = await self._offload(self._results.read, job_id, part.name)
        if content is None:
            raise JobNotFound(f"the results of job {job_id} no longer exist.")
        return content

    @property
    def text_files(self) -> TextJobFiles:
        """The texts and results that an executor of jobs of texts reads and writes."""
        return TextJobFiles(self._store, self._results, self._offload_files)

    async def start_image(self, job_id: str) -> bytes:
        """The pixels of the start image of a job that has one. Raises JobNotFound if the job has ended."""
        chunk = await self._offload_files(self._store.chunk, job_id, 0)
        if chunk is None:
            raise JobNotFound(f"job {job_id} has ended.")
        return await self._offload_files(unpack_start_image, chunk)

    @contextlib.asynccontextmanager
    async def spool(self) -> AsyncIterator[tuple[IO[bytes], ThreadOffloader]]:
        """A file without a name, which ends with the process at the latest, and threads to use it in."""
        file = await self._offload(_open_spool, self._data_folder)
        try:
            yield file, self._offload
        finally:
            await self._offload(file.close)

    async def _states(self, job_ids: Collection[str]) -> dict[str, JobState]:
        return await self._offload(self._store.states, list(job_ids))

    def _wake(self) -> None:
        for worker in self._workers:
            worker.wake()

    async def _clean_up(self) -> None:
        now = self._cleanup_clock()
        await self._offload(self._outbox.expire, now)
        await self._offload(clean_up, self._store, self._results, self._config.ttl_s, now)


def _open_spool(folder: pathlib.Path) -> IO[bytes]:
    """Return a temporary file on the disk of the jobs: the system's own folder for such files may be in memory."""
    make_private_folder(folder)
    return tempfile.TemporaryFile(dir=folder)


def _scope_of(record: JobRecord) -> RequestScope:
    return RequestScope(record.id, get_current_span(stored_trace_context(record.request)))


def open_job_service(config: Config, worker_id: str, tracer: Tracer = GLOBAL_TRACER) -> JobService:
    """A JobService with the settings of `config`. Raises ConfigError."""
    return JobService(
        config.jobs, data_folder(config, os.environ), worker_id, tracer=tracer, log_prompts=config.log_prompts
    )


def clean_up(store: JobStore, results: ResultStore, ttl_s: float, now: float, batch_size: int = 100) -> None:
    """Fail jobs that did not start within `ttl_s`, and delete jobs that ended longer ago, files first.

    Failed deletions are retried. `batch_size` is the number of jobs of one query.
    """
    store.expire(ttl_s, now)
    undeletable: set[str] = set()
    error: Exception | None = None
    while expired := [
        name for name in store.expired(ttl_s, now, batch_size + len(undeletable)) if name not in undeletable
    ]:
        for job_id in expired:
            try:
                results.delete(job_id)
            except Exception as caught:  # object stores share no base class of errors
                undeletable.add(job_id)
                error = caught
            else:
                store.delete(job_id)
    if undeletable:
        log.warning(
            "the results of %d ended jobs, such as %s, cannot be deleted: %s", len(undeletable), min(undeletable), error
        )
