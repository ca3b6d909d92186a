"""The reference server's batch worker against a device that the test blocks."""

import asyncio
import threading
import time

import pytest

from noria.frontend.engines.results import RawImage
from noria.models.catalog import open_model
from noria_bench.targets.pipeline_generator import T2IBody, batch_key_of
from noria_bench.targets.reference.batch_worker import BatchWorker
from noria_bench.targets.reference.serialized_pipeline import SerializedPipeline

SPEC = open_model("bundled")
TIMEOUT_S = 120


class BlockingGenerator:
    """Returns black images, a batch for each permit, and records the batches."""

    def __init__(self, permits=1000):
        self.permits = threading.Semaphore(permits)
        self.started = threading.Event()
        self.batches = []

    def generate(self, batch_key, bodies):
        self.started.set()
        assert self.permits.acquire(timeout=TIMEOUT_S)
        self.batches.append([body.prompt for body in bodies])
        if any(body.prompt == "poison" for body in bodies):
            raise RuntimeError("cannot generate this")
        return [[RawImage(body.seed + k, 8, 8, memoryview(bytes(192))) for k in range(body.n)] for body in bodies]


def make_body(prompt, **fields):
    return T2IBody(prompt=prompt, **fields)


def run_worker(device, scenario, timeout_s):
    async def main():
        worker = BatchWorker(SerializedPipeline(device), timeout_s, max_images=8)
        running = asyncio.create_task(worker.run())
        try:
            await asyncio.wait_for(scenario(worker), TIMEOUT_S)
        finally:
            running.cancel()

    asyncio.run(main())


def submit(worker, request):
    return asyncio.create_task(worker.generate(batch_key_of(request, SPEC), request))


def test_a_full_group_runs_at_once_and_together():
    device = BlockingGenerator()

    async def scenario(worker):  # the tick is an hour away
        tasks = [submit(worker, make_body(f"p{k}", seed=k)) for k in range(8)]
        answers = await asyncio.gather(*tasks)
        assert [result.images[0].seed for result in answers] == list(range(8))
        assert {result.batch_size for result in answers} == {8}

    run_worker(device, scenario, timeout_s=3600)
    assert device.batches == [[f"p{k}" for k in range(8)]]


def test_at_the_tick_the_oldest_request_s_group_runs_and_the_next_follows():
    device = BlockingGenerator(permits=0)

    async def scenario(worker):
        tasks = [submit(worker, make_body("first"))]
        await asyncio.to_thread(device.started.wait, TIMEOUT_S)  # the device is busy: all others are queued
        for prompt, steps in (("old", 5), ("young", 6), ("old too", 5)):
            tasks.append(submit(worker, make_body(prompt, inference_steps=steps)))
            await asyncio.sleep(0)
        device.permits.release(4)
        await asyncio.gather(*tasks)

    run_worker(device, scenario, timeout_s=0.05)
    assert device.batches == [["first"], ["old", "old too"], ["young"]]


def test_a_failed_batch_raises_in_its_callers_and_the_next_runs():
    device = BlockingGenerator()

    async def scenario(worker):
        with pytest.raises(RuntimeError, match="cannot generate this"):
            await submit(worker, make_body("poison"))
        result = await submit(worker, make_body("fine"))
        assert len(result.images) == 1

    run_worker(device, scenario, timeout_s=0.01)


def test_a_cancelled_request_does_not_stop_the_others():
    device = BlockingGenerator(permits=0)

    async def scenario(worker):
        cancelled, remaining = submit(worker, make_body("cancelled")), submit(worker, make_body("remaining"))
        await asyncio.to_thread(device.started.wait, TIMEOUT_S)
        cancelled.cancel()
        device.permits.release(2)
        await remaining

    run_worker(device, scenario, timeout_s=0.01)


def test_a_result_has_its_queue_time_and_its_batch_s_duration():
    device = BlockingGenerator(permits=0)

    async def scenario(worker):
        first = submit(worker, make_body("first"))
        await asyncio.to_thread(device.started.wait, TIMEOUT_S)
        submitted_s, second = time.monotonic(), submit(worker, make_body("second"))
        await asyncio.sleep(0)  # it is on the queue
        await asyncio.sleep(0.25)  # its minimum queue time, with a margin
        device.permits.release(2)
        results = [await first, await second]
        elapsed_s = time.monotonic() - submitted_s
        assert results[0].denoise_s >= 0.2
        assert results[1].queue_s >= 0.2
        assert results[1].queue_s + results[1].denoise_s <= elapsed_s  # no time is counted twice

    run_worker(device, scenario, timeout_s=0.01)
