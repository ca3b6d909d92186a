"""API keys over HTTP: who gets in, and what is told to who does not."""

import base64
import contextlib
import logging
import re

import httpx
import openai
import pytest

from noria.config import Config, FrontendConfig
from noria.errors import ConfigError
from noria.frontend.app import build_app
from noria.frontend.engine_link import EngineLink
from noria.frontend.keys import OPEN_PATHS, presented_key
from noria.keys import draw_key


@pytest.fixture
def serve_keys(serve, new_engine, tmp_path, until):
    """Starts a front end; gives its address, the engine, and the key of each name in `limits`: its further lines in the file."""

    @contextlib.contextmanager
    def start(processes=1, **limits):
        drawn = {name: draw_key(name) for name in limits}
        file = tmp_path / "keys.toml"
        file.write_text("\n".join(drawn[name][1] + lines for name, lines in limits.items()))
        engine = new_engine()
        frontend = FrontendConfig(keys_file=str(file), processes=processes)
        with serve(Config(data_dir=str(tmp_path), frontend=frontend), engine) as (address, _):
            until(lambda: httpx.get(f"{address}/readyz", verify=False).status_code == 200)
            yield address, engine, {name: key for name, (key, _) in drawn.items()}

    return start


@pytest.fixture
def client_of(serve_keys):
    """Makes clients of one server, by the name of their key."""
    with contextlib.ExitStack() as stack:
        address, engine, keys = stack.enter_context(serve_keys(alice="", bob=""))

        def make(name=None):
            headers = {"Authorization": f"Bearer {keys[name]}"} if name else {}
            return stack.enter_context(httpx.Client(base_url=address, headers=headers, verify=False, timeout=30))

        make.address, make.engine, make.keys = address, engine, keys
        yield make


def basic(password, user="user"):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# ── Who gets in ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_route_but_the_open_ones_needs_a_key(client_of):
    nobody = client_of()
    for route in build_app(Config(), EngineLink([])).routes:
        path = re.sub(r"{.*?}", "x", route.path)
        for method in route.methods - {"HEAD"}:
            answer = nobody.request(method, path)
            assert (answer.status_code == 401) is (route.path not in OPEN_PATHS), (method, path, answer.status_code)
    assert {"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/"} == OPEN_PATHS


def test_a_key_opens_every_route(client_of):
    alice = client_of("alice")
    assert alice.post("/t2i", json={"prompt": "p"}).status_code == 200
    assert alice.get("/v1/models").status_code == 200
    assert alice.get("/v1/jobs").status_code == 200
    assert alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}).status_code == 200


@pytest.mark.parametrize(
    "way", ["bearer", "Bearer with spaces", "x-api-key", "basic", "x-api-key before authorization"]
)
def test_a_key_comes_in_several_ways(client_of, way):
    key = client_of.keys["bob"]
    headers = {
        "bearer": {"Authorization": f"bearer {key}"},
        "Bearer with spaces": {"Authorization": f"Bearer   {key}"},
        "x-api-key": {"X-Api-Key": key},
        "basic": {"Authorization": basic(key)},
        "x-api-key before authorization": {"X-Api-Key": key, "Authorization": "Bearer of-a-proxy"},
    }[way]
    assert client_of().get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Digest x"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic \u00e9".encode()},
        {"Authorization": basic("wrong")},
        {"X-Api-Key": ""},
        {"X-Api-Key": "\u00e9".encode()},
    ],
)
def test_what_is_no_key_of_ours_is_401(client_of, headers):
    answer = client_of().post("/t2i", json={"prompt": "p"}, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (401, "unauthorized", "authentication_error")
    assert answer.headers["www-authenticate"].startswith('Bearer realm="noria", Basic')
    assert client_of.engine.submitted == []


def test_a_digest_is_not_a_key(client_of, tmp_path):
    digest = re.search(r"[0-9a-f]{64}", (tmp_path / "keys.toml").read_text())[0]
    assert client_of().get("/v1/models", headers={"X-Api-Key": digest}).status_code == 401


def test_a_password_may_hold_colons_and_no_key_is_none():
    assert presented_key({"authorization": basic("a:b", user="")}) == b"a:b"
    assert presented_key({"authorization": basic("\u00e9")}) == "\u00e9".encode()
    assert presented_key({}) is None


def test_openais_client_raises_its_authentication_error(client_of):
    with httpx.Client(verify=False) as web:
        settings = {"base_url": f"{client_of.address}/v1", "http_client": web, "max_retries": 0}
        stranger = openai.OpenAI(api_key="wrong", **settings)
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.images.generate(prompt="p")
        assert caught.value.code == "unauthorized"
        alice = openai.OpenAI(api_key=client_of.keys["alice"], **settings)
        assert alice.images.generate(prompt="p").data[0].b64_json


def test_a1111s_clients_read_why(client_of):
    answer = client_of().get("/sdapi/v1/progress")
    assert answer.status_code == 401
    assert "password of Basic" in answer.json()["detail"]


def test_the_log_tells_whose_request_it_was_and_no_key(client_of, caplog):
    with caplog.at_level(logging.INFO, "noria.access"):
        client_of("alice").get("/v1/models", headers={"x-request-id": "abc"})
        client_of().get("/v1/models", headers={"x-request-id": "def"})
    lines = [record.getMessage() for record in caplog.records if record.name == "noria.access"]
    assert any(line.startswith("GET /v1/models 200") and line.endswith(" s abc of alice") for line in lines)
    assert any(line.startswith("GET /v1/models 401") and line.endswith(" s def") for line in lines)
    assert client_of.keys["alice"] not in caplog.text


def test_the_document_tells_of_keys_where_there_are_some(client_of, client):
    locked, open_to_all = client_of().get("/openapi.json").json(), client.get("/openapi.json").json()
    schemes = locked["components"]["securitySchemes"]
    assert {scheme["type"] for scheme in schemes.values()} == {"http", "apiKey"}
    for path, item in locked["paths"].items():
        for operation in item.values():
            assert ("security" in operation) is (path not in OPEN_PATHS)
            assert "security" not in operation or "401" in operation["responses"]
    assert "securitySchemes" not in open_to_all["components"]
    assert "security" not in open_to_all["paths"]["/t2i"]["post"]


def test_no_front_end_starts_with_a_file_that_is_none(tmp_path):
    config = Config(frontend=FrontendConfig(keys_file=str(tmp_path / "none.toml")))
    with pytest.raises(ConfigError, match="cannot be read"):
        build_app(config, EngineLink([]))
