"""Noria on a real Ray cluster of three nodes: the same answers as on one machine, and no job is lost."""

import base64
import concurrent.futures
import io
import json
import os
import pathlib
import subprocess
import sysconfig
import threading
import time

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from noria.testing.server import reserve_port, running_server
from python_environment import environment_python
from waiting import wait_until

# The cluster takes a minute to start; pip takes minutes, the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TESTS = pathlib.Path(__file__).parent
SOURCES = TESTS.parent.parent / "src"
MODEL = ["bundled", "--slots", "4", "--threads", "1"]
BODY = {"prompt": "a red circle above a blue square", "inference_steps": 12}
DEADLINE_S = 240
ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)  # so that no connection is left open between tests


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


class RayWorld:
    """The cluster, its processes, and an HTTP client of the server on it."""

    def __init__(self, process, port):
        self.process, self.root, self.port = process, psutil.Process(process.pid), port
        self.lock = threading.Lock()
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, trust_env=False, limits=ONE_REQUEST
        )

    def read(self):
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the cluster has ended")

    def command(self, word):
        with self.lock:
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()
            return self.read()

    def processes(self, title):
        found = []
        for each in self.root.children(recursive=True):
            try:
                if " ".join(each.cmdline()).startswith(title):
                    found.append(each)
            except psutil.Error:
                continue
        return found

    def engines(self):
        return self.processes("noria engine")

    def frontends(self):
        return self.processes("ray::ServeReplica:noria:frontend")

    def is_whole(self):
        """Whether all replicas run, and a front end finds all engines ready."""
        if len(self.engines()) != 2 or len(self.frontends()) != 2:
            return False
        if self.command("status")["running"] != {"frontend": 2, "engine-bundled": 2}:
            return False
        try:
            states = [each["state"] for each in self.http.get("/readyz").json()["engines"]]
        except (httpx.TransportError, KeyError, json.JSONDecodeError):
            return False
        return states == ["ready", "ready"]

    def recover(self):
        """Wait until all is whole again; return the seconds."""
        began = time.monotonic()
        wait_until(self.is_whole, DEADLINE_S)
        return time.monotonic() - began


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    python = environment_python("ray", "ray[serve]==2.60.0")
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "noria.pth").write_text(f"{SOURCES}\n{sysconfig.get_paths()['purelib']}\n")
    folder = tmp_path_factory.mktemp("ray")
    settings = {
        "model": "bundled",
        "engine.slots": "4",
        "engine.devices": "cpu",
        "cluster.engine_replicas": "2-2",
        "cluster.frontend_replicas": 2,
        "data_dir": str(folder),
        "registry.deployments": False,
        "jobs.database": f"sqlite:///{folder}/jobs.sqlite3",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
    environment |= {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
    with reserve_port() as port:
        command = [python, TESTS / "ray_world.py", json.dumps(settings), str(port)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )
        started = psutil.Process(process.pid)
        try:
            opened = RayWorld(process, port)
            assert opened.read() == {"ready": True}
            yield opened
            opened.http.close()
        finally:
            children = started.children(recursive=True)
            process.stdin.close()  # it ends all
            try:
                process.wait(60)
            finally:
                for each in [*children, started]:
                    try:
                        each.kill()
                    except psutil.Error:
                        continue
                process.wait()
                process.stdout.close()


@pytest.fixture(scope="module")
def expected(world):
    """The images of one machine, by seed."""
    with running_server(MODEL) as plain:
        http = httpx.Client(base_url=f"http://127.0.0.1:{plain.port}", timeout=DEADLINE_S, trust_env=False)
        with http:
            return {seed: pixels(http.post("/t2i", json=BODY | {"seed": seed}).content) for seed in range(8)}


def test_an_image_is_that_of_one_machine(world, expected):
    answer = world.http.post("/t2i", json=BODY | {"seed": 3})
    assert answer.status_code == 200
    assert answer.headers["x-noria-seed"] == "3"
    assert np.array_equal(pixels(answer.content), expected[3])
    rejected = world.http.post("/t2i", json=BODY | {"inference_steps": 0})
    assert rejected.status_code == 400
    assert "inference_steps" in rejected.json()["error"]["message"]


def test_progress_and_previews_stream_while_the_image_is_generated(world, expected):
    arrived, final = [], ""
    with world.http.stream("POST", "/t2i", json=BODY | {"seed": 1, "stream": True, "partial_images": 4}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                arrived.append((line.removeprefix("event: "), time.monotonic()))
            final = line.removeprefix("data: ") or final
    names = [name for name, _ in arrived]
    assert names.count("preview") == 4 and names[-1] == "finished" and "progress" in names
    assert arrived[-1][1] - arrived[0][1] > 0.02  # not all at once
    assert np.array_equal(pixels(base64.b64decode(json.loads(final)["images"][0]["b64_json"])), expected[1])


def test_a_client_that_leaves_cancels_its_image(world):
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(base_url=world.http.base_url, timeout=1.0, trust_env=False) as impatient,
    ):
        impatient.post("/t2i", json=BODY | {"n": 16, "inference_steps": 200})
    began = time.monotonic()
    assert world.http.post("/t2i", json=BODY | {"seed": 5, "inference_steps": 2}).is_success
    assert time.monotonic() - began < 20  # 3,200 steps would take a minute


def moved_images(world, outcome):
    """As a front end counts them; each request may go to another front end, so the most of several."""
    pages = [world.http.get("/metrics").text for _ in range(10)]
    lines = [line for page in pages for line in page.splitlines() if line.startswith("noria_images_moved_total{")]
    return max([float(line.rsplit(" ", 1)[1]) for line in lines if f'outcome="{outcome}"' in line], default=0.0)


def test_running_images_of_a_node_that_drains_go_on_at_another_engine(world, expected):
    """No step is computed twice: an image that is drawn again from the seed would be no moved one."""
    wait_until(world.is_whole, DEADLINE_S)
    stopped, seconds = threading.Event(), []

    def user(number):
        while not stopped.is_set():
            began = time.monotonic()
            answer = world.http.post("/t2i", json=BODY | {"seed": number, "inference_steps": 100})
            seconds.append((began, time.monotonic() - began))
            assert answer.status_code == 200, answer.text
            yield answer.content

    undisturbed = [pixels(next(user(number))) for number in range(4)]
    first_engines = {each.pid for each in world.engines()}

    def load(number):
        for content in user(number):
            assert np.abs(pixels(content) - undisturbed[number]).max() <= 1

    with concurrent.futures.ThreadPoolExecutor(4) as users:
        loads = [users.submit(load, number) for number in range(4)]
        time.sleep(10)
        drained = time.monotonic()
        world.command("drain_node")
        wait_until(lambda: first_engines - {each.pid for each in world.engines()}, DEADLINE_S)
        ended = time.monotonic()
        wait_until(world.is_whole, DEADLINE_S)
        time.sleep(5)
        stopped.set()
        for each in loads:
            each.result()
    assert moved_images(world, "moved") >= 1
    assert moved_images(world, "refused") == 0
    before = [took for began, took in seconds[4:] if began + took < drained]
    during = [took for began, took in seconds if drained <= began + took and began < ended + 2]
    after = [took for began, took in seconds if began > ended + 2]
    for name, each in {"before": before, "drain": during, "after": after}.items():
        print(name, len(each), "requests, longest", round(max(each), 2), "s, median", round(np.median(each), 2), "s")


@pytest.mark.parametrize("loss", ["engine", "engine replica", "front end", "node"])
def test_every_accepted_job_ends_with_its_image_whatever_is_killed(world, expected, loss):
    wait_until(world.is_whole, DEADLINE_S)

    def plain_request(seed):
        try:
            return world.http.post("/t2i", json=BODY | {"seed": seed % 8})
        except httpx.TransportError as error:
            return error

    seeds = [number % 8 for number in range(24)]
    jobs = [world.http.post("/v1/jobs", json={"input": BODY | {"seed": seed}}) for seed in seeds]
    assert {each.status_code for each in jobs} == {202}
    with concurrent.futures.ThreadPoolExecutor(6) as users, concurrent.futures.ThreadPoolExecutor(1) as observer:
        answers = [users.submit(plain_request, seed) for seed in range(30)]
        time.sleep(0.5)
        match loss:
            case "engine":
                world.engines()[0].kill()
            case "engine replica":
                world.engines()[0].parent().kill()
            case "front end":
                world.frontends()[0].kill()
            case "node":
                world.command("remove_node")
        recovery = observer.submit(world.recover)
        answers, recovery_s = [each.result() for each in answers], recovery.result()
    statuses = [getattr(each, "status_code", repr(each)) for each in answers]
    print(loss, {status: statuses.count(status) for status in set(statuses)})
    for seed, answer in enumerate(answers):
        if getattr(answer, "status_code", 0) == 200:
            assert np.abs(pixels(answer.content) - expected[seed % 8]).max() <= 1

    for seed, job in zip(seeds, jobs, strict=True):
        url = f"/v1/jobs/{job.json()['id']}"

        def ended(url=url):
            return world.http.get(url).json()["status"] in ("succeeded", "failed", "canceled")

        wait_until(ended, DEADLINE_S, (httpx.TransportError, KeyError, json.JSONDecodeError))
        final = world.http.get(url).json()
        assert final["status"] == "succeeded", final
        result = world.http.get(final["output"][0])
        assert np.abs(pixels(result.content) - expected[seed]).max() <= 1
    print(loss, "whole again after", round(recovery_s, 1), "s")
