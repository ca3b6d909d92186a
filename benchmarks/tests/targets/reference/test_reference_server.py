"""The reference server's five endpoints over a fake device and over the real pipeline, some with real sockets."""

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

from noria.config import EngineConfig
from noria.frontend.engines.results import RawImage
from noria.models.catalog import open_model
from noria_bench.targets.catalog import TARGETS, TargetSettings
from noria_bench.targets.pipeline_generator import PipelineGenerator, T2IBody, TargetJob, batch_key_of
from noria_bench.targets.reference.reference_server import build_app

SPEC = open_model("bundled")
TIMEOUT_S = 120
PATHS = [target.path for target in TARGETS.values() if target.name.startswith("reference-")]
SYNC_PATHS = [path for path in PATHS if path.endswith("-sync")]


class NoiseGenerator:
    """Returns noise that seed and steps determine; like a diffusers pipeline, wrong if two threads call it at once."""

    def __init__(self):
        self.scheduler = None

    def generate(self, batch_key, bodies):
        self.scheduler = batch_key.inference_steps
        time.sleep(0.002)
        if any(body.prompt == "poison" for body in bodies):
            raise RuntimeError("cannot generate this")
        return [[self._noise(body.seed + k) for k in range(body.n)] for body in bodies]

    def _noise(self, seed):
        rgb = np.random.default_rng([seed, self.scheduler]).integers(0, 256, 64 * 64 * 3, dtype=np.uint8)
        return RawImage(seed, 64, 64, memoryview(rgb.tobytes()))


@contextlib.contextmanager
def serving(generator, spec=SPEC, **settings):
    """A client of the application on uvicorn, in a thread of this process."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        app = build_app(generator, spec, TargetSettings(timeout_s=0.01, **settings))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=TIMEOUT_S, trust_env=False) as client:
                client.get("/readyz").raise_for_status()
                yield client
        finally:
            server.should_exit = True
            thread.join()


def make_body(prompt, **fields):
    return T2IBody(prompt=prompt, **fields)


def test_every_endpoint_of_the_catalog_gives_the_same_image_for_the_same_body():
    assert len(PATHS) == 5
    with serving(NoiseGenerator()) as client:
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
    with serving(NoiseGenerator(), stream=stream) as client:
        for paths in (PATHS[0:2], PATHS[2:4]):
            assert ["stream" in path for path in paths] == [True, False]
            streamed, plain = (client.post(path, json={"prompt": "p", "n": 8}) for path in paths)
            assert len(plain.content) > 64 * 1024  # more than a chunk
            assert streamed.content == plain.content
            assert streamed.headers["content-type"] == plain.headers["content-type"]
            assert "content-length" in plain.headers
            assert "content-length" not in streamed.headers


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_reports_its_batch_size_and_times(path):
    with serving(NoiseGenerator()) as client:
        answer = client.post(path, json={"prompt": "p", "n": 2})
    assert answer.headers["x-batch-size"] == "2"
    queue_ms, denoise_ms = map(
        float, re.match(r"queue;dur=([\d.]+), denoise;dur=([\d.]+)$", answer.headers["server-timing"]).groups()
    )
    assert queue_ms >= 0.0
    assert denoise_ms >= 2.0


@pytest.mark.parametrize("path", SYNC_PATHS)
def test_synchronous_endpoints_give_the_same_images_concurrently_as_alone(path):
    bodies = [{"prompt": "p", "seed": k, "inference_steps": 2 + k % 3} for k in range(24)]
    with serving(NoiseGenerator()) as client, ThreadPoolExecutor(8) as users:
        solo = [client.post(path, json=each).content for each in bodies]
        concurrent = list(users.map(lambda each: client.post(path, json=each), bodies))
    assert [answer.content for answer in concurrent] == solo
    assert any(float(answer.headers["server-timing"].split("=")[1].split(",")[0]) > 1.0 for answer in concurrent)


@pytest.mark.parametrize("path", PATHS)
def test_a_failed_call_is_a_500_and_the_next_succeeds(path):
    with serving(NoiseGenerator()) as client:
        # uvicorn closes it anyhow
        poison = client.post(path, json={"prompt": "poison"}, headers={"connection": "close"})
        assert poison.status_code == 500
        assert client.post(path, json={"prompt": "p"}).status_code == 200


class BlockingGenerator:
    """Returns a black image for each permit."""

    def __init__(self):
        self.permits, self.started = threading.Semaphore(0), threading.Event()

    def generate(self, batch_key, bodies):
        self.started.set()
        assert self.permits.acquire(timeout=TIMEOUT_S)
        return [[RawImage(each.seed, 8, 8, memoryview(bytes(192)))] for each in bodies]


@pytest.mark.parametrize("path", PATHS)
def test_only_the_asynchronous_endpoints_block_the_event_loop(path):
    device = BlockingGenerator()
    with serving(device) as client, ThreadPoolExecutor(2) as users:
        generation = users.submit(client.post, path, json={"prompt": "p"})
        assert device.started.wait(TIMEOUT_S)
        if path in ("/t2i/stream-async", "/t2i/response-async"):
            with pytest.raises(httpx.ReadTimeout):
                client.get("/readyz", timeout=0.3)
        else:
            assert client.get("/readyz").status_code == 200
        device.permits.release()
        assert generation.result().status_code == 200


def test_it_reads_the_json_of_t2i_and_answers_in_the_same_form():
    async def main():
        app = build_app(NoiseGenerator(), SPEC, TargetSettings(timeout_s=0.01))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://reference") as client,
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


def test_the_pipeline_gives_the_same_images_in_a_batch_as_alone(tiny_folder):
    spec = open_model(str(tiny_folder))
    generator = PipelineGenerator(TargetJob(spec, EngineConfig(devices=("cpu",), dtype="float32", threads=1), port=0))
    settings = {"inference_steps": 4, "guidance_scale": 3.0, "scheduler": "ddim"}
    bodies = [make_body("a red circle", seed=5, n=2, **settings), make_body("a blue star", seed=9, **settings)]
    batched = generator.generate(batch_key_of(bodies[0], spec), bodies)
    assert [[image.seed for image in images] for images in batched] == [[5, 6], [9]]
    for each, images in zip(bodies, batched, strict=True):
        (solo,) = generator.generate(batch_key_of(each, spec), [each])
        for a, b in zip(images, solo, strict=True):
            assert np.abs(np.frombuffer(a.rgb, np.uint8).astype(int) - np.frombuffer(b.rgb, np.uint8)).max() <= 1


@pytest.mark.parametrize("path", SYNC_PATHS)
def test_the_pipeline_gives_the_same_images_to_several_threads_as_to_one(tiny_folder, path):
    spec = open_model(str(tiny_folder))
    generator = PipelineGenerator(TargetJob(spec, EngineConfig(devices=("cpu",), dtype="float32", threads=1), port=0))
    bodies = [
        {"prompt": "a red circle", "seed": k, "inference_steps": 3 + k % 3, "scheduler": ("ddim", "pndm")[k % 2]}
        for k in range(6)
    ]
    with contextlib.closing(generator), serving(generator, spec) as client, ThreadPoolExecutor(len(bodies)) as users:
        solo = [client.post(path, json=each) for each in bodies]
        concurrent = list(users.map(lambda each: client.post(path, json=each), bodies))
    assert {answer.status_code for answer in solo} == {200}
    assert [answer.content for answer in concurrent] == [answer.content for answer in solo]
    assert len({answer.content for answer in solo}) == len(solo)
