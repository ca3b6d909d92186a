"""Responses as the judge of a canary gets to know them, from the HTTP request to the report."""

import asyncio
import json

import httpx
import msgspec
import pytest

from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.observe.metrics.exposition import exposition
from noria.protocol.routes import Route, Routes, Target
from noria.testing.fake_encoder import FAKE_ENCODER, FakeTokenizer
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL, FakeEngine

MODELS = (FAKE_MODEL, FAKE_ENCODER)
CANARIES = tuple(msgspec.structs.replace(model, fingerprint="bbbbbbbbbbbb") for model in MODELS)
ROUTES = Routes(
    1,
    tuple(
        Route(
            model.name,
            Target(1, f"{model.name}@1", "sha256:0", model.fingerprint, ()),
            Target(2 + number, f"{model.name}@2", "sha256:1", "bbbbbbbbbbbb", ()),
            1.0,
        )
        for number, model in enumerate(MODELS)
    ),
)
IMAGE, TEXT = {"prompt": "a fox", "inference_steps": 2}, {"input": "a fox", "model": FAKE_ENCODER.name}
OK, REJECTION, NOTHING = (1, 0, 0), (1, 0, 1), ()  # responses, errors, rejections


@pytest.fixture(scope="module")
def respond(tmp_path_factory):
    """Returns the status of a request's response, and what it counted for the canary that it was sent to."""
    folder = tmp_path_factory.mktemp("judged")
    runner = asyncio.Runner()
    with FakeEngine(f"ipc://{folder}/engine", models=(*MODELS, *CANARIES), load=FAKE_LOAD) as engine, runner:
        pool = EnginePool([engine.address], first_states_wait_s=10.0)
        app = build_app(Config(data_dir=str(folder)), pool, load_tokenizer=FakeTokenizer)
        versions = app.state.submission.versions
        versions.follow(ROUTES)
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())

        async def send(path, content):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as web:
                response = await web.post(path, content=content, headers={"content-type": "application/json"})
            counts = [(each.canary.n, each.canary.errors, each.canary.rejections) for each in versions.take_ended()]
            return response.status_code, *counts

        runner.run(send("/t2i", json.dumps(IMAGE)))  # starts the thread that writes images
        yield lambda path, body: runner.run(send(path, body if isinstance(body, bytes) else json.dumps(body)))
        runner.run(lifespan.__aexit__(None, None, None))


@pytest.mark.parametrize(
    ("path", "body", "status", "counted"),
    [
        ("/t2i", IMAGE, 200, OK),
        ("/t2i", IMAGE | {"width": 7}, 400, REJECTION),
        ("/t2i", IMAGE | {"loras": [{"name": "unknown"}]}, 404, REJECTION),
        ("/v1/images/generations", {"prompt": "a fox", "stream": True}, 200, OK),
        ("/v1/jobs", {"input": IMAGE | {"width": 7}}, 400, REJECTION),
        ("/v1/embeddings", TEXT, 200, OK),
        ("/v1/embeddings", TEXT | {"dimensions": 10**6}, 400, REJECTION),
        ("/embed", {"inputs": ""}, 400, REJECTION),
        ("/v1/embeddings", TEXT | {"model": "unknown"}, 404, NOTHING),
        ("/t2i", IMAGE | {"unknown": 1}, 400, NOTHING),
        ("/t2i", b"no JSON", 400, NOTHING),
        ("/nothing", IMAGE, 404, NOTHING),
    ],
)
def test_responses_count_for_the_version_that_was_chosen(respond, path, body, status, counted):
    assert respond(path, body) == (status, *([counted] if counted else []))


def test_rejections_are_counted_by_version_in_the_metrics(respond):
    def count():
        labels = f'{{model="{FAKE_MODEL.name}",outcome="invalid_field",version="{FAKE_MODEL.name}@2"}}'
        lines = exposition()[0].decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("noria_deployment_requests_total" + labels)
        )

    before = count()
    respond("/t2i", IMAGE | {"width": 7})
    assert count() == before + 1
