"""LoRA adapters in requests of every API, and in the files of images."""

import base64
import json

import msgspec
import pytest

from frontends import served_client
from noria.config import Config, EngineConfig
from noria.images.a1111_metadata import from_infotext
from noria.images.metadata_io import read_metadata
from noria.models.adapters.lora_folders import digest_of
from noria.protocol.diffusion import Lora
from waiting import wait_until


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    for name in ("ink", "soft light"):
        (folder / f"{name}.safetensors").write_bytes(bytes(8) + name.encode())
    return folder


@pytest.fixture(scope="module")
def server(loras, shared_engine):
    """A client of a server with two adapters."""
    with served_client(Config(engine=EngineConfig(loras=(str(loras),))), shared_engine) as client:
        yield client


@pytest.fixture
def adapted(server, engine):
    """The client; the engine behind it is reset."""
    return server


@pytest.fixture
def ink(loras):
    return Lora("ink", 0.8, digest_of(loras / "ink.safetensors"))


def test_an_engine_and_the_file_get_name_weight_and_digest(adapted, engine, ink, tmp_path):
    answer = adapted.post("/t2i", json={"prompt": "p", "loras": [{"name": "ink", "weight": 0.8}]})
    assert answer.status_code == 200, answer.text
    assert engine.submitted[0].payload.loras == (ink,)
    (tmp_path / "a.png").write_bytes(answer.content)
    metadata = read_metadata(tmp_path / "a.png")
    assert metadata.loras == (ink,)
    again = adapted.post("/v1/images/metadata", content=answer.content).json()
    assert again["rejected"] == []
    assert again["settings"]["loras"] == [msgspec.to_builtins(ink)]
    assert adapted.post("/t2i", json=again["settings"]).status_code == 200
    assert engine.submitted[-1].payload.loras == (ink,)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([{"name": "ink", "weight": 10.5}], "weight of 'ink' is 10.5; allowed are -10.0 to 10.0"),
        ([{"name": "ink", "digest": "0" * 12}], "'ink' has digest"),
        ([{"name": "ink"}] * 9, "has 9 entries; at most 8"),
        ([{"name": "ink", "rank": 3}], "rank"),
        ([{"weight": 1.0}], "name"),
        ("ink", "allowed is a list of objects"),
    ],
)
def test_other_adapters_are_rejected(adapted, engine, asked, message):
    answer = adapted.post("/t2i", json={"prompt": "p", "loras": asked})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert engine.submitted == []


def test_an_unknown_adapter_is_not_found(adapted, engine):
    answer = adapted.post("/t2i", json={"prompt": "p", "loras": [{"name": "no"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "lora_not_found")
    assert answer.json()["error"]["message"] == "loras: tiny has no LoRA 'no'; allowed are 'ink', 'soft light'."
    assert engine.submitted == []


def test_a_server_without_adapters_says_so(client):
    answer = client.post("/t2i", json={"prompt": "p", "loras": [{"name": "ink"}]})
    assert answer.status_code == 404
    assert "tiny has no LoRA 'ink'; it has none; the operator sets folders of them: engine.loras." in answer.text
    assert client.get("/sdapi/v1/loras").json() == []


def test_openais_route_and_the_list_of_models_have_them(adapted, engine, ink):
    body = {"prompt": "p", "loras": [{"name": "ink", "weight": 0.8}]}
    assert adapted.post("/v1/images/generations", json=body).status_code == 200
    assert engine.submitted[0].payload.loras == (ink,)
    assert adapted.get("/v1/models").json()["data"][0]["noria"]["loras"] == ["ink", "soft light"]


def test_a_job_has_them(adapted, engine, ink):
    body = {"input": {"prompt": "p", "loras": [{"name": "ink", "weight": 0.8}]}}
    answer = adapted.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    wait_until(lambda: engine.submitted)
    assert engine.submitted[0].payload.loras == (ink,)
    bad = adapted.post("/v1/jobs", json={"input": {"prompt": "p", "loras": [{"name": "no"}]}})
    assert bad.status_code == 404


def test_a1111s_prompts_name_them(adapted, engine, ink, loras):
    soft = Lora("soft light", 1.0, digest_of(loras / "soft light.safetensors"))
    body = {"prompt": "a <lora:ink:0.8> red <lora:soft light>", "negative_prompt": "<lora:ink:1>"}
    answer = adapted.post("/sdapi/v1/txt2img", json=body)
    assert answer.status_code == 200, answer.text
    payload = engine.submitted[0].payload
    assert (payload.prompt, payload.loras) == ("a  red", (ink, soft))
    assert payload.negative_prompt == "<lora:ink:1>"  # as in A1111
    (text,) = json.loads(answer.json()["info"])["infotexts"]
    assert text.startswith("a  red <lora:ink:0.8> <lora:soft light:1>\n")
    assert from_infotext(text).loras == (ink, soft)
    assert base64.b64decode(answer.json()["images"][0]).startswith(b"\x89PNG")


def test_a1111s_clients_list_them_without_their_folders(adapted, loras):
    answer = adapted.get("/sdapi/v1/loras")
    assert [each["name"] for each in answer.json()] == ["ink", "soft light"]
    assert str(loras) not in answer.text


@pytest.mark.parametrize(
    ("prompt", "status", "message"),
    [
        ("<lora:no:1>", 404, "prompt: tiny has no LoRA 'no'"),
        ("<lora::1>", 404, "prompt: tiny has no LoRA ''"),
        (f"<lora:{'x' * 500}:1>", 404, "prompt: tiny has no LoRA 'xxx"),
        ("<lora:ink:0.5:0.8>", 400, "'<lora:ink:0.5:0.8>', whose weight is not one number"),
        ("<lora:ink:nan>", 400, "is nan; allowed are"),
        ("<lora:ink:>x<lora:ink:te=1>", 400, "'<lora:ink:te=1>', whose weight is not one number"),
    ],
)
def test_a1111s_prompts_with_others_are_rejected(adapted, engine, prompt, status, message):
    answer = adapted.post("/sdapi/v1/txt2img", json={"prompt": prompt})
    assert answer.status_code == status
    assert message in answer.json()["detail"]
    assert engine.submitted == []
