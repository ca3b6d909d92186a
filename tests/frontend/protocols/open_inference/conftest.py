"""A front end with text encoders of several tasks, in front of a fake engine."""

import httpx
import msgspec
import pytest

from frontends import serving
from noria.config import Config, FrontendConfig
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until_ready

RERANKER = msgspec.structs.replace(
    FAKE_ENCODER, name="fake/reranker", task="reranking", inputs=("input_ids", "attention_mask", "token_type_ids")
)
CLASSIFIER = msgspec.structs.replace(FAKE_ENCODER, name="classifier", task="classification", labels=tuple("abcdefgh"))


@pytest.fixture(scope="package")
def text_engine(folder):
    with FakeEngine(f"ipc://{folder}/open-inference", models=(FAKE_ENCODER, RERANKER, CLASSIFIER)) as engine:
        yield engine


@pytest.fixture(scope="package")
def text_url(text_engine):
    with serving(Config(frontend=FrontendConfig(max_texts=8)), text_engine) as (url, _):
        wait_until_ready(url)
        yield url


@pytest.fixture
def client(text_url, text_engine):
    """A client; the engine behind it is reset."""
    text_engine.reset()
    with httpx.Client(base_url=text_url, timeout=60) as client:
        client.engine = text_engine
        yield client
