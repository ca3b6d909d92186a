"""Deployments on replicas that come and go: the registrar of a cluster without Ray, a real registry, fake engines."""

import asyncio
import contextlib
import functools
import pathlib
import time

import msgspec
import pytest
from starlette.testclient import TestClient

from frontends import folder  # noqa: F401 - a fixture
from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan
from noria.cluster.deployed_model import models_to_load
from noria.cluster.registrar import ClusterRegistrar, ClusterRegistrarLink, statistics_of
from noria.config import Config, RegistryConfig
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.engines.submission import Submission
from noria.models.catalog import open_model
from noria.protocol.transport import EngineEndpoint
from noria.registrar import process
from noria.registry.changes import Change
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_folder import read_model
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry
from noria.testing.fake_engine import FakeEngine
from sample_statistics import write_sample_statistics
from tiny_models import copy_with_other_weights
from waiting import wait_until_async

# The name of each model's engine deployment, with that of its model.
GROUPS = {"engine-first": "first", "engine-other": "other"}


class Cluster:
    """Replicas, which are fake engines, of two models; their registrar; and a front end's link to it."""

    def __init__(self, config: Config, versions: list[pathlib.Path], sockets: pathlib.Path) -> None:
        self.config, self._sockets = config, sockets
        registry = open_registry(config)
        for each in versions:
            ModelStore(registry).add("shapes", read_model(str(each)), change())
        self.deployments = DeploymentStore(registry)
        spec = open_model(str(versions[0]))
        self.specs = {group: msgspec.structs.replace(spec, name=name) for group, name in GROUPS.items()}
        self.new_version = open_model(str(versions[1])).fingerprint
        self.registrar = ClusterRegistrar(config, self.specs)
        self.running = asyncio.create_task(self.registrar.run())
        self.submission = Submission(EnginePool([]))
        self.link = ClusterRegistrarLink(self.submission, "frontend", self.call)
        self.replicas: dict[str, list[EngineEndpoint]] = {group: [] for group in GROUPS}
        self.exit_stack = contextlib.ExitStack()
        self.exit_stack.callback(registry.dispose)

    async def call(self, report: bytes) -> bytes:
        return self.registrar.exchange(report)

    def start(self, group: str, number: int) -> FakeEngine:
        """Start a replica, as Ray does: its engine loads what is deployed."""
        models = tuple(models_to_load(self.config, self.specs[group]))
        engine = self.exit_stack.enter_context(FakeEngine(f"ipc://{self._sockets}/{group}-{number}", models=models))
        self.replicas[group].append(EngineEndpoint(f"{group}-{number}", engine.address, group=group))
        self.registrar.set_engines(group, self.replicas[group])
        return engine

    def lose(self, engine: FakeEngine) -> None:
        """End a replica for good."""
        engine.set_state("dead")
        for group, endpoints in self.replicas.items():
            self.replicas[group] = [each for each in endpoints if each.address != engine.address]
            self.registrar.set_engines(group, self.replicas[group])

    def held(self, engine: FakeEngine) -> set[tuple[str, str]]:
        """The models that the registrar sees there."""
        return {
            spec.key for each in self.registrar._engines if engine.address.endswith(each.name) for spec in each.models
        }

    def deploy(self, plan: RampPlan | None = None) -> int:
        return self.deployments.deploy("first", "shapes@2", plan, JudgeSettings(), change())[0].id

    async def until(self, condition) -> None:
        """Wait, while the front end reports and follows."""

        async def is_so() -> bool:
            await self.link.call_once()
            return condition()

        async with asyncio.timeout(120):
            while not await is_so():  # noqa: ASYNC110 - polls the registrar
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.exit_stack.close()


def change() -> Change:
    return Change(time.time(), "tester")


@pytest.fixture(scope="module")
def versions(tiny_folder, tmp_path_factory) -> list[pathlib.Path]:
    """Two versions of a small model."""
    return [tiny_folder, copy_with_other_weights(tiny_folder, tmp_path_factory.mktemp("versions") / "second")]


@pytest.fixture
def run(tmp_path, versions, folder, monkeypatch):  # noqa: F811 - a fixture
    monkeypatch.setattr(process, "POLL_S", 0.05)

    def run(scenario) -> None:
        async def with_cluster() -> None:
            cluster = Cluster(Config(data_dir=str(tmp_path)), versions, folder)
            try:
                await scenario(cluster)
            finally:
                await cluster.close()

        asyncio.run(with_cluster())

    return run


def test_all_replicas_of_the_model_mount_a_version_and_those_of_others_do_not(run):
    async def scenario(cluster):
        first, second = cluster.start("engine-first", 0), cluster.start("engine-first", 1)
        other = cluster.start("engine-other", 0)
        second.withholds_mounts = True
        number = cluster.deploy(RampPlan((25.0,)))
        await cluster.until(lambda: first.model_changes and second.model_changes)
        assert cluster.deployments.find(number).state == "pending"
        second.withholds_mounts = False
        await cluster.until(lambda: cluster.submission.versions.versions_beside("first") == {cluster.new_version})
        for engine in (first, second):
            assert cluster.held(engine) == {cluster.specs["engine-first"].key, ("first", cluster.new_version)}
        assert other.model_changes == []
        cluster.deployments.promote("first", change())
        await cluster.until(lambda: cluster.held(first) == cluster.held(second) == {("first", cluster.new_version)})
        assert cluster.submission.versions.control_version("first") == cluster.new_version
        assert cluster.submission.versions.control_version("other") == cluster.specs["engine-other"].fingerprint

    run(scenario)


def test_a_replica_that_joins_has_the_control_at_once_and_gets_the_canary(run):
    async def scenario(cluster):
        first = cluster.start("engine-first", 0)
        cluster.deploy()
        await cluster.until(lambda: cluster.held(first) == {("first", cluster.new_version)})
        joined = cluster.start("engine-first", 1)
        assert {spec.key for spec in joined.models} == {("first", cluster.new_version)}
        cluster.deployments.deploy("first", "shapes@1", RampPlan((25.0,)), JudgeSettings(), change())
        await cluster.until(lambda: len(cluster.held(joined)) == len(cluster.held(first)) == 2)
        cluster.lose(first)
        successor = cluster.start("engine-first", 2)
        assert len(successor.models) == 1
        await cluster.until(lambda: cluster.held(successor) == cluster.held(joined))

    run(scenario)


def test_a_deployment_does_not_wait_for_a_replica_that_was_lost_while_it_loaded(run):
    async def scenario(cluster):
        lost = cluster.start("engine-first", 0)
        lost.withholds_mounts = True
        number = cluster.deploy()
        await cluster.until(lambda: lost.model_changes)
        cluster.lose(lost)
        await cluster.until(lambda: not cluster.registrar._engines)
        assert cluster.deployments.find(number).state == "pending"  # nothing holds it
        cluster.start("engine-first", 1)
        await cluster.until(lambda: cluster.deployments.find(number).state == "serving")

    run(scenario)


def test_a_front_end_keeps_its_routes_and_its_counts_while_there_is_no_registrar(run):
    async def scenario(cluster):
        cluster.start("engine-first", 0)
        cluster.deploy(RampPlan((25.0,)))
        await cluster.until(lambda: cluster.submission.versions.versions_beside("first"))
        reports = []

        async def no_registrar(report):
            raise OSError("it is gone")

        async def next_registrar(report):
            reports.append(report)
            return await cluster.call(report)

        cluster.link._call = no_registrar
        await cluster.link.call_once()
        assert cluster.submission.versions.versions_beside("first") == {cluster.new_version}
        await cluster.link.call_once()
        cluster.link._call = next_registrar
        await cluster.link.call_once()
        await cluster.link.call_once()
        assert reports[0] == b"" != reports[1]  # counts are not taken for a call that may be lost again

    run(scenario)


def test_without_the_registry_front_ends_get_no_routes_and_engines_load_what_they_had(tmp_path, versions):
    (tmp_path / "file").touch()
    config = Config(data_dir=str(tmp_path), registry=RegistryConfig(database=f"sqlite:///{tmp_path}/file/is-no-folder"))
    spec = open_model(str(versions[0]))

    async def scenario():
        cluster_registrar = ClusterRegistrar(config, {"engine": spec})
        running = asyncio.create_task(cluster_registrar.run())
        await wait_until_async(lambda: cluster_registrar._registry._away)

        async def call(report):
            return cluster_registrar.exchange(report)

        link = ClusterRegistrarLink(submission := Submission(EnginePool([])), "frontend", call)
        await link.call_once()
        assert not link.has_routes.is_set()
        assert submission.versions.control_version(spec.name) == spec.fingerprint
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert models_to_load(config, spec) == []


def test_a_front_end_of_another_node_shows_what_the_registrar_has_counted(tmp_path):
    """Each node has a data folder of its own."""
    own, registrars = (Config(data_dir=str(tmp_path / name)) for name in ("front-end", "registrar"))
    cluster_registrar = ClusterRegistrar(registrars, {})
    app = build_app(own, EnginePool([]), read_statistics=functools.partial(statistics_of, cluster_registrar.statistics))
    client = TestClient(app, "http://localhost", client=("127.0.0.1", 1))
    assert client.get("/v1/statistics").json()["data"] == []
    (tmp_path / "registrar").mkdir()
    write_sample_statistics(tmp_path / "registrar")
    listed = client.get("/v1/statistics").json()["data"]
    assert len(listed) == 7
    (psi,) = [each["drift"]["psi"] for each in listed if each["variable"] == "prompt_words"]
    assert psi > 0.5
    (tmp_path / "registrar" / "statistics.json").write_bytes(b"{")
    answer = client.get("/v1/statistics")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
    assert int(answer.headers["retry-after"]) > 0
