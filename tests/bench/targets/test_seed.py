"""The seed's five endpoints over a stand-in device and over the real pipeline, through real sockets where threads or bytes matter."""

import asyncio
import base64
import contextlib
import io
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import uvicorn
from PIL import Image

from noria.bench.targets.catalog import TARGETS
from noria.bench.targets.drawing import PipelineDrawer, T2IBody, TargetJob, TargetSettings, group_of
from noria.bench.targets.seed import build_app
from noria.config import EngineConfig
from noria.frontend.engine_link import DrawnImage
from noria.models.catalog import open_model

SPEC = open_model("bundled")
PATIENCE_S = 120
PATHS = [target.path for target in TARGETS.values() if target.name.startswith("seed-")]
SYNC = [path for path in PATHS if path.endswith("-sync")]


class NoisyDevice:
    """Draws noise that depends on seed and steps alone; like a diffusers pipeline, wrongly if two threads are in it at once."""

    def __init__(self):
        self.scheduler = None

    def draw(self, group, bodies):
        self.scheduler = group.inference_steps
        time.sleep(0.002)
        if any(body.prompt == "poison" for body in bodies):
            raise RuntimeError("cannot draw this")
        return [[self._noise(body.seed + k) for k in range(body.n)] for body in bodies]

    def _noise(self, seed):
        rgb = np.random.default_rng([seed, self.scheduler]).integers(0, 256, 64 * 64 * 3, dtype=np.uint8)
        return DrawnImage(seed, 64, 64, memoryview(rgb.tobytes()))


@contextlib.contextmanager
def serving(drawer, spec=SPEC, **settings):
    """A client of the application on uvicorn, in a thread of this process."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        app = build_app(drawer, spec, TargetSettings(timeout_s=0.01, **settings))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=PATIENCE_S, trust_env=False) as client:
                client.get("/readyz").raise_for_status()
                yield client
        finally:
            server.should_exit = True
            thread.join()


def body(prompt, **fields):
    return T2IBody(prompt=prompt, **fields)


def test_every_endpoint_of_the_catalog_answers_the_same_image_for_the_same_body():
    assert len(PATHS) == 5
    with serving(NoisyDevice()) as client:
        for fields in ({}, {"n": 2}):
            answers = [client.post(path, json={"prompt": "p", "seed": 3, **fields}) for path in PATHS]
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.content for answer in answers}) == 1
        assert len(answers[0].json()["images"]) == 2
        first = base64.b64decode(answers[0].json()["images"][0]["b64_json"])
        assert first == client.post(PATHS[0], json={"prompt": "p", "seed": 3}).content
        assert first != client.post(PATHS[0], json={"prompt": "p", "seed": 4}).content


@pytest.mark.parametrize("stream", ["bytesio", "chunks"])
def test_a_streamed_body_is_the_plain_one_byte_for_byte_without_its_length(stream):
    with serving(NoisyDevice(), stream=stream) as client:
        for paths in (PATHS[0:2], PATHS[2:4]):
            assert ["stream" in path for path in paths] == [True, False]
            streamed, plain = (client.post(path, json={"prompt": "p", "n": 8}) for path in paths)
            assert len(plain.content) > 64 * 1024  # more than a chunk
            assert streamed.content == plain.content
            assert streamed.headers["content-type"] == plain.headers["content-type"]
            assert "content-length" in plain.headers
            assert "content-length" not in streamed.headers


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_tells_its_batch_and_where_its_time_went(path):
    with serving(NoisyDevice()) as client:
        answer = client.post(path, json={"prompt": "p", "n": 2})
    assert answer.headers["x-batch-size"] == "2"
    queue_ms, denoise_ms = map(
        float, re.match(r"queue;dur=([\d.]+), denoise;dur=([\d.]+)$", answer.headers["server-timing"]).groups()
    )
    assert queue_ms >= 0.0
    assert denoise_ms >= 2.0


@pytest.mark.parametrize("path", SYNC)
def test_synchronous_endpoints_draw_the_same_images_for_many_at_once_as_alone(path):
    bodies = [{"prompt": "p", "seed": k, "inference_steps": 2 + k % 3} for k in range(24)]
    with serving(NoisyDevice()) as client, ThreadPoolExecutor(8) as users:
        alone = [client.post(path, json=each).content for each in bodies]
        crowded = list(users.map(lambda each: client.post(path, json=each), bodies))
    assert [answer.content for answer in crowded] == alone
    assert any(float(answer.headers["server-timing"].split("=")[1].split(",")[0]) > 1.0 for answer in crowded)


@pytest.mark.parametrize("path", PATHS)
def test_a_call_that_fails_is_a_500_and_the_next_is_drawn(path):
    with serving(NoisyDevice()) as client:
        poison = client.post(
            path, json={"prompt": "poison"}, headers={"connection": "close"}
        )  # uvicorn closes it anyhow
        assert poison.status_code == 500
        assert client.post(path, json={"prompt": "p"}).status_code == 200


class HeldDevice:
    """Draws a black image for each permit."""

    def __init__(self):
        self.permits, self.began = threading.Semaphore(0), threading.Event()

    def draw(self, group, bodies):
        self.began.set()
        assert self.permits.acquire(timeout=PATIENCE_S)
        return [[DrawnImage(each.seed, 8, 8, memoryview(bytes(192)))] for each in bodies]


@pytest.mark.parametrize("path", PATHS)
def test_only_the_asynchronous_endpoints_hold_up_the_event_loop_while_they_draw(path):
    device = HeldDevice()
    with serving(device) as client, ThreadPoolExecutor(2) as users:
        drawing = users.submit(client.post, path, json={"prompt": "p"})
        assert device.began.wait(PATIENCE_S)
        if path in ("/t2i/stream-async", "/t2i/response-async"):
            with pytest.raises(httpx.ReadTimeout):
                client.get("/readyz", timeout=0.3)
        else:
            assert client.get("/readyz").status_code == 200
        device.permits.release()
        assert drawing.result().status_code == 200


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
        app = build_app(NoisyDevice(), SPEC, TargetSettings(timeout_s=0.01))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://seed") as client,
        ):
            one = await client.post("/t2i/batched", json={"prompt": "p", "deadline_ms": 900, "priority": "high"})
            assert one.headers["content-type"] == "image/png"
            assert one.headers["x-batch-size"] == "1"
            assert Image.open(io.BytesIO(one.content)).size == (64, 64)
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


@pytest.mark.parametrize("path", SYNC)
def test_the_pipeline_draws_for_several_threads_what_it_draws_for_one(tiny_folder, path):
    spec = open_model(str(tiny_folder))
    drawer = PipelineDrawer(TargetJob(spec, EngineConfig(devices=("cpu",), dtype="float32", threads=1), port=0))
    bodies = [
        {"prompt": "a red circle", "seed": k, "inference_steps": 3 + k % 3, "scheduler": ("ddim", "pndm")[k % 2]}
        for k in range(6)
    ]
    with serving(drawer, spec) as client, ThreadPoolExecutor(len(bodies)) as users:
        alone = [client.post(path, json=each) for each in bodies]
        crowded = list(users.map(lambda each: client.post(path, json=each), bodies))
    assert {answer.status_code for answer in alone} == {200}
    assert [answer.content for answer in crowded] == [answer.content for answer in alone]
    assert len({answer.content for answer in alone}) == len(alone)
