"""Requests that engines hand over to others, through the front end."""

import asyncio
import gc

import msgspec
import pytest

from noria.errors import EngineLost, QueueFull
from noria.frontend.engines import pool as pool_module
from noria.frontend.engines import retries
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.results import ProgressUpdate
from noria.observe.metrics import declarations
from noria.protocol.messages import ImageState
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL, FakeEngine
from waiting import wait_until_async

STATE = ImageState(0, 7, 21, (7,), (), 5)


def of_two_images(request):
    payload = msgspec.structs.replace(request.payload, n=2)
    return msgspec.structs.replace(request, payload=payload)


def num_moved(outcome, reason="leave"):
    return declarations.IMAGES_MOVED.labels(FAKE_MODEL.name, outcome, reason)._value.get()


async def begin(pool, engine, request, on_update=None, data=None):
    """Submit a request that `engine` withholds."""
    engine.never_answers = True
    task = asyncio.create_task(pool.submitter.submit(request, on_update, data))
    await wait_until_async(lambda: engine.in_flight)
    return task


@pytest.fixture
def engines(new_engine):
    first, second = new_engine(), new_engine()
    first.states, first.states_data = (STATE,), b"state"
    return first, second


def test_another_engine_goes_on_with_the_requests_of_one_that_drains(request_of, engines):
    first, second = engines
    second.set_state("loading")
    moved_before = num_moved("moved")

    async def scenario():
        async with EnginePool([first.address, second.address]) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            updates = []
            task = await begin(pool, first, of_two_images(request_of(seed=3)), updates.append, b"start")
            first.set_state("draining")
            await wait_until_async(lambda: pool.engines[0].state == "draining")
            assert first.in_flight  # no other engine can take it
            assert not pool.ready
            second.set_state("ready")
            result = await task
            assert [image.seed for image in result.images] == [3, 4]
            assert not any(isinstance(each, ProgressUpdate) and each.finish_in_s is None for each in updates)
        (message,) = second.resumed
        assert (message.images, message.done, message.model_version) == ((STATE,), (), FAKE_MODEL.fingerprint)
        assert second.data == [b"statestart"]
        assert 0 < message.waited_s < 60
        assert message.request.timeout_s < first.submitted[0].timeout_s
        assert message.request.attempt_id != first.submitted[0].attempt_id

    asyncio.run(scenario())
    assert num_moved("moved") == moved_before + 1


def test_a_target_that_is_lost_costs_only_the_steps_since_the_move(request_of, engines, new_engine):
    first, second = engines
    third = new_engine("loading")
    second.never_answers, second.exit_cause = True, "killed"

    async def scenario():
        async with EnginePool([first.address, second.address, third.address]) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "ready", "loading"])
            first.never_answers = True
            task = asyncio.create_task(pool.submitter.submit(request_of()))
            await wait_until_async(lambda: first.in_flight or second.in_flight)
            source, target = (first, second) if first.in_flight else (second, first)
            source.states, source.states_data = (STATE,), b"state"
            source.set_state("draining")
            await wait_until_async(lambda: target.in_flight)
            third.set_state("ready")
            await wait_until_async(lambda: pool.engines[2].state == "ready")
            target.exit_cause = "killed"
            target.set_state("dead")
            target.set_state("loading")
            assert (await task).images
            assert [each.images for each in third.resumed] == [(STATE,)]

    asyncio.run(scenario())


def test_a_state_that_is_refused_begins_anew_and_is_counted(request_of, engines, captured_log_fields):
    first, second = engines
    second.set_state("loading")
    second.refuses_states = True
    refused_before = num_moved("refused")

    async def scenario():
        async with EnginePool([first.address, second.address]) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            task = await begin(pool, first, request_of())
            first.set_state("draining")
            second.set_state("ready")
            assert (await task).images
        assert [each.images for each in second.resumed] == [(STATE,), ()]

    with captured_log_fields("noria.frontend") as lines:
        asyncio.run(scenario())
    assert [line["event"] for line in lines()] == ["move_refused"]
    assert num_moved("refused") == refused_before + 1


@pytest.mark.parametrize(("data", "max_bytes"), [(b"four", 100), (b"state", 4)])
def test_states_that_are_incomplete_or_larger_than_the_limit_are_dropped_logged_and_counted(
    data, max_bytes, request_of, engines, monkeypatch, captured_log_fields
):
    monkeypatch.setattr(retries, "MAX_STATE_BYTES", max_bytes)
    first, second = engines
    second.set_state("loading")
    first.states_data = data
    dropped_before = num_moved("dropped")

    async def scenario():
        async with EnginePool([first.address, second.address]) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            task = await begin(pool, first, request_of())
            first.set_state("draining")
            second.set_state("ready")
            assert (await task).images
        assert [each.images for each in second.resumed] == [()]

    with captured_log_fields("noria.frontend") as lines:
        asyncio.run(scenario())
    assert [(line["event"], line["num_images"], line["key"]) for line in lines()] == [("state_dropped", 1, "alice")]
    assert num_moved("dropped") == dropped_before + 1


def test_the_states_of_all_requests_count_in_the_limit_until_they_end(request_of, engines, monkeypatch):
    monkeypatch.setattr(retries, "MAX_STATE_BYTES", 2 * STATE.num_bytes)
    first, second = engines
    second.set_state("loading")
    gc.disable()  # what has ended must not need it

    async def scenario():
        async with EnginePool([first.address, second.address]) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            tasks = [await begin(pool, first, request_of(seed=seed)) for seed in range(3)]
            await wait_until_async(lambda: len(first.in_flight) == 3)
            second.never_answers = True
            first.set_state("draining")
            second.set_state("ready")
            await wait_until_async(lambda: len(second.resumed) == 3)
            assert sorted(len(each.images) for each in second.resumed) == [0, 1, 1]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            second.set_state("loading")
            first.set_state("ready")
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            last = await begin(pool, first, request_of(seed=9))
            first.set_state("draining")
            second.never_answers = False
            second.set_state("ready")
            assert (await last).images
            assert second.resumed[-1].images

    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_a_request_that_has_moved_is_not_refused_because_the_target_is_full(request_of, engines, monkeypatch):
    monkeypatch.setattr(retries, "_FULL_RETRY_S", 0.01)
    first, second = engines
    second.set_state("loading")
    second.failure = {"code": "queue_full", "message": "the LoRA adapters of accepted requests fill the cache"}

    async def scenario():
        async with EnginePool([first.address, second.address]) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            task = await begin(pool, first, request_of())
            first.set_state("draining")
            second.set_state("ready")
            await wait_until_async(lambda: len(second.resumed) >= 2)
            with pytest.raises(QueueFull):
                await pool.submitter.submit(request_of(seed=2))  # a new one is
            second.failure = None
            assert (await task).images
        assert all(each.images == (STATE,) and each.request.was_moved for each in second.resumed)

    asyncio.run(scenario())


def test_a_request_that_was_handed_over_waits_for_an_engine_and_can_be_cancelled_then(request_of, engines):
    first, second = engines
    second.set_state("loading")

    async def scenario():
        async with EnginePool([first.address, second.address], restart_wait_s=0.1) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            tasks = [
                await begin(pool, first, request_of(seed=1)),
                asyncio.create_task(pool.submitter.submit(request_of(seed=2))),
            ]
            await wait_until_async(lambda: len(first.in_flight) == 2)
            second.never_answers = True
            second.set_state("ready")
            await wait_until_async(lambda: pool.engines[1].state == "ready")
            first.set_state("draining")
            await wait_until_async(lambda: len(second.in_flight) == 2)
            second.set_state("draining")
            await asyncio.sleep(0.2)
            assert len(second.in_flight) == 2  # it finishes them, if there is no other
            tasks[0].cancel()
            await wait_until_async(lambda: second.cancelled)
            second.set_state("dead")
            with pytest.raises(EngineLost, match=r"has ended or released 'tiny' .* ready after 0\.1 s\. Send the req"):
                await tasks[1]

    asyncio.run(scenario())


@pytest.mark.parametrize("rebalance", [True, False])
def test_the_newest_requests_leave_a_busy_engine_once_for_each_of_its_reports(
    request_of, folder, monkeypatch, rebalance
):
    monkeypatch.setattr(pool_module, "_UPKEEP_INTERVAL_S", 0.02)
    busy, idle = (msgspec.structs.replace(FAKE_LOAD, backlog_s=backlog_s) for backlog_s in (20.0, 0.0))
    waiting_before = num_moved("waiting", "backlog")

    async def scenario(first, second):
        async with EnginePool([first.address, second.address], rebalance=rebalance) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            tasks = [await begin(pool, first, request_of(seed=seed)) for seed in range(6)]
            promised = msgspec.structs.replace(request_of(seed=6), deadline_s=30.0)
            alone = msgspec.structs.replace(request_of(seed=7), exclusive=True)
            tasks += [asyncio.create_task(pool.submitter.submit(request)) for request in (promised, alone)]
            await wait_until_async(lambda: len(first.in_flight) == len(tasks))
            second.never_answers = True
            second.set_state("ready")
            await wait_until_async(lambda: pool.engines[1].state == "ready")
            if rebalance:
                await wait_until_async(lambda: len(second.resumed) == 2)
            await asyncio.sleep(0.2)  # more would have moved
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return [each.request.payload.seed for each in second.resumed]

    with (
        FakeEngine(f"ipc://{folder}/busy", load=busy) as first,
        FakeEngine(f"ipc://{folder}/idle", "loading", load=idle) as second,
    ):
        moved = asyncio.run(scenario(first, second))
    assert sorted(moved) == ([4, 5] if rebalance else [])
    assert num_moved("waiting", "backlog") == waiting_before + len(moved)
