"""Engines and a front end together, with real channels and fake devices: one of two engines leaves under load."""

import asyncio
import contextlib
import threading
import time
from collections import Counter

import pytest

from engine_client import Client
from noria.engine import engines as engine_module
from noria.engine.diffusion.request import preview_calls
from noria.engine.runtime import StepRuntime
from noria.frontend.engines import pool as pool_module
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.results import PreviewImage, ProgressUpdate
from noria.models.catalog import open_model
from noria.protocol.messages import Leave
from noria.protocol.transport import EngineEndpoint
from noria.scheduling.cluster import rebalancer
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import VirtualClock
from running_engine import RunningEngine
from waiting import wait_until, wait_until_async

stops = {}  # by the names of engines: ends the engine, as the supervisor's order does
STEP_S = 0.005
NUM_STEPS = 30


@contextlib.contextmanager
def running_engine(folder, spec, name, steps, goes_on=lambda: True, *, num_slots=16, step_s=lambda _num_images: STEP_S):
    """The address of an engine whose steps take `step_s`, by the number of images.

    It counts in `steps`, by request and call. It steps on when `goes_on` returns true.
    """
    engine = RunningEngine(folder, [spec], name=name, ends_channel=True)

    def step(plan):
        steps.update((each.image.attempt_id.partition(".")[0], each.call) for each in plan.steps)
        time.sleep(step_s(len(plan.steps)))
        wait_until(goes_on)
        return STEP_S

    engine.start(StepRuntime(FakeExecutor(VirtualClock(), step), StepScheduler(num_slots)))
    stops[name] = engine.stop
    try:
        yield engine.address
    finally:
        engine.close()


async def run_load(addresses, steps, num_users, num_requests, leave_after, has_left=lambda: None):
    """Let users send requests; the first engine leaves after so many steps. Returns when and how long each took.

    `has_left` is called when the front end knows.
    """
    seconds = []

    async def user(pool, number):
        for k in range(num_requests):
            request = make_image_request(f"r{number}-{k}", "noria-shapes", inference_steps=NUM_STEPS, seed=number)
            began = time.monotonic()
            result = await pool.submitter.submit(request)
            assert [image.seed for image in result.images] == [number]
            assert result.num_steps_run == NUM_STEPS
            seconds.append((began, time.monotonic() - began))

    async with EnginePool(addresses) as pool:
        await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "ready"])
        users = asyncio.gather(*(user(pool, number) for number in range(num_users)))
        await wait_until_async(lambda: steps.total() >= leave_after)
        client, left_at = Client(addresses[0]), time.monotonic()
        client.send(Leave())
        await wait_until_async(lambda: pool.engines[0].state == "draining")
        has_left()
        await users
        client.close()
    return left_at, seconds


def test_an_engine_that_leaves_under_load_loses_no_request_and_no_step_is_computed_twice(tmp_path, bundled_folder):
    spec, first, second, left = open_model(str(bundled_folder)), Counter(), Counter(), threading.Event()
    with (
        running_engine(tmp_path, spec, "e0", first, lambda: first.total() < 40 or left.is_set()) as leaving,
        running_engine(tmp_path, spec, "e1", second) as staying,
    ):
        asyncio.run(run_load([leaving, staying], first, 8, 2, leave_after=40, has_left=left.set))
    names = [f"r{number}-{k}" for number in range(8) for k in range(2)]
    assert first + second == Counter((name, call) for name in names for call in range(NUM_STEPS))
    assert {name for name, _ in first} & {name for name, _ in second}  # requests that were moved


def test_progress_and_previews_go_on_across_a_move(tmp_path, bundled_folder):
    spec, first, second, left = open_model(str(bundled_folder)), Counter(), Counter(), threading.Event()
    updates = []

    async def scenario(addresses):
        endpoints = [EngineEndpoint(name, address) for name, address in zip("ab", addresses, strict=True)]
        async with EnginePool([]) as pool:
            pool.set_engines(endpoints[:1])
            await wait_until_async(lambda: pool.ready)
            request = make_image_request(
                "r", "noria-shapes", inference_steps=NUM_STEPS, partial_images=5, stream_progress=True
            )
            task = asyncio.create_task(pool.submitter.submit(request, updates.append))
            await wait_until_async(lambda: first.total() >= 14)
            pool.set_engines(endpoints)
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "ready"])
            client = Client(addresses[0])
            client.send(Leave())
            await wait_until_async(lambda: any(each.state == "draining" for each in pool.engines))
            left.set()
            result = await task
            client.close()
        assert result.timings.denoise_s > 0
        assert result.mean_batch == 1.0

    with (
        running_engine(tmp_path, spec, "e0", first, lambda: first.total() < 14 or left.is_set()) as leaving,
        running_engine(tmp_path, spec, "e1", second) as staying,
    ):
        asyncio.run(scenario([leaving, staying]))
    assert 14 <= first.total() < NUM_STEPS == (first + second).total()
    steps = [each.step for each in updates if isinstance(each, ProgressUpdate)]
    assert steps == sorted(steps)
    assert first.total() in steps  # what the second engine says first
    assert [each.step for each in updates if isinstance(each, PreviewImage)] == sorted(preview_calls(NUM_STEPS, 5))


@pytest.mark.parametrize("num_slots", [2, 10])
def test_an_engine_that_starts_gets_requests_of_one_with_much_work(tmp_path, bundled_folder, monkeypatch, num_slots):
    """They wait with two slots, and run with ten."""
    monkeypatch.setattr(rebalancer, "_MIN_EXCESS_S", 0.1)
    monkeypatch.setattr(pool_module, "_UPKEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr(engine_module, "LOAD_INTERVAL_S", 0.05)
    spec, first, second = open_model(str(bundled_folder)), Counter(), Counter()
    requests = [
        make_image_request(f"r{number}", "noria-shapes", inference_steps=NUM_STEPS, seed=number) for number in range(10)
    ]

    async def scenario(addresses):
        endpoints = [EngineEndpoint(name, address) for name, address in zip("ab", addresses, strict=True)]
        async with EnginePool([]) as pool:
            pool.set_engines(endpoints[:1])
            await wait_until_async(lambda: pool.ready)
            results = [asyncio.create_task(pool.submitter.submit(request)) for request in requests]
            await wait_until_async(lambda: first.total() >= 10)
            pool.set_engines(endpoints)
            for number, result in enumerate(results):
                assert [image.seed for image in (await result).images] == [number]

    def step_s(num_images):  # batches are no quicker
        return 2 * STEP_S * num_images

    with (
        running_engine(tmp_path, spec, "e0", first, num_slots=num_slots, step_s=step_s) as busy,
        running_engine(tmp_path, spec, "e1", second, num_slots=num_slots, step_s=step_s) as idle,
    ):
        asyncio.run(scenario([busy, idle]))
    num_steps = len(requests) * NUM_STEPS
    assert max(first.total(), second.total()) < 0.8 * num_steps  # so it takes as much less than on the first alone
    assert first + second == Counter((each.request_id, call) for each in requests for call in range(NUM_STEPS))
    at_first, at_second = ({name for name, _ in steps} for steps in (first, second))
    assert at_second - at_first if num_slots == 2 else at_second & at_first
    for name in at_first & at_second:  # it has moved once
        assert max(call for each, call in first if each == name) < min(call for each, call in second if each == name)


def test_an_engine_that_ends_waits_until_a_busy_front_end_has_read_what_it_hands_over(tmp_path, bundled_folder):
    spec, first, second = open_model(str(bundled_folder)), Counter(), Counter()
    requests = [make_image_request(f"r{number}", "noria-shapes", inference_steps=NUM_STEPS) for number in range(8)]

    async def scenario(addresses):
        endpoints = [EngineEndpoint(name, address) for name, address in zip("ab", addresses, strict=True)]
        async with EnginePool([]) as pool:
            pool.set_engines(endpoints[:1])
            await wait_until_async(lambda: pool.ready)
            results = [asyncio.create_task(pool.submitter.submit(request)) for request in requests]
            await wait_until_async(lambda: first.total() >= 40)
            pool.set_engines(endpoints)
            await wait_until_async(lambda: [each.state for each in pool.engines] == ["ready", "ready"])
            stops["e0"]()
            time.sleep(0.5)  # noqa: ASYNC251 - the front end reads nothing
            await asyncio.gather(*results)

    with (
        running_engine(tmp_path, spec, "e0", first) as leaving,
        running_engine(tmp_path, spec, "e1", second) as staying,
    ):
        asyncio.run(scenario([leaving, staying]))
    assert first + second == Counter((each.request_id, call) for each in requests for call in range(NUM_STEPS))
    assert second
