"""`POST /v1/registry/versions`: real processes that read real sources; what a client may not have read."""

import asyncio
import concurrent.futures
import pathlib
import shutil
import time
from collections.abc import Iterator

import httpx
import pytest

from frontends import serving
from noria.config import Config, FrontendConfig, RegistryConfig
from noria.frontend.access.api_keys import generate_key
from noria.frontend.registry import version_adding
from noria.registry.manifest import read_manifest
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry
from noria.registry.sources.reading_process import read_in_process
from noria.testing.fake_engine import FakeEngine

PATH = "/v1/registry/versions"


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder, tiny_folder) -> Iterator[tuple[str, dict[str, str], ModelStore, pathlib.Path]]:
    """A server that may read the folder `allowed`: its address, its keys, its models."""
    home = tmp_path_factory.mktemp("adding")
    keys = {"client": generate_key("client"), "adder": generate_key("adder", ["lineage", "deploy"])}
    (home / "keys.toml").write_text("".join(table for _, table in keys.values()))
    (home / "allowed").mkdir()
    for name in ("allowed/shapes", "secret"):
        shutil.copytree(tiny_folder, home / name)
    (home / "allowed" / "link").symlink_to(home / "secret")
    (home / "allowed" / "empty").mkdir()
    config = Config(
        data_dir=str(home / "data"),
        frontend=FrontendConfig(api_keys_file=str(home / "keys.toml")),
        registry=RegistryConfig(source_roots=(str(home / "allowed"),)),
    )
    engine = open_registry(config)
    with FakeEngine(f"ipc://{folder}/adding") as fake, serving(config, fake) as (url, _):
        yield url, {name: key for name, (key, _) in keys.items()}, ModelStore(engine), home
    engine.dispose()


@pytest.fixture
def add(server):
    url, keys = server[:2]
    with httpx.Client(base_url=url, timeout=120) as client:

        def send(key="adder", **body):
            return client.post(PATH, json=body, headers={"X-Api-Key": keys[key]})

        yield send


def test_a_folder_below_a_root_is_added_once(add, server, tiny_folder):
    *_, store, home = server
    body = {"model": "shapes", "source": str(home / "allowed" / "shapes"), "why": "better"}
    body |= {"alias": "prod", "datasets": ["s3://bucket/scenes@1"]}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        made = list(threads.map(lambda _: add(**body), range(2)))
    assert 201 in {response.status_code for response in made} <= {200, 201}, [each.text for each in made]
    version = made[0].json()
    assert (version["model"], version["number"], version["aliases"]) == ("shapes", 1, ["prod"])
    assert version["digest"] == read_manifest(tiny_folder).digest
    assert (version["added"]["by"], version["added"]["why"]) == ("adder", "better")
    again = add(**body)
    assert (again.status_code, again.json()["id"]) == (200, version["id"])
    assert len(store.all_versions("shapes")) == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"source": "{home}/allowed/link"}, 422, "may not be read over HTTP"),
        ({"source": "http://169.254.169.254/latest"}, 422, "is no source of models"),
        ({"source": "s3://key:secret@bucket/x"}, 409, "has a password"),
        ({"source": "{home}/allowed/empty"}, 422, "model_index.json"),
        ({"source": "x\0y"}, 400, "source"),
        ({"source": "bundled", "model": "a b"}, 409, "model name"),
        ({"source": "{home}/nothing", "alias": "7"}, 409, "the alias '7' is not allowed"),  # before it is read
        ({"source": "{home}/nothing", "run_id": "x"}, 409, "there is no run 'x'"),
        ({"source": "bundled", "datasets": ["scenes"]}, 409, "has no version"),
        ({"source": "bundled", "run": "x"}, 400, "run"),
    ],
)
def test_what_may_not_be_read_or_is_no_model_is_one_sentence(add, server, body, status, words):
    *_, store, home = server
    before = store.all_versions()
    response = add(**{"model": "other"} | body | {"source": body["source"].replace("{home}", str(home))})
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert words in message and "hunter2" not in message
    assert store.all_versions() == before


def test_others_are_answered_while_a_source_is_read_and_it_goes_on_without_its_client(server, monkeypatch):
    url, keys, store, home = server
    slow = home / "allowed" / "slow"
    shutil.copytree(home / "allowed" / "shapes", slow)

    async def read_slowly(*arguments):
        await asyncio.sleep(1)
        return await read_in_process(*arguments)

    monkeypatch.setattr(version_adding, "read_in_process", read_slowly)
    body, headers = {"model": "slow", "source": str(slow)}, {"X-Api-Key": keys["adder"]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}{PATH}", json=body, headers=headers, timeout=0.3)
    began = time.monotonic()
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert time.monotonic() - began < 1
    again = httpx.post(f"{url}{PATH}", json=body, headers=headers, timeout=120)
    assert again.status_code in (200, 201), again.text
    assert [version.name for version in store.all_versions("slow")] == ["slow@1"]
