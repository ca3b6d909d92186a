"""examples/user_code: nearest captions, in front of a fake engine, and by real models as its settings have it."""

import pathlib

import httpx
import numpy as np
import pytest

from frontends import folder, serving  # noqa: F401 - a fixture
from noria.settings import load
from noria.testing.fake_encoder import FAKE_ENCODER, fake_vector, word_id
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from noria.testing.server import running_server
from waiting import wait_until

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "user_code"


def test_the_example_finds_the_nearest_caption_and_draws_it(folder, monkeypatch):  # noqa: F811 - a fixture
    monkeypatch.chdir(ROOT)
    captions = (EXAMPLE / "captions.txt").read_text().splitlines()
    query = captions[3]
    text = (EXAMPLE / "noria.toml").read_text().replace("minilm", "fake-encoder").replace("noria-shapes", "tiny")
    (folder / "noria.toml").write_text(text)
    with (
        FakeEngine(f"ipc://{folder}/example", models=(FAKE_MODEL, FAKE_ENCODER)) as engine,
        serving(load(folder / "noria.toml", {}, {}), engine) as (url, _),
        httpx.Client(base_url=url, timeout=60) as web,
    ):
        wait_until(lambda: web.get("/readyz").status_code == 200)
        answer = web.post("/v1/endpoints/captions", json={"query": query, "draw": True}).json()
        assert web.post("/v1/endpoints/captions", json={}).status_code == 400
        assert web.post("/v1/endpoints/captions", json={"query": "a"}).json().keys() == {"found"}
        (image_request,) = (each for each in engine.submitted if each.model == "tiny")
    vectors = np.stack([fake_vector([1, *map(word_id, each.split()), 2]) for each in captions])
    best = int(np.argmax(vectors @ vectors[3]))
    assert answer["found"][0]["caption"] == captions[best] == image_request.payload.prompt
    assert answer["image"]


@pytest.mark.slow  # exports MiniLM and starts a server of both models: 40 s
def test_the_example_runs_with_minilm_and_the_bundled_model(monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = ["bundled", "--additional-models", "minilm", "--config", str(EXAMPLE / "noria.toml")]
    with (
        running_server([*arguments, "--restart-wait-s", "280"]) as running,
        httpx.Client(base_url=f"http://127.0.0.1:{running.port}", timeout=280) as web,
    ):
        wait_until(lambda: all(each["state"] == "ready" for each in web.get("/readyz").json()["engines"]))
        body = {"query": "a green shape with three corners", "draw": True}
        answer = web.post("/v1/endpoints/captions", json=body).json()
        assert answer["found"][0]["caption"] == "a small green triangle"
        assert answer["image"].startswith("iVBORw0")
        wait_until(lambda: 'noria_stat_similarity_count{endpoint="captions",' in web.get("/metrics").text)
