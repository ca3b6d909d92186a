"""LangChain's and LlamaIndex' unmodified clients, and aiperf, in front of a real server with a small model."""

import json
import pathlib
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from encoders import make_encoder, sentence_transformer
from noria.testing.server import running_server
from python_environment import environment_python

# A real server, which exports its model, and environments of 100 packages and more: a minute, the first time several.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TEXTS = ["a red circle", "The quick brown fox jumps over the lazy dog.", "Größe, naïve café — 東京 ✓"]
CLIENTS = (
    "langchain-openai==1.7.3",
    "langchain-huggingface==1.2.3",
    "llama-index-embeddings-text-embeddings-inference==0.6.0",
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_encoder(tmp_path_factory.mktemp("small"), **sentence_transformer())


@pytest.fixture(scope="module")
def url(encoder: pathlib.Path) -> Iterator[str]:
    with running_server([str(encoder)]) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_clients_of_frameworks_get_the_vectors_of_sentence_transformers(encoder: pathlib.Path, url: str) -> None:
    from sentence_transformers import SentenceTransformer

    script = pathlib.Path(__file__).with_name("framework_clients.py")
    python = environment_python("framework-clients", *CLIENTS)
    done = subprocess.run([python, script, url], input=json.dumps(TEXTS), check=True, capture_output=True, text=True)
    expected = SentenceTransformer(str(encoder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    results = json.loads(done.stdout)
    assert list(results) == ["langchain-openai", "langchain-huggingface", "llama-index"]
    for of_texts, of_query in results.values():
        np.testing.assert_allclose(of_texts, expected, atol=1e-5)
        np.testing.assert_allclose(of_query, expected[0], atol=1e-5)
