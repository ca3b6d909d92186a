"""Planted bad canaries, from requests to the rollback: a real front end, registrar and registry, a fake engine.

Windows are short, so that it takes a second. How soon a canary is found is simulated: `noria bench canary`.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import pathlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan
from noria.config import Config, StatisticsConfig, VariableConfig
from noria.frontend.app import build_app
from noria.frontend.engines import registrar_link
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.registrar_link import RegistrarLink
from noria.frontend.engines.versions import version_choice
from noria.frontend.process import http_server
from noria.jobs.database.schema import open_jobs_database
from noria.models.catalog import open_model
from noria.protocol.routes import Routes
from noria.registrar import process
from noria.registrar.deployer import Deployer
from noria.registrar.mount_client import MountClient
from noria.registrar.registry_access import RegistryAccess
from noria.registrar.statistics_keeper import StatisticsKeeper
from noria.registry.changes import Change
from noria.registry.deployments.routes_file import routes_file, write_routes
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_folder import read_model
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from noria.supervisor.listener import open_listeners, server_url
from noria.testing.fake_engine import FakeEngine
from tiny_models import copy_with_other_weights
from waiting import wait_until

ENDPOINT = "tiny"
SHARE = 0.25
# By default a guard that has nothing to find may fail one of twenty canaries.
SURE = JudgeSettings(alpha=1e-4, hard_stop_e=1e4)


class Served:
    """A server in threads of this process, whose endpoint has a model and, in the registry, a second version of it."""

    def __init__(self, tmp_path: pathlib.Path, sockets: str, first: pathlib.Path, second: pathlib.Path) -> None:
        # With the edges of other tests' servers: a process cannot change those of a variable.
        declared = VariableConfig("image_brightness", ENDPOINT, edges=tuple(k / 10 for k in range(1, 10)))
        self.config = Config(data_dir=str(tmp_path), statistics=StatisticsConfig(variables=(declared,)))
        specs = [msgspec.structs.replace(open_model(str(folder)), name=ENDPOINT) for folder in (first, second)]
        self.control, self.canary = (spec.fingerprint for spec in specs)
        self.models = (specs[0],)
        self.engine = FakeEngine(f"ipc://{sockets}/canary", models=self.models)
        self.registry = open_registry_database("auto", tmp_path)
        ModelStore(self.registry).add("shapes", read_model(str(second)), Change(time.time(), "tester"))
        self.deployments = DeploymentStore(self.registry)
        self.reports = f"ipc://{sockets}/canary-reports"
        self.url = ""
        self._stopping = threading.Event()

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        engine_pool = EnginePool([self.engine.address])
        app = build_app(self.config, engine_pool)
        link = RegistrarLink(app.state.submission, "frontend-0", routes_file(self.config), self.reports)
        server = http_server(app, self.config.frontend, link=link)
        frontend = msgspec.structs.replace(self.config.frontend, port=0)
        registrar = threading.Thread(target=lambda: asyncio.run(self._run_registrar()))
        with open_listeners(frontend) as (listener, *_):
            serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            serving.start()
            registrar.start()
            self.url = server_url(listener, has_tls=False)
            try:
                yield
            finally:
                self._stopping.set()
                server.should_exit = True
                registrar.join()
                serving.join()
                self.engine.stop()
                self.registry.dispose()

    async def _run_registrar(self) -> None:
        folder = pathlib.Path(self.config.data_dir)
        link = MountClient("engine-0", self.engine.address, "diffusion")
        access = RegistryAccess(
            functools.partial(open_registry_database, "auto", folder),
            functools.partial(open_jobs_database, "auto", folder),
            "server",
        )
        publish = functools.partial(write_routes, routes_file(self.config))
        deployer = Deployer(self.models, [link], access, publish, Routes())
        keeper = StatisticsKeeper(60.0, pathlib.Path(folder, "statistics.json"), access)
        works = (link.run(), process.take_reports(deployer, keeper, self.reports))
        tasks = [asyncio.create_task(work) for work in works]
        while not self._stopping.is_set():
            await deployer.poll()
            await asyncio.sleep(0.05)
        await deployer.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await access.close()


@pytest.fixture
def served(tmp_path: pathlib.Path, tiny_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(version_choice, "WINDOW_S", 0.1)
    monkeypatch.setattr(registrar_link, "INTERVAL_S", 0.05)
    second = copy_with_other_weights(tiny_folder, tmp_path / "second")
    settings_file = second / "noria.json"  # other defaults do not keep requests from being compared
    settings = json.loads(settings_file.read_text()) if settings_file.exists() else {}
    settings_file.write_text(json.dumps(settings | {"default_steps": 3}))
    with tempfile.TemporaryDirectory(prefix="noria-") as sockets:  # pytest's own are too long for the path of a socket
        made = Served(tmp_path, sockets, tiny_folder, second)
        with made.serve():
            yield made


def ask_until(served: Served, condition) -> Counter:
    """Let eight users ask until then; return how often each version answered, and each status."""
    seen: Counter = Counter()
    done = threading.Event()

    def use() -> None:
        with httpx.Client(base_url=served.url, timeout=60) as web:
            while not done.is_set():
                response = web.post("/t2i", json={"prompt": "a circle", "metadata": False})
                seen[response.headers.get("x-noria-model-version", "none"), response.status_code] += 1

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        users = [pool.submit(use) for _ in range(8)]
        try:
            wait_until(condition)
        finally:
            done.set()
    for user in users:
        user.result()
    return seen


@pytest.mark.parametrize("fault", ["errors", "latency", "image_brightness"])
def test_a_planted_bad_canary_is_rolled_back_and_gets_no_more_requests(served: Served, fault: str) -> None:
    served.engine.delays_s[served.control] = 0.02
    served.engine.delays_s[served.canary] = 0.2 if fault == "latency" else 0.02
    if fault == "image_brightness":
        served.engine.shades[served.canary] = 0
    if fault == "errors":
        served.engine.failures[served.canary] = {"code": "generation_failed", "message": "no"}
    change = Change(time.time(), "tester")
    settings = msgspec.structs.replace(SURE, guards=("image_brightness",))
    number = served.deployments.deploy(ENDPOINT, "shapes@1", RampPlan((100 * SHARE,)), settings, change)[0].id
    seen = ask_until(served, lambda: served.deployments.find(number).state == "rolled_back")
    found = served.deployments.find(number)
    assert (found.last_change.by, found.last_change.why.partition(":")[0]) == ("judge", fault)
    assert {status for version, status in seen if version != "shapes@1"} == {200}
    assert any(version == "shapes@1" for version, _ in seen)
    wait_until(lambda: routes_file(served.config).read_bytes().count(b"shapes@1") == 0)
    time.sleep(0.2)  # until the front end has read them
    begun = len(served.engine.submitted)
    ask_until(served, lambda: len(served.engine.submitted) > begun + 30)
    versions = {request.model_version for request in served.engine.submitted[begun + 8 :]}
    assert versions == {served.control}


def test_an_equal_canary_stays(served: Served) -> None:
    for version in (served.control, served.canary):
        served.engine.delays_s[version] = 0.02
    change = Change(time.time(), "tester")
    number = served.deployments.deploy(ENDPOINT, "shapes@1", RampPlan((50.0,)), SURE, change)[0].id

    def is_judged() -> bool:
        found = served.deployments.find(number)
        return found.state != "pending" and found.evidence is not None and found.evidence.num_canary >= 50

    seen = ask_until(served, is_judged)
    assert served.deployments.find(number).state == "canary"
    assert {status for _, status in seen} == {200}
