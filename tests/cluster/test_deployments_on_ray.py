"""Deployments of a registry in PostgreSQL, carried out on a real Ray of one node, whatever is killed there.

Before its front end is Ray's Python proxy, which `noria serve --on local` has unless HAProxy is asked for. Its cluster
ends before that of the session, of `test_ray_cluster.py`, starts; that one has HAProxy.
"""

import concurrent.futures
import os
import pathlib
import shutil
import signal
import time

import httpx
import psutil
import pytest

from noria.cli.main import main
from noria.frontend.access.api_keys import generate_key
from noria.testing.server import running_process
from python_environment import ray_python
from waiting import wait_until

# A Ray and ten Pythons start, five of them with torch; pip takes minutes, the first time.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

WAIT_S = 280
IMAGE = {"prompt": "a circle", "inference_steps": 2, "seed": 7}
CODE = """
from noria.user_code import InvalidInput

class Count:
    def load(self, ctx):
        self.step = ctx.settings["step"]

    def preprocess(self, body, state):
        if not isinstance(body.get("number"), int):
            raise InvalidInput("number must be a number.", field="number")
        state.number = body["number"]

    def postprocess(self, result, state):
        return {"next": state.number + self.step}
"""
SETTINGS = """
model = "{model}"
additional_models = ["{other}"]
data_dir = "{folder}"

[frontend]
api_keys_file = "{folder}/keys.toml"

[engine]
devices = ["cpu"]
slots = 2

[cluster]
engine_replicas = 2
engine_cpus = 0.25

[registry]
database = "{database}"

[statistics]
builtin = ["parameters"]

[[endpoints]]
name = "count"
code = "{folder}/count.py:Count"
settings = {{step = 3}}
"""


class Server:
    """The server on Ray: its answers, and its processes."""

    def __init__(self, running, key):
        self._root = running.process
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{running.port}",
            headers={"x-api-key": key},
            timeout=WAIT_S,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def post(self, path, json, **headers):
        return self._http.post(path, json=json, headers=headers)

    def version(self, **headers):
        """The version that answers an image request."""
        answer = self.post("/t2i", IMAGE, **headers)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-noria-model-version"]

    def held(self):
        """Return the state of each engine, and the versions that it holds."""
        time.sleep(0.5)  # it is polled, on few cores
        served = self._http.get("/v1/registry/served").json()
        return [(each["state"], {model["version"] for model in each["models"]}) for each in served["engines"]]

    def wait_until_held(self, *versions):
        """Wait until both engines of the first model have these versions, and those of the other one its own.

        None is that of the configuration.
        """
        expected = [("ready", set(versions))] * 2 + [("ready", {None})] * 2
        wait_until(lambda: self.held() == expected, WAIT_S, (httpx.TransportError, KeyError))

    def statistics(self):
        """The variables that are counted."""
        return {each["variable"] for each in self._http.get("/v1/statistics").json()["data"]}

    def metrics(self, deployment):
        """The metrics of the replicas of a deployment, as Prometheus finds them."""
        targets = self._http.get("/metrics/targets").json()
        found = [each["targets"][0] for each in targets if each["labels"]["deployment"] == deployment]
        return "".join(httpx.get(f"http://{address}/metrics", trust_env=False).text for address in found)

    def processes(self, title, root=None):
        """The processes below `root`, or below the server, with such a title."""
        found = []
        for each in (root or self._root).children(recursive=True):
            try:
                if " ".join(each.cmdline()).startswith(title):
                    found.append(each)
            except psutil.Error:
                continue
        return found

    def kill(self, process, title):
        """Send SIGKILL, and wait until as many processes of this title run as before."""
        before = len(self.processes(title))
        process.kill()
        wait_until(lambda: not process.is_running() and len(self.processes(title)) == before, WAIT_S)

    def end_its_group(self):
        """Send SIGTERM to the server's process group while it answers a request; return what is left in the end."""
        family = [self._root, *self._root.children(recursive=True)]
        group = [each for each in family if os.getpgid(each.pid) == os.getpgid(self._root.pid)]
        assert len(group) > 1, "Ray's own processes are in the group"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answering = pool.submit(self.version)
            time.sleep(0.05)
            for each in group:
                each.send_signal(signal.SIGTERM)
            answering.result()
        assert self._root.wait(WAIT_S) == 0
        return psutil.wait_procs(family[1:], timeout=WAIT_S)[1]

    def close(self):
        self._http.close()


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    """Two versions of a small model, and another model."""
    folder = tmp_path_factory.mktemp("versions")
    first, second, other = (
        pathlib.Path(shutil.copytree(tiny_folder, folder / name)) for name in ("first", "second", "other")
    )
    weights = second / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    return first, second, other


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_canary_is_loaded_promoted_and_survives_the_end_of_engines_and_registrar(
    database, folders, tmp_path, monkeypatch, capsys
):
    for name, value in {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}.items():
        monkeypatch.setenv(name, value)
    first, second, other = folders
    key, table = generate_key("tester", ["generate", "metrics", "lineage", "deploy"])
    (tmp_path / "keys.toml").write_text(table)
    (tmp_path / "count.py").write_text(CODE)
    (tmp_path / "noria.toml").write_text(SETTINGS.format(model=first, other=other, folder=tmp_path, database=database))

    def noria(*arguments):
        status = main([*arguments, "--data-dir", str(tmp_path), "--registry-database", database])
        assert status == 0, capsys.readouterr()

    def deploy(version, *plan):
        noria("deploy", "first", version, *plan, "--wait", str(WAIT_S))

    for folder in (first, second):
        noria("models", "add", "shapes", str(folder))
    command = [str(ray_python()), "-m", "noria", "serve", "--on", "local", "--config", str(tmp_path / "noria.toml")]
    with running_process(lambda port: [*command, "--port", str(port)]) as running:
        server = Server(running, key)
        server.wait_until_held(None)
        assert server.post("/v1/endpoints/count", {"number": 4}).json() == {"next": 7}
        assert server.post("/v1/endpoints/count", {}).status_code == 400

        deploy("shapes@2", "--canary", "25%")
        server.wait_until_held(None, "shapes@2")
        assert server.version(**{"x-noria-version": "canary"}) == "shapes@2"
        assert server.version(**{"x-noria-version": "control"}) != "shapes@2"
        share = 'noria_canary_share_ratio{model="first",version="shapes@2"} 0.25'
        wait_until(lambda: share in server.metrics("registrar"), WAIT_S)
        wait_until(server.statistics, WAIT_S)
        assert "inference_steps" in server.statistics()

        title = "ray::ServeReplica:noria:engine-first"
        server.kill(server.processes(title)[0], title)  # and with it its engine
        server.wait_until_held(None, "shapes@2")

        noria("promote", "first")
        server.wait_until_held("shapes@2")
        assert server.version() == "shapes@2"

        (engine,) = server.processes("noria engine", server.processes(title)[0])
        server.kill(engine, "noria engine")  # the process alone: its replica starts it again
        server.wait_until_held("shapes@2")
        (registrar,) = server.processes("ray::ServeReplica:noria:registrar")
        registrar.kill()
        deploy("shapes@1")  # the next one has it loaded
        server.wait_until_held("shapes@1")
        noria("rollback", "first", "--why", "a test")
        server.wait_until_held("shapes@2")
        assert server.version() == "shapes@2"
        assert server.end_its_group() == []
        server.close()
