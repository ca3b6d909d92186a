"""Which engine gets a request, and what happens to it when engines end and restart."""

import asyncio
import gc
import logging
import time

import msgspec
import pytest

from noria.config import FrontendConfig
from noria.errors import DeadlineExceeded, EngineCrashed, EngineLost, EngineUnavailable, GenerationFailed
from noria.frontend.engines import pool
from noria.frontend.engines.pool import EnginePool
from noria.frontend.services.request_validation import validate
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.live_views import RatesView
from noria.protocol.messages import EngineView
from noria.protocol.request import ImageRequestBody
from noria.protocol.transport import Disconnected
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until_async


@pytest.fixture
def request_of(spec):
    def make(seed=1, timeout_s=60.0):
        config = FrontendConfig(request_timeout_s=timeout_s)
        return validate(ImageRequestBody("p"), spec, config, "name", lambda: seed, "alice")

    return make


def test_a_request_is_rejected_at_once_if_no_engine_is_ready(request_of, folder):
    async def scenario():
        async with EnginePool([f"ipc://{folder}/missing-0", f"ipc://{folder}/missing-1"]) as engine_pool:
            assert not engine_pool.ready
            assert not engine_pool.models
            with pytest.raises(EngineUnavailable, match="engine 0 is unknown, engine 1 is unknown") as caught:
                await engine_pool.submit(request_of())
            assert caught.value.retry_after_s > 0

    asyncio.run(scenario())


def test_a_server_is_ready_when_an_engine_of_each_kind_is(new_engine, folder, spec):
    async def scenario():
        images = new_engine()
        defaults = {"diffusion": spec.name, "encoder": FAKE_ENCODER.name}
        addresses = [images.address, f"ipc://{folder}/texts-later"]
        async with EnginePool(addresses, default_models=defaults) as engine_pool:
            await wait_until_async(lambda: engine_pool.engines[0].state == "ready")
            assert not engine_pool.ready
            with FakeEngine(addresses[1], models=(FAKE_ENCODER,)):
                await wait_until_async(lambda: engine_pool.ready)

    asyncio.run(scenario())


def test_a_request_goes_to_the_engine_with_the_fewest_images(request_of, new_engine, spec):
    engines = [new_engine(), new_engine(), new_engine()]
    for engine in engines:
        engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address for engine in engines]) as engine_pool:
            await wait_until_async(lambda: all(status.state == "ready" for status in engine_pool.engines))
            assert engine_pool.models == {spec.name: spec}
            tasks = [asyncio.create_task(engine_pool.submit(request_of())) for _ in range(6)]
            await wait_until_async(lambda: sum(len(engine.submitted) for engine in engines) == 6)
            assert [len(engine.submitted) for engine in engines] == [2, 2, 2]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await wait_until_async(lambda: sum(len(engine.cancelled) for engine in engines) == 6)

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_twice_leaves_no_exception_that_nobody_awaits(request_of, new_engine):
    engine, unhandled = new_engine(), []
    engine.never_answers = True

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context["message"]))
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            tasks = [asyncio.create_task(engine_pool.submit(request_of()))]
            await wait_until_async(lambda: engine.submitted)
            (attempt,) = engine_pool._engines[0]._attempts.values()
            attempt.outcome.add_done_callback(lambda _: tasks[0].cancel())  # at the engine's reply to the first one
            del attempt
            tasks[0].cancel()
            await asyncio.wait(tasks)
            tasks.clear()
        gc.collect()

    asyncio.run(scenario())
    assert unhandled == []


def test_requests_of_a_lost_engine_are_retried_on_another(request_of, new_engine, monkeypatch):
    monkeypatch.setattr(pool, "_EXIT_REPORT_TIMEOUT_S", 0.2)
    first, second = new_engine(), new_engine()
    first.num_crashes_left, first.restarts = 1, False
    second.never_answers = True

    async def scenario():
        async with EnginePool([first.address, second.address]) as engine_pool:
            await wait_until_async(lambda: all(status.state == "ready" for status in engine_pool.engines))
            task = asyncio.create_task(engine_pool.submit(request_of(seed=77)))
            await wait_until_async(lambda: second.submitted)
            assert second.submitted[0].payload.seed == 77
            assert second.submitted[0].timeout_s < first.submitted[0].timeout_s
            assert second.submitted[0].exclusive  # there is no report of how the first engine ended
            second.never_answers = False
            assert (await engine_pool.submit(request_of(seed=5))).images[0].seed == 5
            assert engine_pool.ready
            task.cancel()

    asyncio.run(scenario())


def test_an_engine_is_unready_once_it_ends_and_ready_after_its_restart(request_of, new_engine):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            incarnations = set()
            for _ in range(5):
                await wait_until_async(lambda: engine_pool.ready)
                incarnations.add(engine_pool.engines[0].incarnation)
                assert (await engine_pool.submit(request_of())).num_steps_run == 12
                engine.set_state("dead")
                await wait_until_async(lambda: not engine_pool.ready)
                engine.set_state("ready")
            assert len(incarnations) == 5

    asyncio.run(scenario())


def test_a_lost_request_is_retried_after_the_engines_restart(request_of, new_engine, captured_log_fields):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            for seed in range(5):
                await wait_until_async(lambda: engine_pool.ready)
                engine.num_crashes_left = 1
                assert (await engine_pool.submit(request_of(seed=seed))).images[0].seed == seed

    with captured_log_fields("noria.frontend", logging.WARNING) as lines:
        asyncio.run(scenario())
    assert [(line["event"], line["request_id"], line["key"]) for line in lines()] == [
        ("engine_lost", "name", "alice")
    ] * 5


def test_a_request_that_crashes_engines_fails_no_other(request_of, new_engine):
    engine = new_engine()
    engine.crash_seed = 13

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            crashing, *others = await asyncio.gather(
                *(engine_pool.submit(request_of(seed=seed)) for seed in (13, 1, 2, 3)), return_exceptions=True
            )
            assert isinstance(crashing, EngineCrashed)
            assert [result.images[0].seed for result in others] == [1, 2, 3]
            assert [request.exclusive for request in engine.submitted if request.payload.seed == 13] == [False, True]

    asyncio.run(scenario())


def test_a_request_that_was_not_in_flight_at_a_crash_is_not_suspected(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            calls = [asyncio.create_task(engine_pool.submit(request_of(seed=seed))) for seed in (1, 2)]
            await wait_until_async(lambda: len(engine.submitted) == 2)
            engine.in_flight = [
                name
                for name, request in zip(engine.in_flight, engine.submitted, strict=True)
                if request.payload.seed == 1
            ]
            engine.never_answers = False
            engine.set_state("dead")
            engine.set_state("ready")
            assert [(await call).images[0].seed for call in calls] == [1, 2]
            assert {request.payload.seed: request.exclusive for request in engine.submitted[2:]} == {1: True, 2: False}

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_kills", "exclusive"), [(1, False), (2, False), (3, True), (12, True)])
def test_a_request_whose_engine_is_killed_is_retried_and_exclusive_after_three_kills(
    num_kills, exclusive, request_of, new_engine
):
    engine = new_engine()
    engine.exit_cause, engine.num_crashes_left = "killed", num_kills

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            assert (await engine_pool.submit(request_of(seed=5))).images[0].seed == 5
            assert len(engine.submitted) == num_kills + 1
            assert engine.submitted[-1].exclusive == exclusive

    asyncio.run(scenario())


@pytest.mark.parametrize("num_crashes", [1, 2])
def test_a_request_submitted_as_exclusive_stays_so_and_fails_at_the_second_crash(num_crashes, request_of, new_engine):
    engine = new_engine()
    engine.num_crashes_left = num_crashes

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            call = engine_pool.submit(msgspec.structs.replace(request_of(seed=5), exclusive=True))
            if num_crashes == 1:
                assert (await call).images[0].seed == 5
            else:
                with pytest.raises(EngineCrashed):
                    await call
            assert [request.exclusive for request in engine.submitted] == [True, True]

    asyncio.run(scenario())


def test_a_request_fails_after_thirteen_kills(request_of, new_engine):
    engine = new_engine()
    engine.exit_cause, engine.num_crashes_left = "killed", 13

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            with pytest.raises(EngineLost, match="was killed 13 times"):
                await engine_pool.submit(request_of())

    asyncio.run(scenario())


def test_new_requests_are_served_during_an_exclusive_retry(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            exclusive_calls = [asyncio.create_task(engine_pool.submit(request_of(seed=seed))) for seed in (1, 2)]
            await wait_until_async(lambda: len(engine.submitted) == 2)
            engine.set_state("dead")
            engine.set_state("ready")
            await wait_until_async(lambda: len(engine.submitted) == 3)
            engine.never_answers = False
            assert (await engine_pool.submit(request_of(seed=3))).images[0].seed == 3
            assert [request.exclusive for request in engine.submitted[2:]] == [True, False]
            for call in exclusive_calls:
                call.cancel()

    asyncio.run(scenario())


def test_an_update_reports_that_a_request_waits_for_an_engine_again(request_of, new_engine):
    engine = new_engine()
    engine.num_crashes_left = 1

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            updates = []
            await engine_pool.submit(request_of(), updates.append)
            assert [update.finish_in_s for update in updates][-2:] == [None, 0.5]

    asyncio.run(scenario())


def test_an_exclusive_retry_that_waits_keeps_its_timeout(request_of, new_engine, monkeypatch):
    engine = new_engine()
    engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            first = asyncio.create_task(engine_pool.submit(request_of(seed=1, timeout_s=2000.0)))
            second = asyncio.create_task(engine_pool.submit(request_of(seed=2, timeout_s=1000.0)))
            await wait_until_async(lambda: len(engine.submitted) == 2)
            engine.set_state("dead")
            engine.set_state("ready")
            await wait_until_async(lambda: len(engine.submitted) == 3)
            assert not second.done()
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 1500.0)
            with pytest.raises(DeadlineExceeded):
                await second
            assert [request.payload.seed for request in engine.submitted] == [1, 2, 1]
            first.cancel()

    asyncio.run(scenario())


def test_an_invalid_reply_fails_its_request_and_not_the_connection(request_of, new_engine, caplog):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            engine.sends_invalid_replies = True
            with pytest.raises(GenerationFailed, match="the engine's reply is invalid"):
                await engine_pool.submit(request_of())
            assert "invalid reply from its engine" in caplog.text
            engine.sends_invalid_replies = False
            assert engine_pool.ready
            assert (await engine_pool.submit(request_of(seed=4))).images[0].seed == 4

    asyncio.run(scenario())


def test_stop_fails_requests_in_flight_and_new_ones(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            task = asyncio.create_task(engine_pool.submit(request_of()))
            await wait_until_async(lambda: engine.submitted)
            engine_pool.stop()
            for call in (task, engine_pool.submit(request_of())):
                with pytest.raises(EngineUnavailable, match="is stopping") as caught:
                    await call
                assert caught.value.retry_after_s > 0
            await wait_until_async(lambda: engine.cancelled)
            assert len(engine.submitted) == 1

    asyncio.run(scenario())


def test_a_request_to_an_engine_that_never_answers_times_out(request_of, new_engine, monkeypatch):
    monkeypatch.setattr(pool, "_GRACE_S", 0.1)
    engine = new_engine()
    engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            with pytest.raises(DeadlineExceeded, match=r"not done after 0\.1 s"):
                await engine_pool.submit(request_of(timeout_s=0.1))
            await wait_until_async(lambda: engine.cancelled)

    asyncio.run(scenario())


def test_pixels_arrive_unchanged(request_of, new_engine):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            (image,) = (await engine_pool.submit(request_of(seed=9))).images
            assert (image.width_px, image.height_px) == (64, 48)
            assert bytes(image.rgb) == bytes(engine.colour(9)) * (64 * 48)

    asyncio.run(scenario())


def test_cancelled_calls_leave_no_task_and_no_attempt(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            before = len(asyncio.all_tasks())
            callers = [asyncio.create_task(engine_pool.submit(request_of(seed=k))) for k in range(300)]
            for number, caller in enumerate(callers):
                if number % 7 == 0:
                    await asyncio.sleep(0.001)
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            await wait_until_async(lambda: len(asyncio.all_tasks()) == before)
            assert not engine_pool._engines[0]._attempts
            assert not engine_pool._timers
            # The last messages may still be on their way to the engine.
            await wait_until_async(lambda: {r.attempt_id for r in engine.submitted} == set(engine.cancelled))

    asyncio.run(scenario())


def test_a_named_front_end_reconnects_under_its_name_and_an_unnamed_one_under_a_new_name(new_engine):
    engine = new_engine()

    async def connect(name=None):
        async with EnginePool([engine.address], name=name) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)

    for name in ("frontend-0", "frontend-0", None, None):
        asyncio.run(connect(name))
    assert engine.hello_names[:2] == ["frontend-0", "frontend-0"]
    assert len(set(engine.hello_names)) == 3


def test_every_load_is_acknowledged(new_engine):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(
                lambda: engine_pool.num_slots(DiffusionModelSpec) == 4
            )  # which the engine sends after its state
            await wait_until_async(lambda: engine.num_load_acks == 1)

    asyncio.run(scenario())


def test_a_view_that_arrives_after_the_disconnect_is_ignored(new_engine):
    engine = new_engine()
    view = EngineView(
        "incarnation", 0.0, 1, 4, (), (), 0, 0.0, (), (), RatesView(60.0, 0, 0, 0, None, None, None, 0, 0, 0)
    )

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            await wait_until_async(lambda: engine_pool.ready)
            received = []
            engine_pool.on_view = lambda *arguments: received.append(arguments)
            (engine_client,) = engine_pool._engines
            await engine_pool._handle_event(engine_client, (view, None))
            await engine_pool._handle_event(engine_client, Disconnected())
            await engine_pool._handle_event(engine_client, (view, None))
            assert received == [(0, view, None)]

    asyncio.run(scenario())
