"""Folders of small encoders, made once."""

import pathlib

import pytest

from encoders import make_encoder, sentence_transformer


@pytest.fixture(scope="session")
def embedding_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small BERT as sentence-transformers writes it: mean pooling, normalized."""
    return make_encoder(tmp_path_factory.mktemp("embedding"), **sentence_transformer())
