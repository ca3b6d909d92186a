"""LangChain's and LlamaIndex' unmodified clients in front of a real server with a small model.

They bring 70 and 41 packages, so they are in no extra. In an environment of their own:

    pip install langchain-openai langchain-huggingface llama-index-embeddings-text-embeddings-inference
"""

import importlib.util
import pathlib
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient, close_session

from encoders import make_encoder, sentence_transformer
from noria.testing.server import running_server

pytestmark = pytest.mark.slow  # a real server, which exports its model: 40 s

TEXTS = ["a red circle", "The quick brown fox jumps over the lazy dog.", "Größe, naïve café — 東京 ✓"]


def needs(module: str, package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_encoder(tmp_path_factory.mktemp("small"), **sentence_transformer())


@pytest.fixture(scope="module")
def url(encoder: pathlib.Path) -> Iterator[str]:
    with running_server([str(encoder)]) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def expected(encoder: pathlib.Path) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    vectors: np.ndarray = SentenceTransformer(str(encoder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    return vectors


@needs("langchain_openai", "langchain-openai")
def test_langchains_client_for_openai(url: str, expected: np.ndarray) -> None:
    from langchain_openai import OpenAIEmbeddings

    with httpx.Client() as http:
        client = OpenAIEmbeddings(
            model="noria", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, http_client=http
        )
        np.testing.assert_allclose(client.embed_documents(TEXTS), expected, atol=1e-5)
        np.testing.assert_allclose(client.embed_query(TEXTS[0]), expected[0], atol=1e-5)


@needs("langchain_huggingface", "langchain-huggingface")
def test_langchains_client_for_text_embeddings_inference(url: str, expected: np.ndarray) -> None:
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    client = HuggingFaceEndpointEmbeddings(huggingfacehub_api_token="none")
    client.client = InferenceClient(url)
    np.testing.assert_allclose(client.embed_documents(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(client.embed_query(TEXTS[0]), expected[0], atol=1e-5)
    close_session()


@needs("llama_index", "llama-index-embeddings-text-embeddings-inference")
def test_llamaindexs_client(url: str, expected: np.ndarray) -> None:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    client = TextEmbeddingsInference(model_name="noria", base_url=url)
    np.testing.assert_allclose(client.get_text_embedding_batch(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(client.get_query_embedding(TEXTS[0]), expected[0], atol=1e-5)
