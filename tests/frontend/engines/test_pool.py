"""Which engine takes a request, and what becomes of it when engines come and go."""

import asyncio
import time

import msgspec
import pytest

from noria.config import FrontendConfig
from noria.errors import DeadlineExceeded, EngineCrashed, EngineLost, EngineUnavailable, GenerationFailed
from noria.frontend.engines import pool
from noria.frontend.engines.pool import EnginePool
from noria.frontend.services.admission import validate
from noria.protocol.live_views import RatesView
from noria.protocol.messages import EngineView
from noria.protocol.request import ImageRequestBody
from noria.protocol.transport import Disconnected
from waiting import wait_until_async


@pytest.fixture
def request_of(spec):
    def make(seed=1, timeout_s=60.0):
        return validate(ImageRequestBody("p"), spec, FrontendConfig(request_timeout_s=timeout_s), "name", lambda: seed)

    return make


def test_no_engine_is_refused_at_once(request_of, folder):
    async def scenario():
        async with EnginePool([f"ipc://{folder}/nobody", f"ipc://{folder}/no-one"]) as link:
            assert not link.ready
            assert not link.models
            with pytest.raises(EngineUnavailable, match="engine 0 is unknown, engine 1 is unknown") as caught:
                await link.submit(request_of())
            assert caught.value.retry_after_s > 0

    asyncio.run(scenario())


def test_requests_go_to_the_engine_with_the_fewest(request_of, new_engine, spec):
    engines = [new_engine(), new_engine(), new_engine()]
    for engine in engines:
        engine.holds = True

    async def scenario():
        async with EnginePool([engine.address for engine in engines]) as link:
            await wait_until_async(lambda: all(view.state == "ready" for view in link.engines))
            assert link.models == {spec.name: spec}
            tasks = [asyncio.create_task(link.submit(request_of())) for _ in range(6)]
            await wait_until_async(lambda: sum(len(engine.submitted) for engine in engines) == 6)
            assert [len(engine.submitted) for engine in engines] == [2, 2, 2]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await wait_until_async(lambda: sum(len(engine.cancelled) for engine in engines) == 6)

    asyncio.run(scenario())


def test_another_engine_takes_over_a_dead_ones_requests(request_of, new_engine, monkeypatch):
    monkeypatch.setattr(pool, "_NEWS_WAIT_S", 0.2)
    first, second = new_engine(), new_engine()
    first.deaths, first.returns = 1, False
    second.holds = True

    async def scenario():
        async with EnginePool([first.address, second.address]) as link:
            await wait_until_async(lambda: all(view.state == "ready" for view in link.engines))
            task = asyncio.create_task(link.submit(request_of(seed=77)))
            await wait_until_async(lambda: second.submitted)
            assert second.submitted[0].seed == 77
            assert second.submitted[0].timeout_s < first.submitted[0].timeout_s
            assert second.submitted[0].alone  # nobody has told why the first engine ended
            second.holds = False
            assert (await link.submit(request_of(seed=5))).images[0].seed == 5
            assert link.ready
            task.cancel()

    asyncio.run(scenario())


def test_death_turns_ready_off_at_once_and_a_new_life_on_again(request_of, new_engine):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as link:
            lives = set()
            for _ in range(5):
                await wait_until_async(lambda: link.ready)
                lives.add(link.engines[0].incarnation)
                assert (await link.submit(request_of())).num_steps_run == 12
                engine.become("dead")
                await wait_until_async(lambda: not link.ready)
                engine.become("ready")
            assert len(lives) == 5

    asyncio.run(scenario())


def test_request_in_flight_is_drawn_by_the_engines_next_life(request_of, new_engine):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as link:
            for seed in range(5):
                await wait_until_async(lambda: link.ready)
                engine.deaths = 1
                assert (await link.submit(request_of(seed=seed))).images[0].seed == seed

    asyncio.run(scenario())


def test_request_that_kills_engines_takes_no_other_with_it(request_of, new_engine):
    engine = new_engine()
    engine.poison = 13

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            killer, *company = await asyncio.gather(
                *(link.submit(request_of(seed=seed)) for seed in (13, 1, 2, 3)), return_exceptions=True
            )
            assert isinstance(killer, EngineCrashed)
            assert [result.images[0].seed for result in company] == [1, 2, 3]
            assert [request.alone for request in engine.submitted if request.seed == 13] == [False, True]

    asyncio.run(scenario())


def test_who_was_not_aboard_of_a_crashed_engine_is_no_suspect(request_of, new_engine):
    engine = new_engine()
    engine.holds = True

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            calls = [asyncio.create_task(link.submit(request_of(seed=seed))) for seed in (1, 2)]
            await wait_until_async(lambda: len(engine.submitted) == 2)
            engine.aboard = [name for name, wish in zip(engine.aboard, engine.submitted, strict=True) if wish.seed == 1]
            engine.holds = False
            engine.become("dead")
            engine.become("ready")
            assert [(await call).images[0].seed for call in calls] == [1, 2]
            assert {wish.seed: wish.alone for wish in engine.submitted[2:]} == {1: True, 2: False}

    asyncio.run(scenario())


@pytest.mark.parametrize(("deaths", "alone"), [(1, False), (2, False), (3, True), (12, True)])
def test_who_loses_engines_to_somebodys_kills_flies_on_and_alone_only_after_three(
    deaths, alone, request_of, new_engine
):
    engine = new_engine()
    engine.ends, engine.deaths = "killed", deaths

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            assert (await link.submit(request_of(seed=5))).images[0].seed == 5
            assert len(engine.submitted) == deaths + 1
            assert engine.submitted[-1].alone == alone

    asyncio.run(scenario())


@pytest.mark.parametrize("deaths", [1, 2])
def test_who_comes_as_a_suspect_stays_alone_and_is_convicted_by_the_second_crash(deaths, request_of, new_engine):
    engine = new_engine()
    engine.deaths = deaths

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            call = link.submit(msgspec.structs.replace(request_of(seed=5), alone=True))
            if deaths == 1:
                assert (await call).images[0].seed == 5
            else:
                with pytest.raises(EngineCrashed):
                    await call
            assert [wish.alone for wish in engine.submitted] == [True, True]

    asyncio.run(scenario())


def test_thirteen_kills_are_enough(request_of, new_engine):
    engine = new_engine()
    engine.ends, engine.deaths = "killed", 13

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            with pytest.raises(EngineLost, match="was killed 13 times"):
                await link.submit(request_of())

    asyncio.run(scenario())


def test_new_requests_are_drawn_while_a_suspect_flies(request_of, new_engine):
    engine = new_engine()
    engine.holds = True

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            suspects = [asyncio.create_task(link.submit(request_of(seed=seed))) for seed in (1, 2)]
            await wait_until_async(lambda: len(engine.submitted) == 2)
            engine.become("dead")
            engine.become("ready")
            await wait_until_async(lambda: len(engine.submitted) == 3)
            engine.holds = False
            assert (await link.submit(request_of(seed=3))).images[0].seed == 3
            assert [wish.alone for wish in engine.submitted[2:]] == [True, False]
            for call in suspects:
                call.cancel()

    asyncio.run(scenario())


def test_a_watcher_is_told_that_its_request_waits_for_an_engine_again(request_of, new_engine):
    engine = new_engine()
    engine.deaths = 1

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            updates = []
            await link.submit(request_of(), updates.append)
            assert [update.finish_in_s for update in updates][-2:] == [None, 0.5]

    asyncio.run(scenario())


def test_retry_waiting_for_its_turn_keeps_its_deadline(request_of, new_engine, monkeypatch):
    engine = new_engine()
    engine.holds = True

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            patient = asyncio.create_task(link.submit(request_of(seed=1, timeout_s=2000.0)))
            hasty = asyncio.create_task(link.submit(request_of(seed=2, timeout_s=1000.0)))
            await wait_until_async(lambda: len(engine.submitted) == 2)
            engine.become("dead")
            engine.become("ready")
            await wait_until_async(lambda: len(engine.submitted) == 3)
            assert not hasty.done()
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 1500.0)
            with pytest.raises(DeadlineExceeded):
                await hasty
            assert [request.seed for request in engine.submitted] == [1, 2, 1]
            patient.cancel()

    asyncio.run(scenario())


def test_nonsense_fails_its_request_and_not_the_link(request_of, new_engine, caplog):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            engine.nonsense = True
            with pytest.raises(GenerationFailed, match="makes no sense"):
                await link.submit(request_of())
            assert "its engine's answer makes no sense" in caplog.text
            engine.nonsense = False
            assert link.ready
            assert (await link.submit(request_of(seed=4))).images[0].seed == 4

    asyncio.run(scenario())


def test_stop_fails_what_is_in_flight_and_what_comes(request_of, new_engine):
    engine = new_engine()
    engine.holds = True

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            task = asyncio.create_task(link.submit(request_of()))
            await wait_until_async(lambda: engine.submitted)
            link.stop()
            for call in (task, link.submit(request_of())):
                with pytest.raises(EngineUnavailable, match="is stopping") as caught:
                    await call
                assert caught.value.retry_after_s > 0
            await wait_until_async(lambda: engine.cancelled)
            assert len(engine.submitted) == 1

    asyncio.run(scenario())


def test_engine_that_never_answers_is_given_up(request_of, new_engine, monkeypatch):
    monkeypatch.setattr(pool, "_GRACE_S", 0.1)
    engine = new_engine()
    engine.holds = True

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            with pytest.raises(DeadlineExceeded, match=r"not done after 0\.1 s"):
                await link.submit(request_of(timeout_s=0.1))
            await wait_until_async(lambda: engine.cancelled)

    asyncio.run(scenario())


def test_pixels_arrive_as_they_were_sent(request_of, new_engine):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            (image,) = (await link.submit(request_of(seed=9))).images
            assert (image.width_px, image.height_px) == (64, 48)
            assert bytes(image.rgb) == bytes(engine.colour(9)) * (64 * 48)

    asyncio.run(scenario())


def test_callers_that_leave_leave_no_task_and_no_flight_behind(request_of, new_engine):
    engine = new_engine()
    engine.holds = True

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            before = len(asyncio.all_tasks())
            callers = [asyncio.create_task(link.submit(request_of(seed=k))) for k in range(300)]
            for number, caller in enumerate(callers):
                if number % 7 == 0:
                    await asyncio.sleep(0.001)
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            await wait_until_async(lambda: len(asyncio.all_tasks()) == before)
            assert not link._engines[0]._attempts
            assert not link._timers
            # The last words are still on their way to the engine.
            await wait_until_async(lambda: {r.request_id for r in engine.submitted} == set(engine.cancelled))

    asyncio.run(scenario())


def test_all_lives_of_a_front_end_greet_by_one_name_and_lone_ones_by_different_ones(new_engine):
    engine = new_engine()

    async def live(name=None):
        async with EnginePool([engine.address], name=name) as link:
            await wait_until_async(lambda: link.ready)

    for name in ("frontend-0", "frontend-0", None, None):
        asyncio.run(live(name))
    assert engine.greeted[:2] == ["frontend-0", "frontend-0"]
    assert len(set(engine.greeted)) == 3


def test_every_load_is_acknowledged(new_engine):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.load.num_slots == 4)  # as the engine tells after its state
            await wait_until_async(lambda: engine.num_heard == 1)

    asyncio.run(scenario())


def test_a_view_that_the_news_of_its_engines_death_has_overtaken_is_not_handed_on(new_engine):
    engine = new_engine()
    view = EngineView("life", 0.0, 1, 4, (), (), 0, 0.0, (), (), RatesView(60.0, 0, 0, 0, None, None, None, 0, 0, 0))

    async def scenario():
        async with EnginePool([engine.address]) as link:
            await wait_until_async(lambda: link.ready)
            heard = []
            link.on_view = lambda *told: heard.append(told)
            (peer,) = link._engines
            await link._handle_event(peer, (view, None))
            await link._handle_event(peer, Disconnected())
            await link._handle_event(peer, (view, None))
            assert heard == [(0, view, None)]

    asyncio.run(scenario())
