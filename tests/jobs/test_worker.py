"""Workers on a real database with a fake executor: which one executes a job, and which files remain."""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time

import pytest
from sqlalchemy.exc import OperationalError

from databases import on_both
from jobs.fake_executor import FakeExecutor
from jobs.running_worker import running_worker
from noria.errors import (
    DeadlineExceeded,
    EngineLost,
    EngineUnavailable,
    GenerationFailed,
    InternalError,
    JobsUnavailable,
    QueueFull,
)
from noria.jobs.database.claims import LEASE_S
from noria.jobs.database.store import JobStore
from noria.jobs.records import TERMINAL_STATUSES
from noria.jobs.results import ResultStore
from noria.jobs.thread_offloader import ThreadOffloader
from noria.jobs.worker import MAX_ENGINE_LOSSES, RESULTS_RETRY_S, TICK_S, Requeue, retry_decision
from waiting import TIMEOUT_S, wait_until_async


def accept(store, new):
    return store.accept(new, 1000, time.time())[0].id


def status_of(store, job_id):
    return store.get(job_id).status


@pytest.fixture
def results(tmp_path):
    return ResultStore("auto", tmp_path)


def files_in(tmp_path):
    return sorted(str(path.relative_to(tmp_path / "results")) for path in (tmp_path / "results").rglob("*.png*"))


async def hang(record, report_progress):
    await asyncio.Event().wait()


@pytest.fixture
def traced(tracer, collector, caller):
    """Fields of jobs of one trace, and a function that returns the errors of the spans of their attempts."""

    def error_types():
        tracer.span_processor.force_flush()
        return [span.attributes.get("error.type") for span in collector.of_trace(caller.trace_id)]

    return {"request": json.dumps({"request": {"traceparent": caller.traceparent}}).encode()}, error_types


# ── Executing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_as_many_jobs_run_at_once_as_the_executor_has_capacity_for(store, results, job, tmp_path):
    async def slowly(record, report_progress):
        await asyncio.sleep(0.05)

    executor = FakeExecutor(behaviour=slowly, capacity=3)
    names = [accept(store, job()) for _ in range(7)]
    async with running_worker(store, results, executor):
        await wait_until_async(lambda: all(status_of(store, name) == "succeeded" for name in names))
    assert executor.max_running == 3
    record = store.get(names[0])
    assert (record.output, json.loads(record.metrics)) == ("1-0.png", {"denoise_s": 0.1})
    assert results.read(names[0], "1-0.png") == b'made from {"seed": 7}'
    assert files_in(tmp_path) == sorted(f"{name}/1-0.png" for name in names)


async def test_progress_is_stored_at_most_twice_a_second(store, results, job):
    def written(job_id):
        return [event for event in store.events(job_id, 0) if event.type == "progress"]

    async def chatter(record, report_progress):
        nonlocal began
        began = time.monotonic()
        for step in itertools.count():
            report_progress(json.dumps({"step": step}).encode())
            worker.wake()
            await asyncio.sleep(0.01)
            if len(written(record.id)) >= 3:
                return

    began = 0.0
    name = accept(store, job())
    async with running_worker(store, results, FakeExecutor(behaviour=chatter)) as worker:
        await wait_until_async(lambda: status_of(store, name) == "succeeded")
    took_s, progress = time.monotonic() - began, written(name)
    assert took_s >= (len(progress) - 1) / 2
    steps = [json.loads(event.data)["step"] for event in progress]
    assert steps == sorted(steps)


async def test_a_job_cancelled_by_another_process_stops_within_a_second(engine, results, job, tmp_path, tracer, traced):
    class CountingStore(JobStore):
        """Counts the ticks of the worker."""

        num_ticks = 0

        def renew(self, claims, now):
            self.num_ticks += 1
            return super().renew(claims, now)

    store = CountingStore(engine)
    tick_of_its_end = None

    async def hang_and_count(record, report_progress):
        nonlocal tick_of_its_end
        try:
            await hang(record, report_progress)
        finally:
            tick_of_its_end = store.num_ticks

    executor, (fields, error_types) = FakeExecutor(behaviour=hang_and_count), traced
    name = accept(store, job(**fields))
    async with running_worker(store, results, executor, tracer=tracer):
        await wait_until_async(lambda: executor.num_running == 1)
        store.cancel(name, time.time())  # without waking the worker
        tick_before = store.num_ticks
        await wait_until_async(lambda: executor.num_running == 0)
        assert tick_of_its_end <= tick_before + 1  # and not when its lease is renewed, ten ticks later
        assert TICK_S < 1.0
        assert executor.cancelled == [name]
    assert status_of(store, name) == "canceled"
    assert files_in(tmp_path) == []
    assert error_types() == ["cancelled"]


async def test_a_claim_that_fails_while_the_worker_stops_does_not_keep_it_running(engine, results):
    entered, released = threading.Event(), threading.Event()

    class StandingStore(JobStore):
        def claim(self, *_):
            entered.set()
            released.wait(TIMEOUT_S)
            raise JobsUnavailable("PostgreSQL stands still")

    async with asyncio.timeout(TIMEOUT_S), running_worker(StandingStore(engine), results, FakeExecutor()):
        await wait_until_async(entered.is_set)
        asyncio.get_running_loop().call_later(0.1, released.set)


async def test_an_execution_that_ends_after_a_cancellation_leaves_no_file(
    store, results, job, tmp_path, tracer, traced
):
    fields, error_types = traced
    name = accept(store, job(**fields))

    async def cancelled_meanwhile(record, report_progress):
        store.cancel(name, time.time())

    async with running_worker(store, results, FakeExecutor(behaviour=cancelled_meanwhile), tracer=tracer) as worker:
        await wait_until_async(lambda: status_of(store, name) == "canceled")
        await wait_until_async(lambda: not worker._running_jobs)
    assert files_in(tmp_path) == []
    assert error_types() == ["cancelled"]


async def test_stopping_requeues_running_jobs_at_once(store, results, job):
    executor = FakeExecutor(behaviour=hang)
    names = [accept(store, job()) for _ in range(3)]
    async with running_worker(store, results, executor):
        await wait_until_async(lambda: executor.num_running == 3)
    for name in names:
        record = store.get(name)
        assert (record.status, record.owner, record.lease_until, record.num_losses) == ("starting", None, None, 0)
    async with running_worker(store, results, FakeExecutor(), owner="other/frontend-0/1"):
        await wait_until_async(lambda: all(status_of(store, name) == "succeeded" for name in names))


async def test_after_stop_claiming_no_job_is_claimed(store, results, job):
    executor = FakeExecutor()
    async with running_worker(store, results, executor) as worker:
        worker.stop_claiming()
        name = accept(store, job())
        worker.wake()
        await asyncio.sleep(0.2)
        assert status_of(store, name) == "starting"


# ── What goes wrong ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "decision"),
    [
        (QueueFull("full", retry_after_s=3.0), Requeue(3.0)),
        (QueueFull("full", retry_after_s=1000.0), Requeue(30.0)),
        (EngineUnavailable("restarting"), Requeue(1.0)),
        (EngineLost("lost"), Requeue(1.0, engine_lost=True)),
        (GenerationFailed("broken"), None),
        (DeadlineExceeded("late"), None),
        (InternalError("bug"), None),
    ],
)
def test_only_a_full_queue_or_a_missing_engine_requeues_a_job(error, decision):
    assert retry_decision(error, 0) == decision


def test_a_job_that_loses_too_many_engines_fails():
    assert retry_decision(EngineLost("lost"), MAX_ENGINE_LOSSES - 2) is not None
    assert retry_decision(EngineLost("lost"), MAX_ENGINE_LOSSES - 1) is None


async def test_a_job_is_retried_until_an_engine_is_available(store, results, job):
    tries = []

    async def unavailable_at_first(record, report_progress):
        tries.append(record.attempt)
        if len(tries) == 1:
            raise EngineUnavailable("restarting")
        if len(tries) == 2:
            raise EngineLost("lost")

    name = accept(store, job())
    async with running_worker(store, results, FakeExecutor(behaviour=unavailable_at_first)):
        await wait_until_async(lambda: status_of(store, name) == "succeeded")
    assert store.get(name).num_engine_losses == 1
    assert tries == [1, 2, 3]


async def test_a_full_queue_of_one_model_delays_no_job_of_another(store, results, job):
    async def full_for_shapes(record, report_progress):
        if record.model == "shapes":
            raise QueueFull("full", retry_after_s=30.0)

    executor = FakeExecutor(behaviour=full_for_shapes, models={("shapes", "v1"), ("other", "v1")})
    first = accept(store, job())
    async with running_worker(store, results, executor) as worker:
        await wait_until_async(lambda: store.get(first).attempt == 1 and status_of(store, first) == "starting")
        delayed, other = accept(store, job()), accept(store, job(model="other"))
        worker.wake()
        await wait_until_async(lambda: status_of(store, other) == "succeeded")
        assert store.get(delayed).attempt == 0


def test_a_job_that_cannot_be_executed_fails_with_the_reason(store, results, job):
    async def reject(record, report_progress):
        raise GenerationFailed("the model returned NaN.")

    async def broken(record, report_progress):
        raise ZeroDivisionError

    async def scenario(behaviour):
        name = accept(store, job())
        async with running_worker(store, results, FakeExecutor(behaviour=behaviour)):
            await wait_until_async(lambda: status_of(store, name) in TERMINAL_STATUSES)
        return store.get(name)

    failed = asyncio.run(scenario(reject))
    assert (failed.status, failed.error, failed.error_code) == (
        "failed",
        "the model returned NaN.",
        "generation_failed",
    )
    failed = asyncio.run(scenario(broken))
    assert (failed.status, failed.error_code) == ("failed", "internal")
    assert "ZeroDivisionError" not in failed.error


async def test_a_failing_results_folder_requeues_jobs_without_counting_a_loss(
    store, results, job, tmp_path, tracer, traced, caplog
):
    caplog.set_level("INFO", "noria.jobs")
    ahead, (fields, error_types) = 0.0, traced
    name = accept(store, job(**fields))
    (tmp_path / "results").rmdir()
    (tmp_path / "results").touch()  # a file in the folder's place
    began = time.time()
    executor = FakeExecutor()
    async with running_worker(store, results, executor, tracer=tracer) as worker:
        await wait_until_async(lambda: store.get(name).attempt == 1 and status_of(store, name) == "starting")
        waiting = store.get(name)
        assert (waiting.owner, waiting.num_losses, waiting.num_engine_losses) == (None, 0, 0)
        assert waiting.not_before >= began + RESULTS_RETRY_S
        other = accept(store, job())
        worker.wake()
        await asyncio.sleep(2 * TICK_S)
        assert store.get(other).attempt == 0  # no job is claimed while the folder fails
    assert error_types() == ["jobs_unavailable"]
    log_fields = [line.noria_fields for line in caplog.records if hasattr(line, "noria_fields")]
    assert [each["event"] for each in log_fields][:2] == ["storage_failed", "job_requeued"]
    assert name in caplog.text
    (tmp_path / "results").unlink()
    ahead = RESULTS_RETRY_S
    async with running_worker(store, results, FakeExecutor(), clock=lambda: time.time() + ahead):
        await wait_until_async(lambda: status_of(store, name) == status_of(store, other) == "succeeded")


@on_both
async def test_a_job_that_is_erased_while_its_images_are_written_delays_no_other(
    store, results, job, monkeypatch, tracer, traced
):
    save = results.save

    def erase_while_saving(job_id, *arguments):
        if job_id == erased:
            store.cancel(job_id, time.time())
            store.delete(job_id)
            raise FileNotFoundError(job_id)
        return save(job_id, *arguments)

    monkeypatch.setattr(results, "save", erase_while_saving)
    fields, error_types = traced
    erased = accept(store, job(**fields))
    async with running_worker(store, results, FakeExecutor(), tracer=tracer) as worker:
        await wait_until_async(lambda: store.states([erased]) == {})
        other, began = accept(store, job()), time.monotonic()
        worker.wake()
        await wait_until_async(lambda: status_of(store, other) == "succeeded")
        assert time.monotonic() - began < RESULTS_RETRY_S
    assert error_types() == ["cancelled"]


async def test_leases_are_renewed_while_all_request_threads_are_blocked(store, results, job):
    released, now, offload = threading.Event(), time.time(), ThreadOffloader()
    slow = [asyncio.ensure_future(offload(released.wait, TIMEOUT_S)) for _ in range(100)]  # slow readers of images
    name, executor = accept(store, job()), FakeExecutor(behaviour=hang)
    try:
        async with running_worker(store, results, executor, clock=lambda: now, offload=offload):
            await wait_until_async(lambda: status_of(store, name) == "processing")
            leased_until = store.get(name).lease_until
            now += LEASE_S / 2
            await wait_until_async(lambda: store.get(name).lease_until > leased_until)
        assert status_of(store, name) == "starting"
    finally:
        released.set()
    await asyncio.gather(*slow)
    offload.close()


async def test_the_files_of_a_job_are_kept_when_its_outcome_is_unknown(engine, results, job, tracer, traced):
    class StoreLosingTheCommitReply(JobStore):
        """Its connection breaks after the COMMIT has taken effect, before the reply arrives."""

        def finish(self, *args):
            super().finish(*args)
            raise OperationalError("COMMIT", {}, ConnectionResetError())

    store, (fields, error_types) = StoreLosingTheCommitReply(engine), traced
    name = accept(store, job(**fields))
    async with running_worker(store, results, FakeExecutor(), tracer=tracer) as worker:
        await wait_until_async(lambda: status_of(store, name) == "succeeded")
        await wait_until_async(lambda: not worker._running_jobs)
    assert results.read(name, store.get(name).output) is not None
    assert error_types() == ["internal"]


KILLED_WORKER = """
import asyncio, pathlib, sys
from noria.jobs.results import ResultStore
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore
from noria.jobs.thread_offloader import ThreadOffloader
from noria.jobs.worker import JobWorker

class FakeExecutor:
    def available_models(self): return {("shapes", "v1")}
    def capacity(self): return 1
    async def execute(self, record, report_progress, log_record):
        results.save(record.id, record.attempt, [b"half"], "png")  # killed before it can finish
        print("executing", flush=True)
        await asyncio.Event().wait()

folder = pathlib.Path(sys.argv[2])
results = ResultStore("auto", folder)
store = JobStore(open_jobs_database(sys.argv[1], folder))
asyncio.run(JobWorker(store, results, FakeExecutor(), ThreadOffloader(), "server/frontend-0/first").run())
"""


def start_and_kill_a_worker(database, tmp_path):
    """Returns when it has begun to execute a job and is dead."""
    killed = subprocess.Popen([sys.executable, "-c", KILLED_WORKER, database, str(tmp_path)], stdout=subprocess.PIPE)
    with killed:
        assert killed.stdout.readline() == b"executing\n"
        killed.kill()


@pytest.mark.parametrize("successor", ["server/frontend-0/second", "other/frontend-0/first"])
async def test_the_job_of_a_killed_worker_is_executed_by_another_with_the_same_request(
    store, results, database, tmp_path, job, successor
):
    name = accept(store, job())
    start_and_kill_a_worker(database, tmp_path)
    assert status_of(store, name) == "processing"
    # A restart of the same front end reclaims at once; others wait for the lease to expire: here their clock is ahead.
    ahead = 0.0 if successor.startswith("server/frontend-0/") else 60.0
    async with running_worker(store, results, FakeExecutor(), successor, clock=lambda: time.time() + ahead):
        await wait_until_async(lambda: status_of(store, name) == "succeeded")
    record = store.get(name)
    assert (record.attempt, record.num_losses, record.output) == (2, 1, "2-0.png")
    assert results.read(name, "2-0.png") == b'made from {"seed": 7}'
    statuses = [json.loads(event.data)["status"] for event in store.events(name, 0) if event.type == "status"]
    assert statuses[-1] == "succeeded"
    assert sum(status in TERMINAL_STATUSES for status in statuses) == 1


def test_jobs_import_neither_torch_nor_starlette_nor_psycopg():
    code = "import sys, noria.jobs.service; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "starlette", "psycopg"} & set(loaded)
