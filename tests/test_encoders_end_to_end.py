"""Images and texts from one server: real processes, a small encoder, the bundled model, OpenAI's own client."""

import concurrent.futures
import pathlib
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from encoders import TEXTS, make_encoder, sentence_transformer
from noria.testing.server import RunningServer, running_server
from waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_encoder(tmp_path_factory.mktemp("small"), **sentence_transformer())


@pytest.fixture(scope="module")
def server(encoder: pathlib.Path) -> Iterator[RunningServer]:
    arguments = ["bundled", "--slots", "2", "--threads", "1", "--additional-models", str(encoder)]
    with running_server([*arguments, "--restart-wait-s", "280"]) as running:
        with httpx.Client(base_url=f"http://127.0.0.1:{running.port}") as web:
            wait_until(lambda: all(each["state"] == "ready" for each in web.get("/readyz").json()["engines"]))
        yield running


def embed(server: RunningServer, texts: list[str]) -> np.ndarray:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="noria", input=texts)
        return np.array([each.embedding for each in answer.data], np.float32)


def test_embeddings_equal_sentence_transformers_alone_and_together(
    server: RunningServer, encoder: pathlib.Path
) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [text for text in TEXTS if text] * 8
    expected = SentenceTransformer(str(encoder), device="cpu").encode(texts)
    np.testing.assert_allclose(embed(server, texts), expected, atol=1e-5)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        alone = np.concatenate(list(pool.map(lambda text: embed(server, [text]), texts)))
    np.testing.assert_allclose(alone, expected, atol=1e-5)


def test_images_come_from_the_same_port(server: RunningServer) -> None:
    body = {"prompt": "a red circle", "inference_steps": 2}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as web:
        assert web.post("/t2i", json=body).headers["content-type"] == "image/png"
        kinds = [each["noria"]["kind"] for each in web.get("/v1/models").json()["data"]]
    assert sorted(kinds) == ["diffusion", "encoder"]


def test_texts_whose_engine_is_killed_are_encoded_by_its_next_process(server: RunningServer) -> None:
    texts = ["words " * 60] * 2000
    expected = embed(server, texts)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as web,
    ):
        name = next(each["id"] for each in web.get("/v1/models").json()["data"] if each["noria"]["kind"] == "encoder")
        future = pool.submit(embed, server, texts)
        wait_until(lambda: web.get(f"/v1/models/{name}").json()["load"]["num_waiting"])
        for engine in server.children("engine"):
            engine.kill()
        assert not future.done()
        np.testing.assert_allclose(future.result(), expected, atol=1e-5)
