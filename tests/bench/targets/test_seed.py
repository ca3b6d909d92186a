"""The seed's server: its worker against a device that the test holds, its routes, and the images of the real pipeline."""

import asyncio
import io
import threading

import httpx
import numpy as np
import pytest
from PIL import Image

from noria.bench.targets.drawing import PipelineDrawer, T2IBody, TargetJob, TargetSettings, group_of
from noria.bench.targets.seed import Worker, build_app
from noria.config import EngineConfig
from noria.frontend.engine_link import DrawnImage
from noria.models.catalog import open_model

SPEC = open_model("bundled")
PATIENCE_S = 30


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
        worker = Worker(device, timeout_s, max_images=8)
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
        assert [images[0].seed for images, _ in answers] == list(range(8))
        assert {size for _, size in answers} == {8}

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
        images, _ = await ask(worker, body("fine"))
        assert len(images) == 1

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


@pytest.mark.parametrize(
    "field",
    [{"width": 96}, {"height": 96}, {"inference_steps": 9}, {"guidance_scale": 1.0}, {"scheduler": "ddim"}],
)
def test_requests_are_grouped_by_what_one_call_of_the_pipeline_shares(field):
    plain = body("p", seed=1)
    assert group_of(plain, SPEC) == group_of(body("another", seed=2, negative_prompt="no", n=2), SPEC)
    assert group_of(plain, SPEC) != group_of(body("p", seed=1, **field), SPEC)


def test_it_reads_the_json_of_t2i_and_answers_likewise():
    async def main():
        app = build_app(HeldDevice(), SPEC, TargetSettings(timeout_s=0.01))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://seed") as client,
        ):
            one = await client.post("/t2i/batched", json={"prompt": "p", "deadline_ms": 900, "priority": "high"})
            assert one.headers["content-type"] == "image/png"
            assert one.headers["x-batch-size"] == "1"
            assert Image.open(io.BytesIO(one.content)).size == (8, 8)
            two = await client.post("/t2i/batched", json={"prompt": "p", "n": 2})
            assert len(two.json()["images"]) == 2
            assert (await client.post("/t2i/batched", json={})).status_code == 422
            assert (await client.get("/readyz")).status_code == 200

    asyncio.run(main())


def test_the_pipeline_draws_a_batch_as_it_draws_each_alone(tiny_folder):
    spec = open_model(str(tiny_folder))
    drawer = PipelineDrawer(TargetJob(spec, EngineConfig(devices=("cpu",), dtype="float32", threads=1), port=0))
    settings = {"inference_steps": 4, "guidance_scale": 3.0, "scheduler": "ddim"}
    wishes = [body("a red circle", seed=5, n=2, **settings), body("a blue star", seed=9, **settings)]
    together = drawer.draw(group_of(wishes[0], spec), wishes)
    assert [[image.seed for image in images] for images in together] == [[5, 6], [9]]
    for wish, images in zip(wishes, together, strict=True):
        (alone,) = drawer.draw(group_of(wish, spec), [wish])
        for a, b in zip(images, alone, strict=True):
            assert np.abs(np.frombuffer(a.rgb, np.uint8).astype(int) - np.frombuffer(b.rgb, np.uint8)).max() <= 1
