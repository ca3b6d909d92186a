"""Specs of encoders for the sessions' tests."""

import pathlib

import pytest

from encoders import make_encoder, open_exported, sentence_transformer
from noria.protocol.text import EncoderModelSpec


@pytest.fixture(scope="session")
def minilm() -> EncoderModelSpec:
    return open_exported("minilm")


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small BERT with mean pooling."""
    return make_encoder(tmp_path_factory.mktemp("small"), **sentence_transformer())


@pytest.fixture(scope="session")
def small(small_folder: pathlib.Path) -> EncoderModelSpec:
    return open_exported(str(small_folder))
