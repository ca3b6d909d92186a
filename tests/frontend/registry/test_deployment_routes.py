"""Deployments over HTTP: what the commands do, with a key of the registry."""

from collections.abc import Iterator

import httpx
import pytest

from frontends import serving
from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.registry.changes import Change
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_folder import read_model
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry
from noria.testing.fake_engine import FakeEngine

PATH = "/v1/deployments"


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder, tiny_folder) -> Iterator[tuple[str, dict[str, str], DeploymentStore]]:
    """A server whose registry has one version: its address, its keys, its deployments."""
    home = tmp_path_factory.mktemp("deployments")
    keys = {"client": generate_key("client"), "deployer": generate_key("deployer", ["lineage", "deploy"])}
    (home / "keys.toml").write_text("".join(table for _, table in keys.values()))
    config = Config(data_dir=str(home / "data"), frontend=FrontendConfig(api_keys_file=str(home / "keys.toml")))
    engine = open_registry(config)
    ModelStore(engine).add("shapes", read_model(str(tiny_folder)), Change(1.0, "tester"), alias="prod")
    with FakeEngine(f"ipc://{folder}/deployments") as fake, serving(config, fake) as (url, _):
        yield url, {name: key for name, (key, _) in keys.items()}, DeploymentStore(engine)
    engine.dispose()


@pytest.fixture
def call(server):
    url, keys, _ = server
    with httpx.Client(base_url=url, timeout=60) as client:

        def send(method, path=PATH, key="deployer", **body):
            return client.request(method, path, json=body or None, headers={"X-Api-Key": keys[key]})

        yield send


def test_a_canary_is_deployed_promoted_and_rolled_back(call, server):
    store = server[2]
    body = {"endpoint": "t2i", "version": "shapes@prod", "canary": 10, "why": "better hands"}
    made = call("POST", **body)
    assert made.status_code == 202
    deployment = made.json()
    assert (deployment["state"], deployment["version"]["number"]) == ("pending", 1)
    assert deployment["created"]["by"] == "deployer"
    again = call("POST", **body)
    assert (again.status_code, again.json()["id"]) == (200, deployment["id"])
    store.try_lease(deployment["id"], "registrar", 1e12, 10.0)
    store.mounted(deployment["id"], "registrar", Change(1e12, "registrar"))
    (status,) = call("GET").json()["data"]
    assert (status["endpoint"], status["serving"], status["verdict"]["outcome"]) == ("t2i", None, "inconclusive")
    promoted = call("POST", f"{PATH}/promote", endpoint="t2i", why="sure").json()
    assert (promoted["state"], promoted["events"][-1]["change"]["why"]) == ("serving", "sure")
    assert call("POST", f"{PATH}/rollback", endpoint="t2i").json()["state"] == "rolled_back"
    assert store.routes().routes == ()


def test_a_shadow_is_deployed_and_a_swap(call):
    shadow = call("POST", endpoint="shadowed", version="shapes", shadow="20% for 500").json()
    assert shadow["shadow_plan"] == {"percent": 20.0, "max_s": None, "max_answers": 500}
    assert call("POST", endpoint="swapped", version="shapes", swap=True).json()["swap"]


@pytest.mark.parametrize(
    ("path", "body", "status", "names"),
    [
        (PATH, {"endpoint": "t2i", "version": "nothing"}, 409, "nothing"),
        (PATH, {"endpoint": "a b", "version": "shapes"}, 409, "a b"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "canary": 0}, 400, "canary"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "ramp": "5,4"}, 400, "ramp"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "ramp": "5", "canary": 5}, 400, "ramp"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "min_responses": 5}, 400, "min_responses"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "shadow": "0%"}, 400, "shadow"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "swap": True, "canary": 5}, 409, "swap"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "canary": 5, "guards": ["latency"]}, 400, "guards"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "canary": 5, "guards": ["a b"]}, 400, "guards"),
        (PATH, {"endpoint": "t2i", "version": "shapes", "guards": ["image_entropy"]}, 400, "guards"),
        (f"{PATH}/promote", {"endpoint": "unknown"}, 409, "unknown"),
        (f"{PATH}/rollback", {"endpoint": "unknown"}, 409, "unknown"),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_it(call, server, path, body, status, names):
    before = server[2].all()
    response = call("POST", path, **body)
    assert response.status_code == status
    assert names in response.json()["error"]["message"]
    assert server[2].all() == before
