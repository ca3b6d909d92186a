"""Fixture: Noria on a real Ray cluster of three nodes, with an image model and a text encoder.

HAProxy, which comes with Ray Serve, is before the front ends. Jobs are in a PostgreSQL server, results in an
S3-compatible one. The cluster takes a minute to start, so all tests share it; a node may be gone.
"""

import base64
import contextlib
import json
import os
import pathlib
import subprocess
import sysconfig
import threading
import time

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from databases import empty_database
from encoders import make_encoder, open_exported, sentence_transformer
from noria.models.location import BUNDLED
from noria.testing.server import reserve_port
from python_environment import environment_python
from s3_server import running_s3
from waiting import wait_until

SCRIPT = pathlib.Path(__file__).parent / "cluster" / "ray_world.py"
SOURCES = pathlib.Path(__file__).parent.parent / "src"
REQUIREMENTS = ("ray[serve]==2.60.0",)
BUCKET = "results"
TIMEOUT_S = 240
ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)  # so that no connection is left open between tests
NUM_REPLICAS = {"frontend": 2, "engine-bundled": 2, "engine-small": 2}


class RayWorld:
    """The cluster, its processes, and an HTTP client of the server on it."""

    def __init__(self, process, port, python, environment, encoder, s3):
        self.process, self.root, self.port = process, psutil.Process(process.pid), port
        self.python, self.environment, self.encoder, self.s3 = python, environment, encoder, s3
        self.lock = threading.Lock()
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False, limits=ONE_REQUEST
        )

    def read(self):
        line = self.process.stdout.readline()
        assert line, "the cluster has ended"
        return json.loads(line)

    def command(self, word, **arguments):
        with self.lock:
            self.process.stdin.write(f"{word} {json.dumps(arguments)}\n")
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

    def replicas(self, deployment):
        return self.processes(f"ray::ServeReplica:noria:{deployment}")

    def engines(self, model="bundled"):
        children = [each.children() for each in self.replicas(f"engine-{model}")]
        return [each for group in children for each in group if " ".join(each.cmdline()).startswith("noria engine")]

    def frontends(self):
        return self.replicas("frontend")

    def is_whole(self):
        """Whether all replicas run, and a front end finds all engines ready."""
        if self.command("status")["running"] != NUM_REPLICAS:
            return False
        try:
            if any(len(self.engines(model)) != 2 for model in ("bundled", "small")) or len(self.frontends()) != 2:
                return False
            states = [each["state"] for each in self.http.get("/readyz").json()["engines"]]
        except (httpx.TransportError, KeyError, json.JSONDecodeError, psutil.Error):
            return False
        return states == ["ready"] * 4

    def samples(self):
        """The name, labels and value of each sample of all replicas, as Prometheus stores them."""
        found = []
        for each in self.http.get("/metrics/targets").json():
            page = httpx.get(f"http://{each['targets'][0]}/metrics", trust_env=False)
            for family in text_string_to_metric_families(page.text):
                found += [(sample.name, sample.labels | each["labels"], sample.value) for sample in family.samples]
        return found

    def total(self, name, **labels):
        return sum(value for found, have, value in self.samples() if found == name and labels.items() <= have.items())

    def recover(self):
        """Wait until all is whole again; return the seconds."""
        began = time.monotonic()
        wait_until(self.is_whole, TIMEOUT_S)
        return time.monotonic() - began


@pytest.fixture(scope="session")
def ray_world(tmp_path_factory, postgresql):
    """The `RayWorld`."""
    python, folder = environment_python("ray", *REQUIREMENTS), tmp_path_factory.mktemp("ray")
    secret = folder / "webhook-secret"  # one for all front ends
    secret.write_text("whsec_" + base64.b64encode(b"x" * 32).decode())
    secret.chmod(0o600)
    for number in range(2):
        (folder / f"home-{number}").mkdir()
    (folder / "home-0" / "lonely").symlink_to(BUNDLED)
    encoder = make_encoder(folder / "small", **sentence_transformer())
    open_exported(str(encoder))  # here, for all its engines
    with contextlib.ExitStack() as opened:
        s3 = opened.enter_context(running_s3(BUCKET))
        database = opened.enter_context(empty_database(postgresql))
        port = opened.enter_context(reserve_port())
        (packages,) = python.parent.parent.glob("lib/python*/site-packages")
        (packages / "noria.pth").write_text(f"{SOURCES}\n{sysconfig.get_paths()['purelib']}\n{s3.packages}\n")
        settings = {
            "model": "bundled",
            "additional_models": str(encoder),
            "engine.slots": "4",
            "engine.devices": "cpu",
            "cluster.engine_replicas": "2-2",
            "cluster.engine_cpus": "0.5",  # so that all engines have room when a node is gone
            "cluster.engine_memory_bytes": 2**20,
            "cluster.max_engines_per_node": 1,
            "cluster.frontend_replicas": 2,
            "data_dir": str(folder),
            "registry.deployments": False,
            "jobs.webhook_secret_file": str(secret),
            "jobs.database": database,
            "jobs.results": f"s3://{BUCKET}/noria",
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NORIA_")}
        environment |= {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
        environment |= {"RAY_SERVE_ENABLE_HA_PROXY": "1"} | s3.environment
        process = subprocess.Popen(
            [python, SCRIPT, json.dumps(settings), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        opened.callback(_end, process)
        world = RayWorld(process, port, python, environment, encoder, s3)
        opened.callback(world.http.close)
        assert world.read() == {"ready": True}
        yield world


def _end(process):
    """End the cluster and all that it has started."""
    started = psutil.Process(process.pid)
    children = started.children(recursive=True)
    process.stdin.close()  # it ends all
    try:
        process.wait(60)
    finally:
        for each in [*children, started]:
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.wait()
        process.stdout.close()
