"""Runners over a real database and a painter that does as it is told: who draws, who lets go, and what is left behind."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from sqlalchemy.exc import OperationalError

from noria.errors import DeadlineExceeded, EngineLost, EngineUnavailable, GenerationFailed, InternalError, QueueFull
from noria.jobs.blocking import Blocking
from noria.jobs.records import ENDED
from noria.jobs.results import Results
from noria.jobs.runner import MAX_ENGINE_LOSSES, RESULTS_OUT_S, TICK_S, Drawn, PutBack, Runner, verdict
from noria.jobs.schema import database_url, open_database
from noria.jobs.store import LEASE_S, Store
from waiting import until_async


class FakePainter:
    """Draws at once, unless its `behaviour` does otherwise."""

    def __init__(self, behaviour=None, room=4):
        self.behaviour, self._room = behaviour, room
        self.drawing, self.most_at_once, self.cancelled = 0, 0, []

    def serves(self):
        return {("shapes", "v1")}

    def room(self):
        return self._room

    async def draw(self, record, tell):
        self.drawing += 1
        self.most_at_once = max(self.most_at_once, self.drawing)
        try:
            if self.behaviour is not None:
                await self.behaviour(record, tell)
        except asyncio.CancelledError:
            self.cancelled.append(record.id)
            raise
        finally:
            self.drawing -= 1
        return Drawn([f"drawn from {record.request}".encode()], "png", {"denoise_s": 0.1})


@contextlib.asynccontextmanager
async def running(store, results, painter, owner="server/frontend-0/1", clock=time.time):
    blocking = Blocking()
    runner = Runner(store, results, painter, blocking, owner, clock)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.stop()
        blocking.close()


def accept(store, new):
    return store.accept(new, 1000, time.time())[0].id


def status_of(store, job_id):
    return store.get(job_id).status


@pytest.fixture
def results(tmp_path):
    return Results("auto", tmp_path)


def files_in(tmp_path):
    return sorted(str(path.relative_to(tmp_path / "results")) for path in (tmp_path / "results").rglob("*.png*"))


async def hold(record, tell):
    await asyncio.Event().wait()


# ── Drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_are_drawn_as_many_at_once_as_there_is_room(store, results, job, tmp_path):
    async def slowly(record, tell):
        await asyncio.sleep(0.05)

    async def scenario():
        painter = FakePainter(slowly, room=3)
        names = [accept(store, job()) for _ in range(7)]
        async with running(store, results, painter):
            await until_async(lambda: all(status_of(store, name) == "succeeded" for name in names))
        assert painter.most_at_once == 3
        return names

    names = asyncio.run(scenario())
    record = store.get(names[0])
    assert (record.output, json.loads(record.metrics)) == ("1-0.png", {"denoise_s": 0.1})
    assert results.read(names[0], "1-0.png") == b'drawn from {"seed": 7}'
    assert files_in(tmp_path) == sorted(f"{name}/1-0.png" for name in names)


def test_progress_is_written_down_twice_a_second_at_most(store, results, job):
    def written(job_id):
        return [event for event in store.events(job_id, 0) if event.type == "progress"]

    async def scenario():
        async def chatter(record, tell):
            nonlocal began
            began = time.monotonic()
            for step in itertools.count():
                tell(json.dumps({"step": step}).encode())
                runner.wake()
                await asyncio.sleep(0.01)
                if len(written(record.id)) >= 3:
                    return

        began = 0.0
        name = accept(store, job())
        async with running(store, results, FakePainter(chatter)) as runner:
            await until_async(lambda: status_of(store, name) == "succeeded")
        return time.monotonic() - began, written(name)

    took_s, progress = asyncio.run(scenario())
    assert took_s >= (len(progress) - 1) / 2
    steps = [json.loads(event.data)["step"] for event in progress]
    assert steps == sorted(steps)


def test_a_cancelled_job_is_let_go_within_a_second_though_another_process_cancelled_it(engine, results, job, tmp_path):
    class Counts(Store):
        """How many ticks of the runner have begun."""

        num_ticks = 0

        def beat(self, claims, now):
            self.num_ticks += 1
            return super().beat(claims, now)

    store = Counts(engine)
    tick_of_its_end = None

    async def hold_and_count(record, tell):
        nonlocal tick_of_its_end
        try:
            await hold(record, tell)
        finally:
            tick_of_its_end = store.num_ticks

    async def scenario():
        painter = FakePainter(hold_and_count)
        name = accept(store, job())
        async with running(store, results, painter):
            await until_async(lambda: painter.drawing == 1)
            store.cancel(name, time.time())  # behind the runner's back
            tick_before = store.num_ticks
            await until_async(lambda: painter.drawing == 0)
            assert tick_of_its_end <= tick_before + 1  # and not when its lease is renewed, ten ticks later
            assert TICK_S < 1.0
            assert painter.cancelled == [name]
        assert status_of(store, name) == "canceled"

    asyncio.run(scenario())
    assert files_in(tmp_path) == []


def test_a_drawing_that_ends_too_late_leaves_no_file(store, results, job, tmp_path):
    async def scenario():
        name = accept(store, job())

        async def cancelled_meanwhile(record, tell):
            store.cancel(name, time.time())

        async with running(store, results, FakePainter(cancelled_meanwhile)) as runner:
            await until_async(lambda: status_of(store, name) == "canceled")
            await until_async(lambda: not runner._flights)

    asyncio.run(scenario())
    assert files_in(tmp_path) == []


def test_who_stops_hands_back_at_once(store, results, job):
    async def scenario():
        painter = FakePainter(hold)
        names = [accept(store, job()) for _ in range(3)]
        async with running(store, results, painter):
            await until_async(lambda: painter.drawing == 3)
        for name in names:
            record = store.get(name)
            assert (record.status, record.owner, record.lease_until, record.num_losses) == ("starting", None, None, 0)
        async with running(store, results, FakePainter(), owner="other/frontend-0/1"):
            await until_async(lambda: all(status_of(store, name) == "succeeded" for name in names))

    asyncio.run(scenario())


def test_who_rests_claims_nothing_more(store, results, job):
    async def scenario():
        painter = FakePainter()
        async with running(store, results, painter) as runner:
            runner.rest()
            name = accept(store, job())
            runner.wake()
            await asyncio.sleep(0.2)
            assert status_of(store, name) == "starting"

    asyncio.run(scenario())


def test_two_runners_draw_each_job_once(database, tmp_path, job):
    now = time.time()  # stands: no lease runs out, however long the machine looks elsewhere

    async def scenario():
        stores = [Store(open_database(database_url(database, tmp_path))) for _ in range(2)]
        painters = [FakePainter(), FakePainter()]
        drawn = []

        async def note(record, tell):
            drawn.append(record.id)
            await asyncio.sleep(0.01)

        names = [accept(stores[0], job()) for _ in range(20)]
        async with contextlib.AsyncExitStack() as stack:
            for number, (store, painter) in enumerate(zip(stores, painters, strict=True)):
                painter.behaviour = note
                owner = f"server/frontend-{number}/1"
                await stack.enter_async_context(
                    running(store, Results("auto", tmp_path), painter, owner, clock=lambda: now)
                )
            await until_async(lambda: all(status_of(stores[0], name) == "succeeded" for name in names))
        assert sorted(drawn) == sorted(names)
        for store in stores:
            store.close()

    asyncio.run(scenario())


# ── What goes wrong ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "decision"),
    [
        (QueueFull("full", retry_after_s=3.0), PutBack(3.0)),
        (QueueFull("full", retry_after_s=1000.0), PutBack(30.0)),
        (EngineUnavailable("restarting"), PutBack(1.0)),
        (EngineLost("lost"), PutBack(1.0, lost=True)),
        (GenerationFailed("broken"), None),
        (DeadlineExceeded("late"), None),
        (InternalError("bug"), None),
    ],
)
def test_only_the_loads_and_the_engines_troubles_put_a_job_back(error, decision):
    assert verdict(error, 0) == decision


def test_a_job_that_engines_keep_ending_with_fails():
    assert verdict(EngineLost("lost"), MAX_ENGINE_LOSSES - 2) is not None
    assert verdict(EngineLost("lost"), MAX_ENGINE_LOSSES - 1) is None


def test_a_job_waits_for_an_engine_and_is_drawn_then(store, results, job):
    tries = []

    async def unavailable_at_first(record, tell):
        tries.append(record.attempt)
        if len(tries) == 1:
            raise EngineUnavailable("restarting")
        if len(tries) == 2:
            raise EngineLost("lost")

    async def scenario():
        name = accept(store, job())
        async with running(store, results, FakePainter(unavailable_at_first)):
            await until_async(lambda: status_of(store, name) == "succeeded")
        assert store.get(name).num_engine_losses == 1

    asyncio.run(scenario())
    assert tries == [1, 2, 3]


def test_a_job_that_cannot_be_drawn_fails_with_the_reason(store, results, job):
    async def refuse(record, tell):
        raise GenerationFailed("the model returned NaN.")

    async def broken(record, tell):
        raise ZeroDivisionError

    async def scenario(behaviour):
        name = accept(store, job())
        async with running(store, results, FakePainter(behaviour)):
            await until_async(lambda: status_of(store, name) in ENDED)
        return store.get(name)

    failed = asyncio.run(scenario(refuse))
    assert (failed.status, failed.error, failed.error_code) == (
        "failed",
        "the model returned NaN.",
        "generation_failed",
    )
    failed = asyncio.run(scenario(broken))
    assert (failed.status, failed.error_code) == ("failed", "internal")
    assert "ZeroDivisionError" not in failed.error


def test_a_results_folder_that_fails_costs_no_job_a_try(store, results, job, tmp_path):
    ahead = 0.0

    async def scenario():
        nonlocal ahead
        name = accept(store, job())
        (tmp_path / "results").rmdir()
        (tmp_path / "results").touch()  # a file in the folder's place
        began = time.time()
        painter = FakePainter()
        async with running(store, results, painter) as runner:
            await until_async(lambda: store.get(name).attempt == 1 and status_of(store, name) == "starting")
            waiting = store.get(name)
            assert (waiting.owner, waiting.num_losses, waiting.num_engine_losses) == (None, 0, 0)
            assert waiting.not_before >= began + RESULTS_OUT_S
            other = accept(store, job())
            runner.wake()
            await asyncio.sleep(2 * TICK_S)
            assert store.get(other).attempt == 0  # no more is drawn for a folder that is out
        (tmp_path / "results").unlink()
        ahead = RESULTS_OUT_S
        async with running(store, results, FakePainter(), clock=lambda: time.time() + ahead):
            await until_async(lambda: status_of(store, name) == status_of(store, other) == "succeeded")

    asyncio.run(scenario())


def test_leases_are_renewed_though_every_thread_of_the_callers_waits(store, results, job):
    released = threading.Event()

    async def scenario():
        blocking = Blocking()
        now = time.time()
        runner = Runner(store, results, FakePainter(hold), blocking, "server/frontend-0/1", clock=lambda: now)
        slow = [asyncio.ensure_future(blocking(released.wait, 120)) for _ in range(100)]  # readers of images, say
        task = asyncio.create_task(runner.run())
        name = accept(store, job())
        await until_async(lambda: status_of(store, name) == "processing")
        leased_until = store.get(name).lease_until
        now += LEASE_S / 2
        await until_async(lambda: store.get(name).lease_until > leased_until)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.stop()
        assert status_of(store, name) == "starting"
        released.set()
        await asyncio.gather(*slow)
        blocking.close()

    try:
        asyncio.run(scenario())
    finally:
        released.set()


def test_the_files_of_a_job_stay_when_nobody_knows_whether_it_has_succeeded(engine, results, job):
    class LosesTheAnswer(Store):
        """Its connection breaks after the COMMIT has taken effect, before the answer is back."""

        def finish(self, *args):
            super().finish(*args)
            raise OperationalError("COMMIT", {}, ConnectionResetError())

    store = LosesTheAnswer(engine)

    async def scenario():
        name = accept(store, job())
        async with running(store, results, FakePainter()) as runner:
            await until_async(lambda: status_of(store, name) == "succeeded")
            await until_async(lambda: not runner._flights)
        return name

    name = asyncio.run(scenario())
    assert results.read(name, store.get(name).output) is not None


VICTIM = """
import asyncio, pathlib, sys
from noria.jobs.blocking import Blocking
from noria.jobs.results import Results
from noria.jobs.runner import Runner
from noria.jobs.schema import database_url, open_database
from noria.jobs.store import Store

class Painter:
    def serves(self): return {("shapes", "v1")}
    def room(self): return 1
    async def draw(self, record, tell):
        results.save(record.id, record.attempt, [b"half"], "png")  # and is killed before it can tell
        print("drawing", flush=True)
        await asyncio.Event().wait()

folder = pathlib.Path(sys.argv[2])
results = Results("auto", folder)
store = Store(open_database(database_url(sys.argv[1], folder)))
asyncio.run(Runner(store, results, Painter(), Blocking(), "server/frontend-0/first").run())
"""


@pytest.mark.parametrize("heir", ["server/frontend-0/second", "other/frontend-0/first"])
def test_a_runner_that_is_killed_is_resumed_by_another_with_the_same_request(database, tmp_path, job, heir):
    store, results = Store(open_database(database_url(database, tmp_path))), Results("auto", tmp_path)
    name = accept(store, job())
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, database, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ, text=True
    )
    assert victim.stdout.readline() == "drawing\n"
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    assert status_of(store, name) == "processing"

    async def scenario():
        # Its own successor need not wait for the lease; anybody else does, here by a clock that is ahead.
        blocking = Blocking()
        ahead = 0.0 if heir.startswith("server/frontend-0/") else 60.0
        runner = Runner(store, results, FakePainter(), blocking, heir, clock=lambda: time.time() + ahead)
        task = asyncio.create_task(runner.run())
        await until_async(lambda: status_of(store, name) == "succeeded")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.stop()
        blocking.close()

    asyncio.run(scenario())
    record = store.get(name)
    assert (record.attempt, record.num_losses, record.output) == (2, 1, "2-0.png")
    assert results.read(name, "2-0.png") == b'drawn from {"seed": 7}'
    statuses = [json.loads(event.data)["status"] for event in store.events(name, 0) if event.type == "status"]
    assert statuses[-1] == "succeeded"
    assert sum(status in ENDED for status in statuses) == 1
    store.close()


def test_nothing_is_imported_that_a_front_end_may_not_have():
    code = "import sys, noria.jobs.service; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "starlette", "psycopg"} & set(loaded)
