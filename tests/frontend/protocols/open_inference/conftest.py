"""A front end with text encoders of several tasks, in front of a fake engine."""

import msgspec
import pytest

from frontends import served_models
from noria.config import Config, FrontendConfig
from noria.testing.fake_encoder import FAKE_ENCODER

RERANKER = msgspec.structs.replace(
    FAKE_ENCODER, name="fake/reranker", task="reranking", inputs=("input_ids", "attention_mask", "token_type_ids")
)
CLASSIFIER = msgspec.structs.replace(FAKE_ENCODER, name="classifier", task="classification", labels=tuple("abcdefgh"))


@pytest.fixture(scope="package")
def shared(folder):
    config = Config(frontend=FrontendConfig(max_texts=8))
    with served_models(folder, FAKE_ENCODER, RERANKER, CLASSIFIER, config=config) as client:
        yield client


@pytest.fixture
def client(shared):
    """A client; the engine behind it is reset."""
    shared.engine.reset()
    return shared
