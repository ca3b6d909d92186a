"""Retries of a request when its engine ends, restarts or never answers."""

import asyncio
import logging
import time

import msgspec
import pytest

from frontends import run_in_pool
from noria.errors import DeadlineExceeded, EngineCrashed, EngineUnavailable
from noria.frontend.engines import retries
from noria.frontend.engines.pool import EnginePool
from noria.protocol.transport import EngineEndpoint
from waiting import wait_until_async


def test_requests_of_a_lost_engine_are_retried_on_another(request_of, new_engine, monkeypatch):
    monkeypatch.setattr(retries, "_EXIT_REPORT_TIMEOUT_S", 0.2)
    first, second = new_engine(), new_engine()
    first.num_crashes_left, first.restarts = 1, False
    second.never_answers = True

    async def scenario():
        async with EnginePool([first.address, second.address]) as engine_pool:
            await wait_until_async(lambda: all(status.state == "ready" for status in engine_pool.engines))
            task = asyncio.create_task(engine_pool.submitter.submit(request_of(seed=77), data=b"a start image"))
            await wait_until_async(lambda: second.submitted)
            assert first.data == second.data == [b"a start image"]
            assert second.submitted[0].payload.seed == 77
            assert second.submitted[0].timeout_s < first.submitted[0].timeout_s
            assert second.submitted[0].exclusive  # there is no report of how the first engine ended
            second.never_answers = False
            assert (await engine_pool.submitter.submit(request_of(seed=5))).images[0].seed == 5
            assert engine_pool.ready
            task.cancel()

    asyncio.run(scenario())


def test_a_lost_request_is_retried_after_the_engines_restart(request_of, new_engine, captured_log_fields):
    engine = new_engine()

    async def scenario():
        async with EnginePool([engine.address]) as engine_pool:
            for seed in range(5):
                await wait_until_async(lambda: engine_pool.ready)
                engine.num_crashes_left = 1
                assert (await engine_pool.submitter.submit(request_of(seed=seed))).images[0].seed == seed

    with captured_log_fields("noria.frontend", logging.WARNING) as lines:
        asyncio.run(scenario())
    assert [(line["event"], line["request_id"], line["key"]) for line in lines()] == [
        ("engine_lost", "name", "alice")
    ] * 5


def test_a_new_request_waits_a_moment_for_an_engine_that_restarts(request_of, new_engine, monkeypatch):
    engine = new_engine()

    async def scenario(engine_pool):
        engine.set_state("dead")
        await wait_until_async(lambda: not engine_pool.ready)
        waiting = asyncio.create_task(engine_pool.submitter.submit(request_of(seed=3)))
        await asyncio.sleep(0.2)
        assert not waiting.done() and not engine.submitted
        engine.set_state("ready")
        assert (await waiting).images[0].seed == 3
        engine.set_state("dead")
        await wait_until_async(lambda: not engine_pool.ready)
        monkeypatch.setattr(retries, "RETRY_AFTER_S", 0.1)
        with pytest.raises(EngineUnavailable, match="engine 0 has ended and is restarting"):
            await engine_pool.submitter.submit(request_of(seed=4))
        engine.set_state("ready")

    run_in_pool(engine, scenario)


def test_few_new_requests_wait_for_an_engine_that_restarts(request_of, new_engine, monkeypatch):
    engine = new_engine()
    monkeypatch.setattr(retries, "_MAX_WAITING", 3)
    monkeypatch.setattr(retries, "_MAX_WAITING_BYTES", 100_000)

    async def scenario(engine_pool):
        engine.set_state("dead")
        await wait_until_async(lambda: not engine_pool.ready)

        async def is_rejected(data=None):
            await asyncio.sleep(0.1)
            try:
                async with asyncio.timeout(0.2):
                    await engine_pool.submitter.submit(request_of(seed=9), data=data)
            except TimeoutError:
                return False
            except EngineUnavailable as error:
                return error.retry_after_s == 5.0

        assert await is_rejected(bytes(100_000))
        waiting = [asyncio.create_task(engine_pool.submitter.submit(request_of(seed=0), data=bytes(80_000)))]
        assert await is_rejected(bytes(20_000))
        assert not await is_rejected()
        waiting += [asyncio.create_task(engine_pool.submitter.submit(request_of(seed=seed))) for seed in (1, 2)]
        assert await is_rejected()
        waiting.pop().cancel()
        assert not await is_rejected()
        engine.set_state("ready")
        assert [(await each).images[0].seed for each in waiting] == [0, 1]

    run_in_pool(engine, scenario)


def test_a_new_request_does_not_wait_for_an_engine_that_drains(request_of, new_engine):
    engine = new_engine()

    async def scenario(engine_pool):
        engine.set_state("draining")
        await wait_until_async(lambda: not engine_pool.ready)
        with pytest.raises(EngineUnavailable, match="engine 0 is draining"):
            await engine_pool.submitter.submit(request_of(seed=4))
        assert engine.submitted == []

    run_in_pool(engine, scenario)


def test_a_request_that_crashes_engines_fails_no_other(request_of, new_engine):
    engine = new_engine()
    engine.crash_seed = 13

    async def scenario(engine_pool):
        crashing, *others = await asyncio.gather(
            *(engine_pool.submitter.submit(request_of(seed=seed)) for seed in (13, 1, 2, 3)), return_exceptions=True
        )
        assert isinstance(crashing, EngineCrashed)
        assert [result.images[0].seed for result in others] == [1, 2, 3]
        assert [request.exclusive for request in engine.submitted if request.payload.seed == 13] == [False, True]

    run_in_pool(engine, scenario)


def test_a_request_that_was_not_in_flight_at_a_crash_is_not_suspected(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario(engine_pool):
        calls = [asyncio.create_task(engine_pool.submitter.submit(request_of(seed=seed))) for seed in (1, 2)]
        await wait_until_async(lambda: len(engine.submitted) == 2)
        engine.in_flight = [
            name for name, request in zip(engine.in_flight, engine.submitted, strict=True) if request.payload.seed == 1
        ]
        engine.never_answers = False
        engine.set_state("dead")
        engine.set_state("ready")
        assert [(await call).images[0].seed for call in calls] == [1, 2]
        assert {request.payload.seed: request.exclusive for request in engine.submitted[2:]} == {1: True, 2: False}

    run_in_pool(engine, scenario)


@pytest.mark.parametrize(("num_kills", "exclusive"), [(2, False), (3, True)])
def test_a_request_whose_engine_is_killed_is_retried_and_exclusive_after_three_kills(
    num_kills, exclusive, request_of, new_engine
):
    engine = new_engine()
    engine.exit_cause, engine.num_crashes_left = "killed", num_kills

    async def scenario(engine_pool):
        assert (await engine_pool.submitter.submit(request_of(seed=5))).images[0].seed == 5
        assert len(engine.submitted) == num_kills + 1
        assert engine.submitted[-1].exclusive == exclusive

    run_in_pool(engine, scenario)


@pytest.mark.parametrize("num_crashes", [1, 2])
def test_a_request_submitted_as_exclusive_stays_so_and_fails_at_the_second_crash(num_crashes, request_of, new_engine):
    engine = new_engine()
    engine.num_crashes_left = num_crashes

    async def scenario(engine_pool):
        call = engine_pool.submitter.submit(msgspec.structs.replace(request_of(seed=5), exclusive=True))
        if num_crashes == 1:
            assert (await call).images[0].seed == 5
        else:
            with pytest.raises(EngineCrashed):
                await call
        assert [request.exclusive for request in engine.submitted] == [True, True]

    run_in_pool(engine, scenario)


def test_new_requests_are_served_during_an_exclusive_retry(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario(engine_pool):
        exclusive_calls = [asyncio.create_task(engine_pool.submitter.submit(request_of(seed=seed))) for seed in (1, 2)]
        await wait_until_async(lambda: len(engine.submitted) == 2)
        engine.set_state("dead")
        engine.set_state("ready")
        await wait_until_async(lambda: len(engine.submitted) == 3)
        engine.never_answers = False
        assert (await engine_pool.submitter.submit(request_of(seed=3))).images[0].seed == 3
        assert [request.exclusive for request in engine.submitted[2:]] == [True, False]
        for call in exclusive_calls:
            call.cancel()

    run_in_pool(engine, scenario)


def test_an_exclusive_retry_that_waits_keeps_its_timeout(request_of, new_engine, monkeypatch):
    engine = new_engine()
    engine.never_answers = True

    async def scenario(engine_pool):
        first = asyncio.create_task(engine_pool.submitter.submit(request_of(seed=1, timeout_s=2000.0)))
        second = asyncio.create_task(engine_pool.submitter.submit(request_of(seed=2, timeout_s=1000.0)))
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

    run_in_pool(engine, scenario)


def test_stop_fails_requests_in_flight_and_new_ones(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario(engine_pool):
        task = asyncio.create_task(engine_pool.submitter.submit(request_of()))
        await wait_until_async(lambda: engine.submitted)
        engine_pool.submitter.stop()
        for call in (task, engine_pool.submitter.submit(request_of())):
            with pytest.raises(EngineUnavailable, match="stopping") as caught:
                await call
            assert caught.value.retry_after_s > 0
        await wait_until_async(lambda: engine.cancelled)
        assert len(engine.submitted) == 1

    run_in_pool(engine, scenario)


def test_a_request_to_an_engine_that_never_answers_fails_after_its_deadline(request_of, new_engine):
    engine = new_engine()
    engine.never_answers = True

    async def scenario(engine_pool):
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
            await engine_pool.submitter.submit(msgspec.structs.replace(request_of(), deadline_s=0.1))
        await wait_until_async(lambda: engine.cancelled)

    run_in_pool(engine, scenario)


def test_lost_machines_do_not_convict_a_request(request_of, new_engine, monkeypatch, captured_log_fields):
    """They report nothing. Neither does an engine elsewhere that is silent for longer than a restart takes."""
    monkeypatch.setattr(retries, "_EXIT_REPORT_TIMEOUT_S", 0.05)
    engines = [new_engine() for _ in range(5)]
    endpoints = [EngineEndpoint(f"e{number}", each.address) for number, each in enumerate(engines)]
    for engine in engines[:4]:
        engine.num_crashes_left, engine.restarts = 1, False

    async def scenario():
        async with EnginePool([]) as pool:
            monkeypatch.setattr(EngineEndpoint, "is_remote", True)
            pool.set_engines(endpoints[:1])
            await wait_until_async(lambda: pool.ready)
            task = asyncio.create_task(pool.submitter.submit(request_of(seed=9)))
            for number in range(1, 5):
                await wait_until_async(lambda number=number: engines[number - 1].submitted)
                gone = endpoints[:number] if number == 3 else []  # the scheduler has not noticed yet
                pool.set_engines([*gone, endpoints[number]])
            assert (await task).images[0].seed == 9
            assert [engine.submitted[0].exclusive for engine in engines] == [False, False, False, True, True]

    with captured_log_fields("noria.frontend", logging.WARNING) as lines:
        asyncio.run(scenario())
    assert {line["loss_cause"] for line in lines()} == {"not_at_fault"}
