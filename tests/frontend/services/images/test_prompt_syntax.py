"""How prompts are read, on `/t2i` and A1111's routes, of models that read A1111's syntax and of those that do not."""

import json

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from frontends import served_models
from noria.config import Config, EngineConfig
from noria.testing.fake_engine import FAKE_MODEL

XL = msgspec.structs.replace(
    FAKE_MODEL, name="xl", family="stable-diffusion-xl", family_clip_skip=2, default_clip_skip=2
)
SD2 = msgspec.structs.replace(FAKE_MODEL, name="sd2", max_clip_skip=23)
FLUX = msgspec.structs.replace(
    FAKE_MODEL, name="flux", family="flux", prompt_syntaxes=("plain",), max_clip_skip=0, family_clip_skip=0,
    default_clip_skip=0,
)  # fmt: skip
ANIME = msgspec.structs.replace(FAKE_MODEL, name="anime", default_prompt_syntax="a1111", default_clip_skip=2)
WEIGHTED = "a (red:1.3) circle, [blue]"
CHANGING = "a [red:(green:1.2):0.5] circle AND [easynegative|b] :0.7"


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    embeddings = tmp_path_factory.mktemp("embeddings")
    save_file({"emb_params": np.zeros((2, 768), np.float32)}, embeddings / "easynegative.safetensors")
    (embeddings / "old.pt").write_bytes(b"")
    config = Config(engine=EngineConfig(embeddings=(str(embeddings),)))
    with served_models(folder, FAKE_MODEL, XL, SD2, FLUX, ANIME, config=config) as client:
        yield client


@pytest.fixture
def served(server):
    """A client and the engine, which is reset."""
    server.engine.reset()
    return server, server.engine


@pytest.mark.parametrize(
    ("fields", "syntax", "clip_skip"),
    [
        ({"model": "tiny"}, None, None),
        ({"model": "tiny", "prompt_syntax": "plain", "clip_skip": 1}, None, None),
        ({"model": "tiny", "prompt_syntax": "a1111", "clip_skip": 2}, "a1111", 2),
        ({"model": "xl", "clip_skip": 2}, None, None),
        ({"model": "xl", "clip_skip": 1}, None, 1),
        ({"model": "flux", "prompt_syntax": "plain"}, None, None),
        ({"model": "anime"}, "a1111", 2),
        ({"model": "anime", "prompt_syntax": "plain", "clip_skip": 1}, "plain", 1),
    ],
)
def test_what_is_the_default_of_every_model_is_left_out(served, fields, syntax, clip_skip):
    client, engine = served
    answer = client.post("/t2i", json={"prompt": WEIGHTED, **fields})
    assert answer.status_code == 200, answer.text
    (request,) = engine.submitted
    assert (request.payload.prompt_syntax, request.payload.clip_skip) == (syntax, clip_skip)
    recovered = client.post("/v1/images/metadata", content=answer.content).json()
    assert client.post("/t2i", json=recovered["settings"]).status_code == 200
    assert engine.submitted[1].payload == request.payload


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "flux", "prompt_syntax": "a1111"}, "prompt_syntax is 'a1111', but flux reads prompts as they are"),
        ({"model": "flux", "clip_skip": 1}, "clip_skip is 1, but flux has no choice of layers"),
        ({"clip_skip": 13}, "clip_skip is 13; allowed are 1 (the last layer) to 12"),
        ({"prompt_syntax": "comfy"}, "comfy"),
        ({"prompt_syntax": "a1111", "prompt": "[a:(b:nan):5]"}, "prompt: the weight of '(b:nan)'"),
        ({"prompt_syntax": "a1111", "prompt": "[a:[old:b:0.9]:3]"}, "prompt: the embedding 'old' is a .pt file"),
        ({"prompt_syntax": "a1111", "prompt": "a <lora:b:1>"}, "prompt has '<lora:b:1>'"),
        ({"prompt_syntax": "a1111", "negative_prompt": "(a:nan)"}, "negative_prompt: the weight of '(a:nan)'"),
        ({"prompt_syntax": "a1111", "prompt": "(" * 4000}, "inside of 64 others"),
        ({"prompt_syntax": "a1111", "prompt": "an old cat"}, "prompt: the embedding 'old' is a .pt file, a pickle"),
    ],
)
def test_what_cannot_be_read_is_rejected(served, fields, says):
    client, engine = served
    answer = client.post("/t2i", json={"prompt": "a", **fields})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert not engine.submitted


@pytest.mark.parametrize(
    ("model", "clip_skip", "syntax", "layer", "ignored"),
    [
        ("tiny", 2, "a1111", 2, []),
        ("tiny", 1, "a1111", None, []),
        ("anime", 1, "a1111", 1, []),
        ("anime", None, "a1111", 2, []),
        ("xl", 2, "a1111", None, []),
        ("xl", 3, "a1111", None, ["override_settings.CLIP_stop_at_last_layers"]),
        ("sd2", 3, "a1111", None, ["override_settings.CLIP_stop_at_last_layers"]),
        ("flux", 1, None, None, ["weights in prompt: '(red:1.3)', '[blue]'", "weights in negative_prompt: '(ugly)'"]),
    ],
)
def test_clients_of_a1111_get_its_syntax_where_the_model_reads_it(served, model, clip_skip, syntax, layer, ignored):
    client, engine = served
    settings = {"sd_model_checkpoint": model, "CLIP_stop_at_last_layers": clip_skip}
    fields = {"prompt": WEIGHTED, "negative_prompt": "((ugly))", "override_settings": settings}
    answer = client.post("/sdapi/v1/txt2img", json=fields)
    assert answer.status_code == 200, answer.text
    payload = engine.submitted[0].payload
    assert (payload.prompt_syntax, payload.clip_skip) == (syntax, layer)
    info = json.loads(answer.json()["info"])
    assert info["ignored"] == ignored
    assert (f"Clip skip: {layer}" in info["infotexts"][0]) == (layer is not None)


def test_clip_skip_is_a_setting_of_a_client(served):
    client, engine = served
    for model, expected in (("anime", 2), ("xl", 1), ("flux", 1), ("tiny", 1)):
        assert client.post("/sdapi/v1/options", json={"sd_model_checkpoint": model}).status_code == 200
        assert client.get("/sdapi/v1/options").json()["CLIP_stop_at_last_layers"] == expected
    assert client.post("/sdapi/v1/options", json={"CLIP_stop_at_last_layers": 2}).status_code == 200
    assert client.get("/sdapi/v1/options").json()["CLIP_stop_at_last_layers"] == 2
    for own in ({}, {"override_settings": {"CLIP_stop_at_last_layers": 1}}):
        client.post("/sdapi/v1/txt2img", json={"prompt": "a", **own})
    assert [each.payload.clip_skip for each in engine.submitted] == [2, None]
    client.post("/sdapi/v1/options", json={"CLIP_stop_at_last_layers": 1})


def test_embeddings_are_named_in_prompts_of_a1111s_syntax_and_listed(served):
    client, engine = served
    for fields in ({"prompt_syntax": "a1111"}, {}, {"prompt_syntax": "a1111", "negative_prompt": "x"}):
        body = {"prompt": "an elder cat", "negative_prompt": "(EasyNegative:1.2)", **fields}
        assert client.post("/t2i", json=body).status_code == 200
    named = [[each.name for each in request.payload.embeddings] for request in engine.submitted]
    assert named == [["easynegative"], [], []]
    assert [*client.get("/sdapi/v1/embeddings").json()["loaded"]] == ["easynegative"]


def test_an_embedding_is_found_in_the_texts_of_all_steps(served):
    client, engine = served
    fields = {"prompt": CHANGING, "negative_prompt": "a AND [b:c:3]", "prompt_syntax": "a1111"}
    answer = client.post("/t2i", json=fields)
    assert answer.status_code == 200, answer.text
    payload = engine.submitted[0].payload
    assert (payload.prompt, payload.negative_prompt) == (CHANGING, "a AND [b:c:3]")
    assert [each.name for each in payload.embeddings] == ["easynegative"]
