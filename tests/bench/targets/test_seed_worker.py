"""The seed's microbatching worker against a device that the test holds."""

import asyncio
import threading
import time

import pytest

from noria.bench.targets.drawing import T2IBody, group_of
from noria.bench.targets.seed_worker import Worker
from noria.bench.targets.turns import Turns
from noria.frontend.engine_link import DrawnImage
from noria.models.catalog import open_model

SPEC = open_model("bundled")
PATIENCE_S = 120


class HeldDevice:
    """Draws black images, a batch for each permit, and remembers who was drawn together."""

    def __init__(self, permits=1000):
        self.permits = threading.Semaphore(permits)
        self.began = threading.Event()
        self.batches = []

    def draw(self, group, bodies):
        self.began.set()
        assert self.permits.acquire(timeout=PATIENCE_S)
        self.batches.append([body.prompt for body in bodies])
        if any(body.prompt == "poison" for body in bodies):
            raise RuntimeError("cannot draw this")
        return [[DrawnImage(body.seed + k, 8, 8, memoryview(bytes(192))) for k in range(body.n)] for body in bodies]


def body(prompt, **fields):
    return T2IBody(prompt=prompt, **fields)


def worker_run(device, scenario, timeout_s):
    async def main():
        worker = Worker(Turns(device), timeout_s, max_images=8)
        running = asyncio.create_task(worker.run())
        try:
            await asyncio.wait_for(scenario(worker), PATIENCE_S)
        finally:
            running.cancel()

    asyncio.run(main())


def ask(worker, wish):
    return asyncio.create_task(worker.draw(group_of(wish, SPEC), wish))


def test_a_full_group_is_drawn_at_once_and_together():
    device = HeldDevice()

    async def scenario(worker):  # the tick is an hour away
        asks = [ask(worker, body(f"p{k}", seed=k)) for k in range(8)]
        answers = await asyncio.gather(*asks)
        assert [drawn.images[0].seed for drawn in answers] == list(range(8))
        assert {drawn.batch_size for drawn in answers} == {8}

    worker_run(device, scenario, timeout_s=3600)
    assert device.batches == [[f"p{k}" for k in range(8)]]


def test_at_the_tick_the_oldest_request_s_group_goes_and_the_next_follows_it():
    device = HeldDevice(permits=0)

    async def scenario(worker):
        asks = [ask(worker, body("first"))]
        await asyncio.to_thread(device.began.wait, PATIENCE_S)  # the device is busy: all the others queue up
        for prompt, steps in (("old", 5), ("young", 6), ("old too", 5)):
            asks.append(ask(worker, body(prompt, inference_steps=steps)))
            await asyncio.sleep(0)
        device.permits.release(4)
        await asyncio.gather(*asks)

    worker_run(device, scenario, timeout_s=0.05)
    assert device.batches == [["first"], ["old", "old too"], ["young"]]


def test_a_batch_that_fails_is_told_to_its_callers_and_the_next_is_drawn():
    device = HeldDevice()

    async def scenario(worker):
        with pytest.raises(RuntimeError, match="cannot draw this"):
            await ask(worker, body("poison"))
        drawn = await ask(worker, body("fine"))
        assert len(drawn.images) == 1

    worker_run(device, scenario, timeout_s=0.01)


def test_a_caller_who_leaves_does_not_stop_the_others():
    device = HeldDevice(permits=0)

    async def scenario(worker):
        leaving, staying = ask(worker, body("leaves")), ask(worker, body("stays"))
        await asyncio.to_thread(device.began.wait, PATIENCE_S)
        leaving.cancel()
        device.permits.release(2)
        await staying

    worker_run(device, scenario, timeout_s=0.01)


def test_a_request_is_told_what_it_waited_and_what_its_batch_took():
    device = HeldDevice(permits=0)

    async def scenario(worker):
        first = ask(worker, body("first"))
        await asyncio.to_thread(device.began.wait, PATIENCE_S)
        asked_s, second = time.monotonic(), ask(worker, body("second"))
        await asyncio.sleep(0)  # it is on the queue
        await asyncio.sleep(0.25)  # what it waits at least, and a little
        device.permits.release(2)
        drawn = [await first, await second]
        elapsed_s = time.monotonic() - asked_s
        assert drawn[0].denoise_s >= 0.2
        assert drawn[1].queue_s >= 0.2
        assert drawn[1].queue_s + drawn[1].denoise_s <= elapsed_s  # no second of it is told twice

    worker_run(device, scenario, timeout_s=0.01)
