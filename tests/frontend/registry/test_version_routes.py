"""Deployed versions over HTTP: which one answers, who may choose, and what responses, logs and files say of it."""

import io
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from frontends import served_client, serving
from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.images.metadata_io import read_metadata
from noria.protocol.routes import Route, Routes, Target
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from waiting import wait_until, wait_until_ready

CONTROL, CANARY = FAKE_MODEL, msgspec.structs.replace(FAKE_MODEL, fingerprint="bbbbbbbbbbbb")
TARGETS = [
    Target(number, f"shapes@{number}", f"sha256:{number}", spec.fingerprint, ())
    for number, spec in ((1, CONTROL), (2, CANARY))
]
ROUTES = Routes(1, (Route("tiny", *TARGETS, canary_share=0.5),))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[FakeEngine]:
    with FakeEngine(f"ipc://{folder}/versions", models=(CONTROL, CANARY)) as engine:
        yield engine


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, str]:
    """A key of a tester and one of a client of images; the file of both."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    made = {"tester": generate_key("tester", ["generate", "lineage", "deploy"]), "client": generate_key("client")}
    file.write_text("".join(table for _, table in made.values()))
    return {name: key for name, (key, _) in made.items()} | {"file": str(file)}


@pytest.fixture(scope="module")
def url(engine, keys) -> Iterator[str]:
    frontend = FrontendConfig(api_keys_file=keys["file"], sticky_header="X-User")
    with serving(Config(frontend=frontend), engine, routes=ROUTES) as (address, _):
        wait_until_ready(address)
        yield address


@pytest.fixture
def post(url, keys):
    with httpx.Client(base_url=url, timeout=60) as client:

        def send(key="client", metadata=False, **headers):
            body = {"prompt": "a circle", "metadata": metadata}
            return client.post("/t2i", json=body, headers={"X-Api-Key": keys[key], **headers})

        yield send


def version_of(response) -> tuple[str, str]:
    assert response.status_code == 200, response.text
    return response.headers["x-noria-model-version"], response.headers["x-noria-deployment"]


def test_both_versions_answer_and_say_so_in_response_log_file_and_to_the_engine(post, engine, captured_log_fields):
    with captured_log_fields("noria.requests") as lines:
        found = {version_of(response := post(metadata=True)): response for _ in range(40)}
        assert found.keys() == {("shapes@1", "1"), ("shapes@2", "2")}
        for (version, number), response in found.items():
            metadata = read_metadata(io.BytesIO(response.content), "it")
            assert (metadata.registered_version, metadata.deployment) == (version, int(number))
            assert metadata.model_digest == f"sha256:{number}"
            request_id = response.headers["x-request-id"]
            line = wait_until(
                lambda sent=request_id: next((each for each in lines() if each["request_id"] == sent), None)
            )
            assert (line["version"], line["deployment"]) == (version, int(number))
            (sent,) = (request for request in engine.submitted if request.request_id == request_id)
            assert sent.model_version == line["model_version"] == TARGETS[int(number) - 1].fingerprint


def test_a_user_stays_with_a_version(post):
    for user in ("ann", "bob", "eve"):
        assert len({version_of(post(**{"X-User": user})) for _ in range(8)}) == 1


@pytest.mark.parametrize("wanted", ["canary", "shapes@2"])
def test_a_tester_chooses(post, wanted):
    assert {version_of(post("tester", **{"X-Noria-Version": wanted})) for _ in range(8)} == {("shapes@2", "2")}


def test_a_key_without_the_scope_does_not_choose(post):
    response = post("client", **{"X-Noria-Version": "canary"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "missing_scope")


def test_a_version_that_is_not_served_is_rejected_with_those_that_are(post):
    response = post("tester", **{"X-Noria-Version": "shapes@7"})
    assert response.status_code == 400
    assert "shapes@1" in response.json()["error"]["message"]
    assert "shapes@2" in response.json()["error"]["message"]


def test_without_keys_only_this_machine_chooses(engine):
    with served_client(Config(), engine, routes=ROUTES) as client:
        headers = {"X-Noria-Version": "canary"}
        assert version_of(client.post("/t2i", json={"prompt": "p"}, headers=headers)) == ("shapes@2", "2")
        elsewhere = client.post("/t2i", json={"prompt": "p"}, headers=headers | {"X-Forwarded-For": "203.0.113.9"})
        assert elsewhere.status_code == 401


def test_a_model_without_a_deployment_says_its_fingerprint(folder):
    with FakeEngine(f"ipc://{folder}/plain") as plain, serving(Config(), plain) as (url, _):
        wait_until_ready(url)
        response = httpx.post(f"{url}/t2i", json={"prompt": "p"}, timeout=60)
    assert response.headers["x-noria-model-version"] == CONTROL.fingerprint
    assert "x-noria-deployment" not in response.headers
