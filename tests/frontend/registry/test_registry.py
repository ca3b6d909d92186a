"""Routes that the registry's pages read: versions, what is served of them, histories and lineage."""

import io
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from PIL import Image

import sample_registry
from frontends import serving
from noria.config import Config, FrontendConfig, RegistryConfig
from noria.frontend.access.api_keys import generate_key
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import save_options
from noria.protocol.routes import Route, Routes, Target
from noria.registry.schema import open_registry
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from sample_registry import HOSTILE, model_folder, run_id

NOW = 1_795_000_000.0
SHAPES_3 = model_folder(3)


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder) -> Iterator[tuple[str, dict[str, str]]]:
    """A server whose registry has a month of history: its address and keys. It carries out no deployments."""
    home = tmp_path_factory.mktemp("registry")
    keys = {"client": generate_key("client"), "reader": generate_key("reader", ["lineage", "deploy"])}
    (home / "keys.toml").write_text("".join(table for _, table in keys.values()))
    frontend = FrontendConfig(api_keys_file=str(home / "keys.toml"))
    config = Config(data_dir=str(home / "data"), frontend=frontend, registry=RegistryConfig(deployments=False))
    engine = open_registry(config)
    sample_registry.fill(engine, NOW)
    engine.dispose()
    deployed = msgspec.structs.replace(FAKE_MODEL, name="t2i", fingerprint="0123456789ab")
    target = Target(3, "shapes@3", SHAPES_3.manifest.digest, deployed.fingerprint, ())
    with (
        FakeEngine(f"ipc://{folder}/registry", models=(FAKE_MODEL, deployed)) as fake,
        serving(config, fake, routes=Routes(1, (Route("t2i", target),))) as (url, _),
    ):
        yield url, {name: key for name, (key, _) in keys.items()}


@pytest.fixture
def get(server):
    url, keys = server
    with httpx.Client(base_url=url, timeout=60, headers={"X-Api-Key": keys["reader"]}) as client:

        def send(path, status=200, **params):
            response = client.get(path, params=params)
            assert response.status_code == status, response.text
            return response.json()

        send.client = client
        yield send


def test_versions_are_listed_with_their_deployments_page_by_page(get):
    first = get("/v1/registry/versions", limit=4)
    second = get("/v1/registry/versions", limit=4, before=first["next"])
    assert [each["name"] for each in first["data"] + second["data"]] == [
        "minilm@1", *(f"shapes@{number}" for number in (5, 4, 3, 2, 1))
    ]  # fmt: skip
    assert second["next"] is None
    by_name = {each["name"]: each for each in first["data"] + second["data"]}
    assert by_name["shapes@4"]["version"]["added"] == {"at": NOW - 9 * 86400, "by": "ci", "why": HOSTILE}
    assert by_name["shapes@4"]["deployments"] == [{"id": 4, "endpoint": "t2i", "state": "rolled_back"}]


def test_served_are_the_models_of_engines_and_the_requests_that_they_answered(get, server):
    def answered(served):
        return {(each["endpoint"], each["version"]): each["by_outcome"].get("ok", 0) for each in served["requests"]}

    url, keys = server
    before = answered(get("/v1/registry/served"))
    body, headers = {"prompt": "p", "model": "t2i"}, {"X-Api-Key": keys["client"]}
    assert httpx.post(f"{url}/t2i", json=body, headers=headers).status_code == 200
    served = get("/v1/registry/served")
    (engine,) = served["engines"]
    assert (engine["state"], served["carries_out_deployments"]) == ("ready", False)
    assert [(model["name"], model["version"]) for model in engine["models"]] == [
        (FAKE_MODEL.name, None),
        ("t2i", "shapes@3"),
    ]
    after = answered(served)
    for counted in (("t2i", None), ("t2i", "shapes@3")):
        assert after[counted] == before.get(counted, 0) + 1


def test_a_history_is_read_page_by_page(get):
    history = get("/v1/deployments/history", endpoint="t2i", limit=2)
    assert ([each["id"] for each in history["data"]], history["next"]) == ([6, 4], 4)
    assert history["data"][1]["events"][-1]["evidence"]["verdict"]["outcome"] == "fail"
    older = get("/v1/deployments/history", endpoint="t2i", before=history["next"])
    assert ([each["version"] for each in older["data"]], older["next"]) == (["shapes@3", "shapes@1"], None)


def test_current_deployments_are_those_that_serve_and_the_latest(get):
    embed, t2i = get("/v1/deployments")["data"]
    assert (embed["serving"]["id"], embed["unfinished"], embed["latest"]) == (2, None, 5)
    assert (t2i["serving"]["id"], t2i["unfinished"]["id"], t2i["latest"]) == (3, 6, 6)


def edges_of(graph):
    names = {}
    for node in graph["nodes"]:
        name = node.get("name") or node.get("job_name") or node.get("version") or node["names"][0]
        names[node["id"]] = f"{node['type']} {name}"
    return {(names[edge["product"]], edge["role"], names[edge["source"]]) for edge in graph["edges"]}


def test_a_trace_leads_both_ways(get):
    graph = get("/v1/registry/trace", of="shapes@3")
    assert graph["subjects"] == [f"model:{SHAPES_3.manifest.digest}"]
    edges = edges_of(graph)
    assert {
        ("endpoint t2i", "serving", "deployment shapes@3"),
        ("deployment shapes@3", "version", "model shapes@3"),
        ("model shapes@3", "made by", "run train unet"),
        ("run train unet", "input", "dataset /data/latents"),
        ("run draw scenes", "input", "dataset raw/2026-10"),
        ("run fine-tune", "input", "model shapes@3"),
        ("endpoint t2i", "canary", "deployment shapes@5"),
        ("run pipeline", "step", "run evaluate"),
    } <= edges
    assert len(graph["nodes"]) >= 15 and not graph["is_cut"]


def test_each_node_leads_to_the_graph_around_it(get):
    for node in get("/v1/registry/trace", of="endpoint:t2i")["nodes"]:
        assert get("/v1/registry/trace", of=node["id"])["subjects"] == [node["id"]]
    cut = get("/v1/registry/trace", of=run_id("pipeline"), limit=3)
    assert cut["is_cut"]


def image_of(fingerprint=SHAPES_3.fingerprint, **fields):
    metadata = GenerationMetadata(
        "p", model="t2i", model_version=fingerprint, noria="0.1.0", registered_version="shapes@3", **fields
    )
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format="png", **save_options(metadata, "png"))
    return file.getvalue()


def test_an_image_leads_to_what_made_it(get):
    content = image_of(deployment=3, model_digest=SHAPES_3.manifest.digest)
    response = get.client.post("/v1/registry/trace", content=content)
    assert (response.status_code, response.json()["graph"]["subjects"]) == (200, ["deployment:3"])
    assert response.json()["version"] == "shapes@3"


def test_an_image_of_an_unknown_model_says_what_to_do(get):
    response = get.client.post("/v1/registry/trace", content=image_of(fingerprint="unknown"))
    assert (response.status_code, "noria models add" in response.text) == (409, True)
    assert get.client.post("/v1/registry/trace", content=b"none").status_code == 422


@pytest.mark.parametrize(
    ("path", "params", "status", "words"),
    [
        ("/v1/registry/versions", {"limit": "0"}, 400, "allowed are 1 to 500"),
        ("/v1/registry/versions", {"before": "x"}, 400, "before"),
        ("/v1/registry/trace", {}, 400, "allowed are 1 to 2000 characters"),
        ("/v1/registry/trace", {"of": "a\0b"}, 400, "of is"),
        ("/v1/registry/trace", {"of": "x" * 2001}, 400, "of is"),
        ("/v1/registry/trace", {"of": "nothing"}, 409, "no model"),
        ("/v1/registry/trace", {"of": "deployment:99"}, 409, "no deployment 99"),
        ("/v1/registry/trace", {"of": "dataset:99999999999999999999"}, 409, "nothing with the id"),
        ("/v1/registry/trace", {"of": "deployment:²"}, 409, "nothing with the id"),
        ("/v1/registry/trace", {"of": "t2i", "limit": "501"}, 400, "allowed are 1 to 500"),
        ("/v1/deployments/history", {"endpoint": "nothing"}, 409, "nothing was ever deployed"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(get, path, params, status, words):
    assert words in get(path, status=status, **params)["error"]["message"]
