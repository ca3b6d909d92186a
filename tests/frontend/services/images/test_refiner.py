"""The refiner in requests of every API, and in the files of images."""

import re

import msgspec
import pytest
from PIL import Image

from frontends import served_models
from noria.config import Config, EngineConfig
from noria.images.metadata_io import read_metadata
from noria.models.adapters.refiner_folders import RefinerFolders
from noria.protocol.diffusion import Refinement
from noria.testing.fake_engine import FAKE_MODEL
from waiting import wait_until


@pytest.fixture(scope="module")
def config(tiny_refiner_folder):
    return Config(engine=EngineConfig(loras=(), refiners=(str(tiny_refiner_folder),)))


@pytest.fixture(scope="module")
def spec(tiny_xl_folder):
    schedulers = (*FAKE_MODEL.schedulers, "ipndm")
    return msgspec.structs.replace(
        FAKE_MODEL, folder=str(tiny_xl_folder), family="stable-diffusion-xl", schedulers=schedulers
    )


@pytest.fixture(scope="module")
def shared(folder, config, spec):
    with served_models(folder, spec, config=config) as client:
        yield client


@pytest.fixture
def server(shared):
    """A client of a server with a refiner."""
    shared.engine.reset()
    return shared


@pytest.fixture
def refining(server):
    return server.engine


@pytest.fixture
def refined(config, spec):
    """The refinement that an engine gets."""
    return Refinement(0.7, "tiny-refiner", RefinerFolders.of(config.engine).for_model(spec).digest)


def test_an_engine_and_the_file_get_its_name_and_digest(server, refining, refined, tmp_path):
    answer = server.post("/t2i", json={"prompt": "p", "refiner": {"start": 0.7}})
    assert answer.status_code == 200, answer.text
    assert refining.submitted[0].payload.refiner == refined
    (tmp_path / "a.png").write_bytes(answer.content)
    assert read_metadata(tmp_path / "a.png").refiner == refined
    text = Image.open(tmp_path / "a.png").text["parameters"]
    assert f"Refiner: tiny-refiner [{refined.digest}], Refiner switch at: 0.7" in text
    again = server.post("/v1/images/metadata", content=answer.content).json()
    assert (again["settings"]["refiner"], again["rejected"]) == (msgspec.to_builtins(refined), [])
    assert server.post("/t2i", json=again["settings"]).status_code == 200
    assert refining.submitted[1].payload == refining.submitted[0].payload


def test_other_apis_have_it_too(server, refining, refined):
    def refiner_of(path, body):
        answer = server.post(path, json=body)
        assert answer.status_code in (200, 202), answer.text
        wait_until(lambda: refining.submitted)
        found = refining.submitted[0].payload.refiner
        refining.reset()
        return found

    default = msgspec.structs.replace(refined, start=0.8)
    assert refiner_of("/v1/images/generations", {"prompt": "p", "refiner": {"start": 0.7}}) == refined
    assert refiner_of("/v1/jobs", {"input": {"prompt": "p", "refiner": {}}}) == default
    a1111 = {"prompt": "p", "steps": 2}
    path = "/sdapi/v1/txt2img"
    checkpoint = {"refiner_checkpoint": f"tiny-refiner [{refined.digest}]"}
    assert refiner_of(path, a1111 | checkpoint | {"refiner_switch_at": "0.7"}) == refined
    assert refiner_of(path, a1111 | {"refiner_checkpoint": "tiny-refiner.safetensors"}) == default
    for off in ({}, {"refiner_switch_at": 0.5}, {"refiner_checkpoint": "None"}, checkpoint | {"refiner_switch_at": 1}):
        assert refiner_of(path, a1111 | off) is None


def test_models_list_it(server, client):
    assert server.get("/v1/models/tiny").json()["noria"]["refiner"] == "tiny-refiner"
    assert client.get("/v1/models/tiny").json()["noria"]["refiner"] is None


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/t2i", {"refiner": {"start": 1}}, "refiner: its start is 1.0; allowed are numbers above 0 and below 1"),
        ("/t2i", {"refiner": {"start": 0}}, "refiner: its start is 0.0"),
        ("/t2i", {"refiner": {"name": "x"}}, "tiny has no refiner 'x'; allowed is 'tiny-refiner'"),
        ("/t2i", {"refiner": {"at": 1}}, "refiner has the unknown field .at"),
        ("/t2i", {"refiner": {}, "scheduler": "ipndm"}, "'ipndm' cannot be handed over to a refiner.* use one of ddim"),
        ("/sdapi/v1/txt2img", {"refiner_checkpoint": "x"}, "refiner_checkpoint: tiny has no refiner 'x'"),
        (
            "/sdapi/v1/txt2img",
            {"refiner_checkpoint": "tiny-refiner", "refiner_switch_at": -1},
            "refiner_checkpoint: its start is -1.0",
        ),
    ],
)
def test_what_cannot_be_refined_is_rejected_before_the_engine(server, refining, path, fields, words):
    answer = server.post(path, json={"prompt": "p"} | fields)
    assert answer.status_code in (400, 404, 422), answer.text
    assert re.search(words, answer.text), answer.text
    assert not refining.submitted


def test_a_server_without_refiners_says_how_to_have_one(client):
    answer = client.post("/t2i", json={"prompt": "p", "refiner": {}})
    assert answer.status_code == 404
    assert "tiny has no refiner: it has none; the operator sets its folder: engine.refiners" in answer.text
