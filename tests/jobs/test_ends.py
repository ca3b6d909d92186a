"""A job's end is told exactly once, by whoever ended it and however: counted, a line in the log, a webhook, a span in its trace."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import time
import uuid

import msgspec
import pytest

from noria.errors import DeadlineExceeded, EngineLost, EngineUnavailable, GenerationFailed
from noria.jobs.blocking import Blocking
from noria.jobs.ends import Ends, asked_for, outcome_of
from noria.jobs.outbox import Outbox
from noria.jobs.records import ENDED, Claim
from noria.jobs.results import Results
from noria.jobs.runner import MAX_ENGINE_LOSSES, Drawn, Runner
from noria.jobs.schema import database_url, open_database
from noria.jobs.service import clean
from noria.jobs.store import LEASE_S, MAX_LOSSES, Store
from noria.observe import metrics
from noria.observe.lines import RESERVED
from noria.observe.logs import LineHandler, logging_to
from noria.observe.requests import REQUEST_FIELDS, current_note
from noria.observe.trace_context import TraceContext
from noria.observe.traces import NO_TRACER, Tracer
from noria.request import ImageRequest

SHAPES = {("shapes", "v1")}
REQUEST = ImageRequest(
    request_id="job_1",
    prompt="a secret wish",
    negative_prompt="",
    seed=7,
    width_px=64,
    height_px=48,
    num_steps=3,
    guidance_scale=2.0,
    num_images=2,
    scheduler="euler",
    timeout_s=9.0,
    model="shapes",
    deadline_s=60.0,
)


class Painter:
    """Raises its errors one after the other, then draws; while it `holds`, it never comes to an end."""

    def __init__(self, *errors, holds=False):
        self.errors, self.holds = list(errors), holds

    def serves(self):
        return SHAPES

    def room(self):
        return 4

    async def draw(self, record, tell):
        msgspec.json.decode(record.request, type=dict)
        if self.errors:
            raise self.errors.pop(0)
        if self.holds:
            await asyncio.Event().wait()
        current_note().add(denoise_s=0.25, deadline_s=1.0)
        return Drawn([b"an image"], "png", {})


@dataclasses.dataclass
class Scene:
    """A job, and what it takes to end it."""

    store: Store
    results: Results
    tracer: Tracer
    job_id: str

    @property
    def record(self):
        return self.store.get(self.job_id)

    @contextlib.asynccontextmanager
    async def running(self, painter, owner="s/frontend-0/1", store=None):
        blocking = Blocking()
        runner = Runner(store or self.store, self.results, painter, blocking, owner, time.time, self.tracer)
        task = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await runner.stop()
            blocking.close()

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition(self.record):  # noqa: ASYNC110 - it happens in a database
                await asyncio.sleep(0.02)

    async def drawn_by(self, *painters):
        for painter in painters:
            async with self.running(painter):
                await self.until(lambda record: record.status in ENDED)

    def lose_claims(self, times):
        """As many processes as that claim the job, and end before it does."""
        now = time.time()
        for turn in range(times):
            assert self.store.claim(f"s/f/{turn}", SHAPES, 9, now + turn * (LEASE_S + 1))
        return now + times * (LEASE_S + 1)


async def drawn(scene):
    await scene.drawn_by(Painter())


async def drawn_at_the_second_try(scene):
    await scene.drawn_by(Painter(EngineUnavailable("loading", retry_after_s=0.1)))


async def cancelled_while_it_waits(scene):
    scene.store.cancel(scene.job_id, time.time())
    scene.store.cancel(scene.job_id, time.time())


async def cancelled_while_it_is_drawn(scene):
    async with scene.running(Painter(holds=True)) as runner:
        await scene.until(lambda record: record.status == "processing")
        scene.store.cancel(scene.job_id, time.time())
        runner.wake()


async def cancelled_after_it_was_handed_back(scene):
    async with scene.running(Painter(EngineUnavailable("loading", retry_after_s=30.0))):
        await scene.until(lambda record: record.status == "starting" and record.attempt == 1)
    scene.store.cancel(scene.job_id, time.time())


async def expired(scene):
    for _ in range(2):
        clean(scene.store, scene.results, 60.0, time.time() + 61.0)


async def too_late(scene):
    await scene.drawn_by(Painter(DeadlineExceeded("not done 60 s after it was accepted.")))


async def refused_by_the_model(scene):
    await scene.drawn_by(Painter(GenerationFailed("the model failed")))


async def broken_by_a_bug(scene):
    await scene.drawn_by(Painter(RuntimeError("a bug")))


async def engines_lost_too_often(scene):
    await scene.drawn_by(Painter(*[EngineLost("gone")] * MAX_ENGINE_LOSSES))


async def processes_lost_too_often(scene):
    now = scene.lose_claims(MAX_LOSSES)
    for _ in range(2):
        assert not scene.store.claim("s/f/last", SHAPES, 9, now)


async def drawn_elsewhere_after_its_lease_ran_out(scene):
    async with scene.running(Painter(holds=True)) as runner:
        await scene.until(lambda record: record.status == "processing")
        (mine,) = scene.store.claim("t/f/1", SHAPES, 9, time.time() + LEASE_S + 60)
        assert scene.store.finish(Claim(mine.id, "t/f/1", mine.attempt), ["2-0.png"], {}, time.time() + 90)
        runner.wake()


async def drawn_after_the_server_stopped(scene):
    async with scene.running(Painter(holds=True)):
        await scene.until(lambda record: record.status == "processing")
    assert scene.record.status == "starting"
    await scene.drawn_by(Painter())


async def drawn_after_the_server_was_killed(scene):
    scene.store.claim("s/frontend-0/0", SHAPES, 9, time.time())
    await scene.drawn_by(Painter())


ENDINGS = [
    (drawn, "ok", "succeeded", 1),
    (drawn_at_the_second_try, "ok", "succeeded", 2),
    (drawn_elsewhere_after_its_lease_ran_out, "ok", "succeeded", 2),
    (drawn_after_the_server_stopped, "ok", "succeeded", 2),
    (drawn_after_the_server_was_killed, "ok", "succeeded", 2),
    (cancelled_while_it_waits, "cancelled", "canceled", 0),
    (cancelled_while_it_is_drawn, "cancelled", "canceled", 1),
    (cancelled_after_it_was_handed_back, "cancelled", "canceled", 1),
    (expired, "job_expired", "failed", 0),
    (too_late, "deadline_exceeded", "failed", 1),
    (refused_by_the_model, "generation_failed", "failed", 1),
    (broken_by_a_bug, "internal", "failed", 1),
    (engines_lost_too_often, "engine_lost", "failed", MAX_ENGINE_LOSSES),
    (processes_lost_too_often, "engine_lost", "failed", MAX_LOSSES),
]


@pytest.fixture
def caller():
    return TraceContext(uuid.uuid4().hex, uuid.uuid4().hex[:16], True)


@pytest.fixture
def lines():
    """What a logger has written so far, as a front end writes it; request lines by default."""
    written = []
    with logging_to(LineHandler("frontend-0", written.append), "info"):
        yield lambda logger="noria.requests": [line for line in written if line["logger"] == logger]


def kept(**fields):
    request = msgspec.structs.replace(REQUEST, **fields)
    return msgspec.json.encode({"request": request, "file_format": "png"})


def num_ended():
    return {status: metrics.JOBS.labels(status)._value.get() for status in ENDED}


@pytest.mark.parametrize(("ending", "outcome", "status", "attempt"), ENDINGS, ids=[row[0].__name__ for row in ENDINGS])
def test_a_jobs_end_is_told_once(
    engine, tmp_path, job, caller, tracer, collector, lines, ending, outcome, status, attempt
):
    store = Store(engine, Ends(tracer))
    new = job(request=kept(traceparent=caller.traceparent), made_by="alice", webhook="https://example.com/")
    job_id = store.accept(new, 9, time.time())[0].id
    before = num_ended()
    asyncio.run(ending(Scene(store, Results("auto", tmp_path), tracer, job_id)))
    record = store.get(job_id)

    (line,) = lines()
    assert line["message"].startswith(f"request {outcome} after ")
    told = {"request_id": job_id, "job_id": job_id, "key": "alice", "model": "shapes", "model_version": "v1"}
    told |= {"event": "request", "outcome": outcome, "job_status": status, "attempt": attempt}
    told |= {"n": 2, "size": "64x48", "steps": 3, "seed": 7, "deadline_s": 60.0}
    assert line.items() >= told.items()
    assert line.keys() <= {*RESERVED, "trace_id", "span_id", *REQUEST_FIELDS}
    assert line.get("error") == record.error
    assert (line.get("denoise_s") == 0.25) == (ending.__name__ in {"drawn", *OURS})
    assert 0 <= line["waited_s"] <= line["seconds"]
    assert "secret" not in str(line)

    assert num_ended() == before | {status: before[status] + 1}

    bodies = [json.loads(each.body)["status"] for each in Outbox(engine).take(9, time.time() + 1e4)]
    assert [each for each in bodies if each in ENDED] == [status]

    tracer.close()
    (span,) = [span for span in collector.of_trace(caller.trace_id) if span.name == "job"]
    assert (line["trace_id"], line["span_id"]) == (caller.trace_id, span.span_id)
    assert (span.parent_id, span.failed) == (caller.span_id, outcome != "ok")
    assert span.attributes.get("error.type", "ok") == span.attributes["noria.outcome"] == outcome
    assert span.attributes["noria.job.attempt"] == attempt
    assert span.attributes["noria.key"] == "alice"
    assert (span.began, span.ended) == pytest.approx((record.created_at, record.completed_at), abs=0.001)


OURS = {"drawn_at_the_second_try", "drawn_after_the_server_stopped", "drawn_after_the_server_was_killed"}
"""Those whose end is told by the runner that drew them: it knows where the time went."""


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (drawn_at_the_second_try, "loading"),
        (drawn_after_the_server_stopped, "the front end stops"),
        (drawn_after_the_server_was_killed, "the process that drew it ended"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_job_that_waits_again_has_a_line_that_says_why(store, tmp_path, job, caller, lines, ending, reason):
    job_id = store.accept(job(request=kept(traceparent=caller.traceparent)), 9, time.time())[0].id
    asyncio.run(ending(Scene(store, Results("auto", tmp_path), NO_TRACER, job_id)))
    (line,) = lines("noria.jobs")
    told = {"event": "job_handed_back", "request_id": job_id, "trace_id": caller.trace_id, "attempt": 1}
    assert line.items() >= told.items()
    assert line["message"].endswith(f": {reason}")


def test_a_drawing_whose_job_others_have_ended_says_nothing(store, tmp_path, job, lines):
    for ending in (drawn_elsewhere_after_its_lease_ran_out, cancelled_while_it_is_drawn):
        job_id = store.accept(job(request=kept()), 9, time.time())[0].id
        asyncio.run(ending(Scene(store, Results("auto", tmp_path), NO_TRACER, job_id)))
    assert not lines("noria.jobs")


def test_a_drawing_whose_lease_ran_out_says_so(store, tmp_path, job, lines):
    job_id = store.accept(job(request=kept()), 9, time.time())[0].id
    scene = Scene(store, Results("auto", tmp_path), NO_TRACER, job_id)

    async def outrun():
        async with scene.running(Painter(holds=True)) as runner:
            await scene.until(lambda record: record.status == "processing")
            assert store.claim("t/f/1", SHAPES, 9, time.time() + LEASE_S + 60)
            runner.wake()
            await scene.until(lambda _: lines("noria.jobs"))

    asyncio.run(outrun())
    (line,) = lines("noria.jobs")
    told = {"level": "warning", "event": "job_let_go", "request_id": job_id, "attempt": 1}
    assert line.items() >= told.items()
    assert not lines()


def test_an_end_that_many_want_at_once_is_told_by_the_one_who_got_it(database, tmp_path, job, lines):
    stores = [Store(open_database(database_url(database, tmp_path))) for _ in range(3)]
    names = {stores[0].accept(job(), 99, 0.0)[0].id for _ in range(8)}
    before = sum(num_ended().values())
    with concurrent.futures.ThreadPoolExecutor(9) as threads:
        wanted = [threads.submit(store.expire, 60.0, 61.0) for store in stores]
        wanted += [threads.submit(store.cancel, name, 61.0) for name in sorted(names) for store in stores[:2]]
        for each in wanted:
            each.result()
    told = {line["job_id"]: line["job_status"] for line in lines()}
    assert told == {name: stores[0].get(name).status for name in names}
    assert len(lines()) == len(names)
    assert sum(num_ended().values()) - before == len(names)
    for store in stores:
        store.close()


def test_a_job_that_another_noria_kept_otherwise_ends_with_its_line_and_holds_up_no_other(
    store, tmp_path, job, tracer, lines
):
    strange = store.accept(job(request=b"[no JSON", webhook="https://example.com/"), 9, time.time())[0].id
    other = store.accept(job(request=kept()), 9, time.time())[0].id
    asyncio.run(Scene(store, Results("auto", tmp_path), tracer, other).drawn_by(Painter()))
    asyncio.run(Scene(store, Results("auto", tmp_path), tracer, strange).drawn_by(Painter()))
    told = {line["job_id"]: line for line in lines()}
    assert (told[strange]["outcome"], told[other]["outcome"]) == ("internal", "ok")
    assert (told[strange]["model"], told[strange]["model_version"]) == ("shapes", "v1")
    assert "steps" not in told[strange]


def test_a_job_in_nobodys_trace_has_a_line_and_no_span(engine, job, tracer, collector, lines):
    store = Store(engine, Ends(tracer))
    record = store.accept(job(request=kept()), 9, 0.0)[0]
    store.cancel(record.id, 5.0)
    tracer.close()
    assert [(line["outcome"], line["waited_s"], line["seconds"]) for line in lines()] == [("cancelled", 5.0, 5.0)]
    assert not [span for span in collector.spans if span.attributes.get("noria.request_id") == record.id]


def test_clocks_that_differ_make_no_time_negative(store, job, lines):
    record = store.accept(job(), 9, 100.0)[0]
    store.cancel(record.id, 40.0)
    (line,) = lines()
    assert (line["waited_s"], line["seconds"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("prompts", "told"), [("off", set()), ("hash", {"prompt_sha256"}), ("full", {"prompt"})], ids=str
)
def test_an_end_tells_of_the_prompt_what_the_operator_allows(store, job, prompts, told):
    record = store.accept(job(request=kept()), 9, 0.0)[0]
    assert {name for name in asked_for(record, prompts) if "prompt" in name} == told


def test_a_failure_without_a_code_is_a_bug_of_ours(store, job):
    record = store.accept(job(), 9, 0.0)[0]
    assert outcome_of(dataclasses.replace(record, status="failed", error_code=None)) == "internal"
