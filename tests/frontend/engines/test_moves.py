"""Requests that engines hand over to others, through the front end."""

import asyncio

import msgspec
import pytest

from noria.errors import EngineLost
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.results import ProgressUpdate
from noria.observe.metrics import declarations
from noria.protocol.messages import ImageState
from noria.testing.fake_engine import FAKE_MODEL
from waiting import wait_until_async

STATE = ImageState(0, 7, 21, (7,), (), 5)


def of_two_images(request):
    payload = msgspec.structs.replace(request.payload, n=2)
    return msgspec.structs.replace(request, payload=payload)


def num_moved(outcome):
    return declarations.IMAGES_MOVED.labels(FAKE_MODEL.name, outcome)._value.get()


async def begin(pool, engine, request, on_update=None, data=None):
    """Submit a request that `engine` withholds."""
    engine.never_answers = True
    task = asyncio.create_task(pool.submit(request, on_update, data))
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
            task = asyncio.create_task(pool.submit(request_of()))
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


def test_a_frame_that_is_not_as_long_as_its_states_is_dropped(request_of, engines):
    first, second = engines
    second.set_state("loading")
    first.states_data = b"four"

    async def scenario():
        async with EnginePool([first.address, second.address]) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            task = await begin(pool, first, request_of())
            first.set_state("draining")
            second.set_state("ready")
            assert (await task).images
        assert [each.images for each in second.resumed] == [()]

    asyncio.run(scenario())


def test_a_request_that_was_handed_over_waits_for_an_engine_and_can_be_cancelled_then(request_of, engines):
    first, second = engines
    second.set_state("loading")

    async def scenario():
        async with EnginePool([first.address, second.address], restart_wait_s=0.1) as pool:
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "loading"])
            tasks = [await begin(pool, first, request_of(seed=1)), asyncio.create_task(pool.submit(request_of(seed=2)))]
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
            with pytest.raises(EngineLost, match="none that holds its model was ready"):
                await tasks[1]

    asyncio.run(scenario())
