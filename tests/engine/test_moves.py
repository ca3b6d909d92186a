"""Engines and a front end together, with real channels and fake devices: one of two engines leaves under load."""

import asyncio
import contextlib
import threading
import time
from collections import Counter

from ending_receiver import EndingReceiver
from engine_client import Client
from noria.engine.diffusion.request import preview_calls
from noria.engine.engine import Engine
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.monitoring.watchdog import HangWatchdog
from noria.engine.runtime import Runtime
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.results import PreviewImage, ProgressUpdate
from noria.models.catalog import open_model
from noria.protocol.messages import Leave
from noria.protocol.transport import EngineChannel, EngineEndpoint
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import VirtualClock
from waiting import TIMEOUT_S, wait_until, wait_until_async

STEP_S = 0.005
NUM_STEPS = 30


@contextlib.contextmanager
def running_engine(folder, spec, name, steps, goes_on=lambda: True):
    """The address of an engine that takes `STEP_S` a step and counts in `steps`, by request and call.

    It steps on when `goes_on` returns true.
    """
    address = f"ipc://{folder}/{name}"
    channel = EngineChannel(address)
    watchdog, journal = HangWatchdog(60.0, time.monotonic), CrashJournal(folder / f"{name}-in-flight")
    receiver = EndingReceiver(channel, [spec], "auto", watchdog=watchdog, crash_journal=journal)
    receiver.start()

    def step(plan):
        steps.update((each.image.attempt_id.partition(".")[0], each.call) for each in plan.steps)
        time.sleep(STEP_S)
        wait_until(goes_on)
        return STEP_S

    runtime = Runtime(FakeExecutor(VirtualClock(), step), StepScheduler(16))
    engine = Engine(name, channel, receiver, runtime)
    thread = threading.Thread(target=engine.run)
    receiver.set_ready(runtime)
    thread.start()
    try:
        yield address
    finally:
        engine.stop()
        thread.join(TIMEOUT_S)
        receiver.stop()
        channel.close()


async def run_load(addresses, steps, num_users, num_requests, leave_after, has_left=lambda: None):
    """Let users send requests; the first engine leaves after so many steps. Returns when and how long each took.

    `has_left` is called when the front end knows.
    """
    seconds = []

    async def user(pool, number):
        for k in range(num_requests):
            request = make_image_request(f"r{number}-{k}", "noria-shapes", inference_steps=NUM_STEPS, seed=number)
            began = time.monotonic()
            result = await pool.submit(request)
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
            task = asyncio.create_task(pool.submit(request, updates.append))
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
