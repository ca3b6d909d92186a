"""The end of a job is reported exactly once, whichever process ended it: in metrics, log, webhook and trace."""

import asyncio
import concurrent.futures
import dataclasses
import json
import time

import msgspec
import pytest
from opentelemetry.trace import Tracer

from databases import on_both
from jobs.fake_executor import FakeExecutor
from jobs.running_worker import running_worker
from noria.errors import DeadlineExceeded, EngineLost, EngineUnavailable, GenerationFailed
from noria.jobs.completion import JobCompletionReporter, job_outcome, stored_request_fields
from noria.jobs.database.claims import LEASE_S, MAX_LOSSES
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore
from noria.jobs.records import TERMINAL_STATUSES, Claim
from noria.jobs.results import ResultStore
from noria.jobs.service import clean_up
from noria.jobs.stored_request import StoredRequest, StoredTextRequest, TextJobRequest, serialize
from noria.jobs.webhooks.outbox import Outbox
from noria.jobs.worker import MAX_ENGINE_LOSSES
from noria.observe.logs.log_record import RESERVED
from noria.observe.logs.request_log import REQUEST_FIELDS
from noria.observe.logs.setup import LineHandler, logging_to
from noria.observe.metrics import declarations, outcomes
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.testing.requests import make_image_request
from waiting import wait_until_async

SHAPES = {("shapes", "v1")}
REQUEST = make_image_request(
    "job_1",
    "shapes",
    prompt="a secret prompt",
    width=64,
    height=48,
    n=2,
    scheduler="euler",
    timeout_s=9.0,
    deadline_s=60.0,
)


class MeasuringExecutor(FakeExecutor):
    """Reads the request and records what it measured, as a front end's executor does."""

    async def execute(self, record, report_progress, log_record):
        msgspec.json.decode(record.request, type=dict)
        output = await super().execute(record, report_progress, log_record)
        log_record.add(denoise_s=0.25, deadline_s=1.0)
        return output


async def hang(record, report_progress):
    await asyncio.Event().wait()


@dataclasses.dataclass
class JobHarness:
    """A job and the means to end it."""

    store: JobStore
    results: ResultStore
    tracer: Tracer
    job_id: str

    @property
    def record(self):
        return self.store.get(self.job_id)

    def running(self, executor, owner="s/frontend-0/1", store=None):
        return running_worker(store or self.store, self.results, executor, owner, tracer=self.tracer)

    async def wait_until(self, condition):
        await wait_until_async(lambda: condition(self.record))

    async def execute_with(self, *executors):
        for executor in executors:
            async with self.running(executor):
                await self.wait_until(lambda record: record.status in TERMINAL_STATUSES)

    def lose_claims(self, times):
        """Claim the job `times` times, each time in a process that dies."""
        now = time.time()
        for index in range(times):
            assert self.store.claim(f"s/f/{index}", SHAPES, 9, now + index * (LEASE_S + 1))
        return now + times * (LEASE_S + 1)


async def succeeded(scene):
    await scene.execute_with(MeasuringExecutor())


async def succeeded_on_second_attempt(scene):
    await scene.execute_with(MeasuringExecutor(EngineUnavailable("loading", retry_after_s=0.1)))


async def cancelled_while_queued(scene):
    scene.store.cancel(scene.job_id, time.time())
    scene.store.cancel(scene.job_id, time.time())


async def cancelled_while_running(scene):
    async with scene.running(FakeExecutor(behaviour=hang)) as worker:
        await scene.wait_until(lambda record: record.status == "processing")
        scene.store.cancel(scene.job_id, time.time())
        worker.wake()


async def cancelled_after_requeue(scene):
    async with scene.running(MeasuringExecutor(EngineUnavailable("loading", retry_after_s=30.0))):
        await scene.wait_until(lambda record: record.status == "starting" and record.attempt == 1)
    scene.store.cancel(scene.job_id, time.time())


async def expired(scene):
    for _ in range(2):
        clean_up(scene.store, scene.results, 60.0, time.time() + 61.0)


async def deadline_missed(scene):
    await scene.execute_with(MeasuringExecutor(DeadlineExceeded("not done 60 s after it was accepted.")))


async def model_failed(scene):
    await scene.execute_with(MeasuringExecutor(GenerationFailed("the model failed")))


async def failed_by_bug(scene):
    await scene.execute_with(MeasuringExecutor(RuntimeError("a bug")))


async def engines_lost_too_often(scene):
    await scene.execute_with(MeasuringExecutor(*[EngineLost("gone")] * MAX_ENGINE_LOSSES))


async def processes_lost_too_often(scene):
    now = scene.lose_claims(MAX_LOSSES)
    for _ in range(2):
        assert not scene.store.claim("s/f/last", SHAPES, 9, now)


async def succeeded_elsewhere_after_lease_expiry(scene):
    async with scene.running(FakeExecutor(behaviour=hang)) as worker:
        await scene.wait_until(lambda record: record.status == "processing")
        (claimed,) = scene.store.claim("t/f/1", SHAPES, 9, time.time() + LEASE_S + 60)
        assert scene.store.finish(Claim(claimed.id, "t/f/1", claimed.attempt), ["2-0.png"], {}, time.time() + 90)
        worker.wake()


async def succeeded_after_server_stop(scene):
    async with scene.running(FakeExecutor(behaviour=hang)):
        await scene.wait_until(lambda record: record.status == "processing")
    assert scene.record.status == "starting"
    await scene.execute_with(MeasuringExecutor())


async def succeeded_after_server_kill(scene):
    scene.store.claim("s/frontend-0/0", SHAPES, 9, time.time())
    await scene.execute_with(MeasuringExecutor())


ENDINGS = [
    (succeeded, "ok", "succeeded", 1),
    (succeeded_on_second_attempt, "ok", "succeeded", 2),
    (succeeded_elsewhere_after_lease_expiry, "ok", "succeeded", 2),
    (succeeded_after_server_stop, "ok", "succeeded", 2),
    (succeeded_after_server_kill, "ok", "succeeded", 2),
    (cancelled_while_queued, "cancelled", "canceled", 0),
    (cancelled_while_running, "cancelled", "canceled", 1),
    (cancelled_after_requeue, "cancelled", "canceled", 1),
    (expired, "job_expired", "failed", 0),
    (deadline_missed, "deadline_exceeded", "failed", 1),
    (model_failed, "generation_failed", "failed", 1),
    (failed_by_bug, "internal", "failed", 1),
    (engines_lost_too_often, "engine_lost", "failed", MAX_ENGINE_LOSSES),
    (processes_lost_too_often, "engine_lost", "failed", MAX_LOSSES),
]


@pytest.fixture
def lines():
    """Returns the lines that a logger has written so far in the front end's format; request lines by default."""
    written = []
    with logging_to(LineHandler("frontend-0", written.append), "info"):
        yield lambda logger="noria.requests": [line for line in written if line["logger"] == logger]


def stored_request(**fields):
    request = msgspec.structs.replace(REQUEST, **fields)
    return serialize(StoredRequest(request, "png", None, metadata=True))


def num_ended():
    return {status: declarations.JOBS.labels(status)._value.get() for status in TERMINAL_STATUSES}


def num_requests(outcome):
    named = {"model": outcomes.OTHER, "outcome": outcome}  # no engine has announced the model here
    return declarations.REGISTRY.get_sample_value("noria_requests_total", named) or 0.0


@pytest.mark.parametrize(("ending", "outcome", "status", "attempt"), ENDINGS, ids=[row[0].__name__ for row in ENDINGS])
async def test_the_end_of_a_job_is_reported_once(
    engine, tmp_path, job, caller, tracer, collector, lines, ending, outcome, status, attempt
):
    store = JobStore(engine, JobCompletionReporter(tracer))
    new = job(request=stored_request(traceparent=caller.traceparent), made_by="alice", webhook="https://example.com/")
    job_id = store.accept(new, 9, time.time())[0].id
    before, before_requests = num_ended(), num_requests(outcome)
    await ending(JobHarness(store, ResultStore("auto", tmp_path), tracer, job_id))
    record = store.get(job_id)

    (line,) = lines()
    assert line["message"].startswith(f"request {outcome} after ")
    expected = {"request_id": job_id, "job_id": job_id, "key": "alice", "model": "shapes", "model_version": "v1"}
    expected |= {"event": "request", "outcome": outcome, "job_status": status, "attempt": attempt}
    expected |= {"n": 2, "width": 64, "height": 48, "inference_steps": 3, "seed": 7, "deadline_s": 60.0}
    assert line.items() >= expected.items()
    assert line.keys() <= {*RESERVED, "trace_id", "span_id", *REQUEST_FIELDS}
    assert line.get("error") == record.error
    assert (line.get("denoise_s") == 0.25) == (ending.__name__ in REPORTED_BY_THE_WORKER)
    assert 0 <= line["waited_s"] <= line["seconds"]
    assert "secret" not in str(line)

    assert num_ended() == before | {status: before[status] + 1}
    assert num_requests(outcome) == before_requests + 1

    bodies = [json.loads(each.body)["status"] for each in Outbox(engine).claim_due(9, time.time() + 1e4)]
    assert [each for each in bodies if each in TERMINAL_STATUSES] == [status]

    tracer.span_processor.force_flush()
    (span,) = [span for span in collector.of_trace(caller.trace_id) if span.name == "job"]
    assert (line["trace_id"], line["span_id"]) == (caller.trace_id, span.span_id)
    assert (span.parent_id, span.failed) == (caller.span_id, outcome != "ok")
    assert span.attributes.get("error.type", "ok") == span.attributes["noria.outcome"] == outcome
    assert span.attributes["noria.job.attempt"] == attempt
    assert span.attributes["noria.api_key.name"] == "alice"
    assert (span.began, span.ended) == pytest.approx((record.created_at, record.completed_at), abs=0.001)


REPORTED_BY_THE_WORKER = {
    "succeeded",
    "succeeded_on_second_attempt",
    "succeeded_after_server_stop",
    "succeeded_after_server_kill",
}
"""The endings reported by the worker that executed the job: it has measured where the time went."""


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (succeeded_on_second_attempt, "loading"),
        (succeeded_after_server_stop, "the front end is stopping"),
        (succeeded_after_server_kill, "the process that ran it died"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_a_requeued_job_is_logged_with_the_reason(store, tmp_path, job, caller, lines, ending, reason):
    job_id = store.accept(job(request=stored_request(traceparent=caller.traceparent)), 9, time.time())[0].id
    await ending(JobHarness(store, ResultStore("auto", tmp_path), GLOBAL_TRACER, job_id))
    (line,) = lines("noria.jobs")
    expected = {"event": "job_requeued", "request_id": job_id, "trace_id": caller.trace_id, "attempt": 1}
    assert line.items() >= expected.items()
    assert line["message"].endswith(f": {reason}")


async def test_a_job_that_another_process_ended_is_not_logged_by_the_worker(store, tmp_path, job, lines):
    for ending in (succeeded_elsewhere_after_lease_expiry, cancelled_while_running):
        job_id = store.accept(job(request=stored_request()), 9, time.time())[0].id
        await ending(JobHarness(store, ResultStore("auto", tmp_path), GLOBAL_TRACER, job_id))
    assert not lines("noria.jobs")


async def test_an_expired_lease_is_logged(store, tmp_path, job, lines):
    job_id = store.accept(job(request=stored_request()), 9, time.time())[0].id
    scene = JobHarness(store, ResultStore("auto", tmp_path), GLOBAL_TRACER, job_id)
    async with scene.running(FakeExecutor(behaviour=hang)) as worker:
        await scene.wait_until(lambda record: record.status == "processing")
        assert store.claim("t/f/1", SHAPES, 9, time.time() + LEASE_S + 60)
        worker.wake()
        await scene.wait_until(lambda _: lines("noria.jobs"))
    (line,) = lines("noria.jobs")
    expected = {"level": "warning", "event": "job_abandoned", "request_id": job_id, "attempt": 1}
    assert line.items() >= expected.items()
    assert not lines()


@on_both
def test_of_many_racing_to_end_a_job_only_the_winner_reports_it(database, tmp_path, job, lines):
    stores = [JobStore(open_jobs_database(database, tmp_path)) for _ in range(3)]
    names = {stores[0].accept(job(), 99, 0.0)[0].id for _ in range(8)}
    before = sum(num_ended().values())
    with concurrent.futures.ThreadPoolExecutor(9) as threads:
        wanted = [threads.submit(store.expire, 60.0, 61.0) for store in stores]
        wanted += [threads.submit(store.cancel, name, 61.0) for name in sorted(names) for store in stores[:2]]
        for each in wanted:
            each.result()
    reported = {line["job_id"]: line["job_status"] for line in lines()}
    assert reported == {name: stores[0].get(name).status for name in names}
    assert len(lines()) == len(names)
    assert sum(num_ended().values()) - before == len(names)
    for store in stores:
        store.close()


async def test_a_job_stored_in_an_unreadable_form_fails_with_a_log_line_and_blocks_no_other(
    store, tmp_path, job, tracer, lines
):
    strange = store.accept(job(request=b"[no JSON", webhook="https://example.com/"), 9, time.time())[0].id
    other = store.accept(job(request=stored_request()), 9, time.time())[0].id
    await JobHarness(store, ResultStore("auto", tmp_path), tracer, other).execute_with(MeasuringExecutor())
    await JobHarness(store, ResultStore("auto", tmp_path), tracer, strange).execute_with(MeasuringExecutor())
    reported = {line["job_id"]: line for line in lines()}
    assert (reported[strange]["outcome"], reported[other]["outcome"]) == ("internal", "ok")
    assert (reported[strange]["model"], reported[strange]["model_version"]) == ("shapes", "v1")
    assert "inference_steps" not in reported[strange]


def test_a_job_without_a_trace_has_a_log_line_and_no_span(engine, job, tracer, collector, lines):
    store = JobStore(engine, JobCompletionReporter(tracer))
    record = store.accept(job(request=stored_request()), 9, 0.0)[0]
    store.cancel(record.id, 5.0)
    tracer.span_processor.force_flush()
    assert [(line["outcome"], line["waited_s"], line["seconds"]) for line in lines()] == [("cancelled", 5.0, 5.0)]
    assert not [span for span in collector.spans if span.attributes.get("noria.request_id") == record.id]


def test_differing_clocks_make_no_duration_negative(store, job, lines):
    record = store.accept(job(), 9, 100.0)[0]
    store.cancel(record.id, 40.0)
    (line,) = lines()
    assert (line["waited_s"], line["seconds"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("prompts", "expected"), [("off", set()), ("hash", {"prompt_sha256"}), ("full", {"prompt"})], ids=str
)
def test_prompts_are_logged_as_configured(store, job, prompts, expected):
    record = store.accept(job(request=stored_request()), 9, 0.0)[0]
    fields = stored_request_fields(record, prompts)
    assert {name for name, value in fields.items() if "prompt" in name and value is not None} == expected


def test_a_failure_without_a_code_counts_as_internal(store, job):
    record = store.accept(job(), 9, 0.0)[0]
    assert job_outcome(dataclasses.replace(record, status="failed", error_code=None)) == "internal"


def test_the_line_of_a_job_of_texts_describes_it_without_its_texts(store, job):
    request = TextJobRequest(task="embedding", num_texts=7, num_chunks=1, num_columns=8)
    record = store.accept(job(request=serialize(StoredTextRequest(request)), text_bytes=9), 9, time.time())[0]
    expected = {"model": "shapes", "model_version": "v1", "task": "embedding", "num_texts": 7, "priority": "low"}
    assert stored_request_fields(record, "full") == expected
