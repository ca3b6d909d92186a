"""Engines that a front end knows, and which of them gets a request."""

import asyncio
import gc

import msgspec
import pytest

from frontends import run_in_pool
from noria.errors import EngineUnavailable, GenerationFailed
from noria.frontend.engines.pool import EnginePool
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.live_views import RatesView
from noria.protocol.messages import EngineView
from noria.protocol.transport import Disconnected, EngineEndpoint
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from waiting import wait_until_async


def test_a_server_is_ready_when_an_engine_of_each_kind_is(new_engine, folder, spec):
    async def scenario():
        images = new_engine()
        defaults = {"diffusion": spec.name, "encoder": FAKE_ENCODER.name}
        addresses = [images.address, f"ipc://{folder}/texts-later"]
        async with EnginePool(addresses, default_models=defaults) as engine_pool:
            await wait_until_async(lambda: engine_pool.engines[0].state == "ready")
            assert not engine_pool.ready
            message = engine_pool.unavailable_error("texts").message
            assert message.startswith("no engine that holds texts is ready (engine 0 is ready, engine 1 is unknown);")
            with FakeEngine(addresses[1], models=(FAKE_ENCODER,)):
                await wait_until_async(lambda: engine_pool.ready)
            await wait_until_async(lambda: not engine_pool.ready)
            assert "engine 1 has ended and is restarting)" in engine_pool.unavailable_error("texts").message

    asyncio.run(scenario())


def test_a_request_goes_to_the_engine_with_the_fewest_images(request_of, new_engine, spec):
    engines = [new_engine(), new_engine(), new_engine()]
    for engine in engines:
        engine.never_answers = True

    async def scenario():
        async with EnginePool([engine.address for engine in engines]) as engine_pool:
            await wait_until_async(lambda: all(status.state == "ready" for status in engine_pool.engines))
            assert engine_pool.models == {spec.name: spec}
            tasks = [asyncio.create_task(engine_pool.submitter.submit(request_of())) for _ in range(6)]
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
            tasks = [asyncio.create_task(engine_pool.submitter.submit(request_of()))]
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


def test_an_invalid_reply_fails_its_request_and_not_the_connection(request_of, new_engine, caplog):
    engine = new_engine()

    async def scenario(engine_pool):
        engine.sends_invalid_replies = True
        with pytest.raises(GenerationFailed):
            await engine_pool.submitter.submit(request_of())
        assert "invalid reply from its engine" in caplog.text
        engine.sends_invalid_replies = False
        assert engine_pool.ready
        assert (await engine_pool.submitter.submit(request_of(seed=4))).images[0].seed == 4

    run_in_pool(engine, scenario)


def test_cancelled_calls_leave_no_task_and_no_attempt(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario(engine_pool):
        before = len(asyncio.all_tasks())
        callers = [asyncio.create_task(engine_pool.submitter.submit(request_of(seed=k))) for k in range(300)]
        for number, caller in enumerate(callers):
            if number % 7 == 0:
                await asyncio.sleep(0.001)
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await wait_until_async(lambda: len(asyncio.all_tasks()) == before)
        assert not engine_pool._engines[0]._attempts
        assert not engine_pool.submitter._timers
        # The last messages may still be on their way to the engine.
        await wait_until_async(lambda: {r.attempt_id for r in engine.submitted} == set(engine.cancelled))

    run_in_pool(engine, scenario)


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
                lambda: engine_pool.reports.num_slots(DiffusionModelSpec) == 4
            )  # which the engine sends after its state
            await wait_until_async(lambda: engine.num_load_acks == 1)

    asyncio.run(scenario())


def test_a_view_that_arrives_after_the_disconnect_is_ignored(new_engine):
    engine = new_engine()
    view = EngineView(
        "incarnation", 0.0, 1, 4, (), (), 0, 0.0, (), (), RatesView(60.0, 0, 0, 0, None, None, None, 0, 0, 0)
    )

    async def scenario(engine_pool):
        received = []
        engine_pool.on_view.append(lambda *arguments: received.append(arguments))
        (engine_client,) = engine_pool._engines
        engine_pool._handle_event(engine_client, (view, None))
        engine_pool._handle_event(engine_client, Disconnected())
        engine_pool._handle_event(engine_client, (view, None))
        assert received == [("engine-0", view, None)]

    run_in_pool(engine, scenario)


def test_the_default_model_stays_while_its_group_has_no_engine(new_engine, folder):
    other = msgspec.structs.replace(FAKE_MODEL, name="other")

    async def scenario(first, second):
        first, second = (
            EngineEndpoint(name, each.address, group=name) for name, each in (("first", first), ("second", second))
        )
        async with EnginePool([]) as pool:
            pool.set_engines([second, first], ["first", "second"])
            await wait_until_async(lambda: len(pool.models) == 2)
            assert pool.default_model(DiffusionModelSpec) == FAKE_MODEL
            pool.set_engines([second], ["first", "second"])
            await wait_until_async(lambda: pool.engine_names == ["second"])
            assert pool.default_model(DiffusionModelSpec) == FAKE_MODEL

    with FakeEngine(f"ipc://{folder}/other", models=(other,)) as engine:
        asyncio.run(scenario(new_engine(), engine))


def test_engines_join_and_leave_a_pool_that_serves(request_of, new_engine):
    """An engine that leaves finishes what it has, and the models of the last one stay known."""
    first, second = new_engine(), new_engine()
    old, new = EngineEndpoint("old", first.address), EngineEndpoint("new", second.address)

    async def scenario():
        async with EnginePool([]) as pool:
            with pytest.raises(EngineUnavailable):
                await pool.submitter.submit(request_of())
            pool.set_engines([old])
            await wait_until_async(lambda: pool.ready)
            first.never_answers = True
            late = asyncio.create_task(pool.submitter.submit(request_of(seed=1)))
            await wait_until_async(lambda: first.submitted)
            first.in_flight.clear()  # so that it hands nothing over
            pool.set_engines([new])
            await wait_until_async(lambda: pool.ready)
            assert (await pool.submitter.submit(request_of(seed=2))).images[0].seed == 2
            assert len(first.submitted) == len(second.submitted) == 1
            assert pool.engine_names == ["new", "old"]  # the old one has a request in flight
            late.cancel()
            await wait_until_async(lambda: pool.engine_names == ["new"])
            pool.set_engines([])
            await wait_until_async(lambda: pool.engine_names == [])
            assert not pool.ready
            assert list(pool.models) == [FAKE_MODEL.name]

    asyncio.run(scenario())
