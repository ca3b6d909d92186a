"""Noria on a real Ray cluster of three nodes: the same answers as on one machine, and no job is lost."""

import concurrent.futures
import io
import json
import re
import subprocess
import threading
import time
from collections import Counter

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from databases import stopped
from encoders import TEXTS
from noria.testing.server import running_server
from ray_cluster import BUCKET, TIMEOUT_S
from waiting import wait_until

# The cluster takes a minute to start; pip takes minutes, the first time.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

BODY = {"prompt": "a red circle above a blue square", "inference_steps": 12}
EMBEDDED = [text for text in TEXTS if text]
JOB_TEXTS = [f"{text} {number}" for number in range(500) for text in EMBEDDED]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def vectors(answer):
    return np.array([each["embedding"] for each in answer.json()["data"]], np.float32)


@pytest.fixture(scope="module")
def world(ray_world):
    return ray_world


@pytest.fixture(scope="module")
def expected(world):
    """The images of one machine, by seed, and its vectors of `EMBEDDED` and of `JOB_TEXTS`."""
    arguments = ["bundled", "--slots", "4", "--threads", "1", "--additional-models", str(world.encoder)]
    with (
        running_server(arguments) as plain,
        httpx.Client(base_url=f"http://127.0.0.1:{plain.port}", timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        wait_until(lambda: all(each["state"] == "ready" for each in http.get("/readyz").json()["engines"]))
        found = {seed: pixels(http.post("/t2i", json=BODY | {"seed": seed}).content) for seed in range(8)}
        for name, texts in (("embedded", EMBEDDED), ("job", JOB_TEXTS)):
            parts = [texts[start : start + 1000] for start in range(0, len(texts), 1000)]
            found[name] = np.concatenate([vectors(http.post("/v1/embeddings", json={"input": part})) for part in parts])
        return found


def test_an_image_is_that_of_one_machine(world, expected):
    answer = world.http.post("/t2i", json=BODY | {"seed": 3})
    assert answer.status_code == 200
    assert answer.headers["x-noria-seed"] == "3"
    assert np.array_equal(pixels(answer.content), expected[3])
    rejected = world.http.post("/t2i", json=BODY | {"inference_steps": 0})
    assert rejected.status_code == 400
    assert "inference_steps" in rejected.json()["error"]["message"]


def test_the_engines_of_a_model_are_on_different_nodes(world):
    """The setting `cluster.max_engines_per_node` requires it. The parent of a replica is its node's raylet."""
    wait_until(world.is_whole, TIMEOUT_S)
    for model in ("bundled", "small"):
        assert len({each.ppid() for each in world.replicas(f"engine-{model}")}) == 2


class Jobs:
    """Jobs of 24 images and of some thousand texts, each accepted."""

    def __init__(self, world, seeds):
        self.world, self.seeds = world, seeds
        bodies = [{"input": BODY | {"seed": seed}} for seed in seeds]
        answers = [world.http.post("/v1/jobs", json=body) for body in bodies]
        texts = "\n".join(JOB_TEXTS).encode()
        answers.append(world.http.post("/v1/jobs/texts", content=texts, headers={"Content-Type": "text/plain"}))
        assert {each.status_code for each in answers} == {202}, answers[-1].text
        *self.images, self.texts = [each.json()["id"] for each in answers]

    def check(self, expected):
        """Each ends once, with the undisturbed result, which is in the store."""
        for seed, job in zip(self.seeds, self.images, strict=True):
            result = self.world.http.get(self._output(job)[0])
            assert np.abs(pixels(result.content) - expected[seed]).max() <= 1
        self._output(self.texts)
        result = self.world.http.get(f"/v1/jobs/{self.texts}/results.npy")
        np.testing.assert_allclose(np.load(io.BytesIO(result.content)), expected["job"], atol=1e-5)
        stored = httpx.get(f"{self.world.s3.url}/{BUCKET}?list-type=2&prefix=noria/").text
        assert {*self.images, self.texts} <= set(re.findall(r"<Key>noria/([^/<]+)/", stored))

    def _output(self, job):
        url = f"/v1/jobs/{job}"

        def ended():
            return (now := self.world.http.get(url).json())["completed_at"] and now

        final = wait_until(ended, TIMEOUT_S, (httpx.TransportError, KeyError, json.JSONDecodeError))
        assert final["status"] == "succeeded", final
        events = self.world.http.get(f"{url}/events").text
        ends = [each for each in re.findall(r'"status":"(\w+)"', events) if each not in ("starting", "processing")]
        assert ends == ["succeeded"]
        return final["output"]


NO_MODEL = r"node \S+ cannot serve '~/lonely': no such folder"
NO_DATABASE = r"the application does not become ready on Ray: node \S+ cannot run a front end: the jobs database"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # One node has it. Ray tries again until it has found that node for all replicas.
        ({"model": "~/lonely", "cluster.engine_replicas": 2}, NO_MODEL),
        ({"jobs.database": "postgresql://noria@127.0.0.1:1/jobs"}, NO_DATABASE),
    ],
    ids=["model of one node", "no database"],
)
def test_an_application_that_a_node_cannot_run_says_which_node_and_why(world, changes, said):
    settings = {"cluster.engine_replicas": 1, "cluster.frontend_replicas": 1, "additional_models": ""} | changes
    found = world.command("deploy", changes=settings, until_given_up=said == NO_DATABASE)
    assert re.match(said, found["error"]), found
    assert found["applications"] == ["noria"]
    assert world.is_whole()  # it serves as before


# `noria serve --on`, but Ray's client, whose server sometimes fails to start.
DIRECT = """
import sys
import ray
from noria.cli.main import main

init = ray.init
ray.init = lambda target: init(target.removeprefix("ray://"))
sys.exit(main(["serve", "--on", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-registry-deployments"], "Ray runs an application 'noria' already, which is RUNNING"),
        (["--devices", "cuda:0,cuda:1"], "setting engine.devices is cuda:0, cuda:1; on Ray each engine has one device"),
    ],
    ids=["it runs already", "a setting that Ray cannot serve"],
)
def test_a_command_that_cannot_serve_leaves_the_application_alone_that_runs(world, arguments, said):
    target = f"ray://{world.command('status')['address']}"
    command = [world.python, "-c", DIRECT, target, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=world.environment, check=False)
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr
    assert world.is_whole()


# What `ray.init` does with a cluster that it has reached: Ray's own comparison, and its words.
OTHER_VERSIONS = """
import sys
import ray
from ray._private import utils
from noria.cli.main import main

def init(target):
    cluster = {"ray_version": "2.60.0", "python_version": "3.11.2"}
    utils.check_version_info(cluster, "Ray Client", raise_on_mismatch=True, python_version_match_level="minor")

utils.compute_version_info = lambda: (sys.argv[2], sys.argv[3])
ray.init = init
sys.exit(main(["serve", "--on", sys.argv[1]]))
"""


@pytest.mark.parametrize("versions", [("2.60.1", "3.11.2"), ("2.60.0", "3.12.2")])
def test_a_cluster_of_another_ray_or_python_is_rejected_with_both_versions(world, versions):
    target = f"ray://127.0.0.1:{world.port}"
    command = [world.python, "-c", OTHER_VERSIONS, target, *versions]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"Ray at {target} cannot be used: Version mismatch" in result.stderr
    for said in ("Ray: 2.60.0", "Python: 3.11.2", f"Ray: {versions[0]}", f"Python: {versions[1]}"):
        assert said in result.stderr


def test_jobs_wait_for_a_lost_database_and_everything_else_is_answered(world, expected, postgresql_server):
    wait_until(world.is_whole, TIMEOUT_S)
    jobs = Jobs(world, [number % 8 for number in range(12)])
    with stopped(postgresql_server):
        for path in ("/v1/jobs", f"/v1/jobs/{jobs.images[0]}"):
            answer = world.http.post(path, json={"input": BODY}) if path == "/v1/jobs" else world.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "jobs_unavailable")
            assert int(answer.headers["retry-after"]) > 0
        assert np.abs(pixels(world.http.post("/t2i", json=BODY | {"seed": 6}).content) - expected[6]).max() <= 1
        assert world.http.post("/v1/embeddings", json={"input": EMBEDDED}).status_code == 200
    jobs.check(expected)
    assert world.is_whole()  # no replica ended for that


def test_prometheus_gets_the_metrics_of_every_replica_with_rays_labels(world):
    wait_until(world.is_whole, TIMEOUT_S)
    samples = world.samples()

    def replicas(name):
        return Counter(labels["deployment"] for found, labels, value in samples if found == name and value)

    engines = {"engine-bundled": 2, "engine-small": 2}
    assert replicas("noria_frontends") == {"frontend": 2}
    assert replicas("noria_engine_up") == replicas("noria_engines_configured") == engines
    processes = Counter(
        (labels["deployment"], "engine" if labels["process"] == labels["replica"] else labels["process"])
        for name, labels, _ in samples
        if name == "noria_process_cpu_seconds_total"
    )
    pairs = [
        ("frontend", "frontend"),
        *((each, process) for each in engines for process in ("engine-replica", "engine")),
    ]
    assert processes == dict.fromkeys(pairs, 2)
    series = [(name, *sorted(labels.items())) for name, labels, _ in samples]
    assert len(set(series)) == len(series)
    assert {labels["instance"] for _, labels, _ in samples} == {"noria"}
    images, joins = world.total("noria_images_total"), world.total("noria_joins_total", deployment="engine-bundled")
    for seed in range(6):
        assert world.http.post("/t2i", json=BODY | {"seed": seed, "inference_steps": 2}).status_code == 200
    assert world.total("noria_images_total") == images + 6
    wait_until(lambda: world.total("noria_joins_total", deployment="engine-bundled") == joins + 6)


def test_running_images_of_a_node_that_drains_go_on_at_another_engine(world, expected):
    """No step is computed twice: an image that is drawn again from the seed would be no moved one."""
    wait_until(world.is_whole, TIMEOUT_S)
    done, seconds = threading.Event(), []

    def user(number):
        while not done.is_set():
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
        try:
            wait_until(lambda: len(seconds) >= 8, TIMEOUT_S)  # the undisturbed ones, and as many beside each other
            drained = time.monotonic()
            world.command("drain_node")
            wait_until(
                lambda: first_engines - {each.pid for each in world.engines()}, TIMEOUT_S, ignoring=(psutil.Error,)
            )
            ended = time.monotonic()
            wait_until(world.is_whole, TIMEOUT_S)
            wait_until(lambda: any(began > ended + 2 for began, _ in seconds.copy()), TIMEOUT_S)
        finally:
            done.set()
        for each in loads:
            each.result()
    assert world.total("noria_images_moved_total", outcome="moved") >= 1
    assert world.total("noria_images_moved_total", outcome="refused") == 0
    before = [took for began, took in seconds[4:] if began + took < drained]
    during = [took for began, took in seconds if drained <= began + took and began < ended + 2]
    after = [took for began, took in seconds if began > ended + 2]
    for name, each in {"before": before, "drain": during, "after": after}.items():
        print(name, len(each), "requests, longest", round(max(each), 2), "s, median", round(np.median(each), 2), "s")


@pytest.mark.parametrize("loss", ["engine", "engine replica", "front end", "node"])
def test_every_accepted_job_ends_with_its_result_whatever_is_killed(world, expected, loss):
    wait_until(world.is_whole, TIMEOUT_S)

    def plain_request(number):
        try:
            if number % 3 == 2:
                return world.http.post("/v1/embeddings", json={"input": EMBEDDED})
            return world.http.post("/t2i", json=BODY | {"seed": number % 8})
        except httpx.TransportError as error:
            return error

    jobs = Jobs(world, [number % 8 for number in range(24)])
    restarts = world.total("noria_engine_starts_total", previous_exit="killed")
    with concurrent.futures.ThreadPoolExecutor(6) as users, concurrent.futures.ThreadPoolExecutor(1) as observer:
        answers = [users.submit(plain_request, number) for number in range(30)]
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
    for number, answer in enumerate(answers):
        if getattr(answer, "status_code", 0) != 200:
            continue
        if number % 3 == 2:
            np.testing.assert_allclose(vectors(answer), expected["embedded"], atol=1e-5)
        else:
            assert np.abs(pixels(answer.content) - expected[number % 8]).max() <= 1
    jobs.check(expected)
    if loss == "engine":  # its replica keeps the count
        assert world.total("noria_engine_starts_total", previous_exit="killed") == restarts + 1
    print(loss, "whole again after", round(recovery_s, 1), "s")
