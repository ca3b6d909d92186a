"""Folders of small encoders, made once."""

import pathlib
import shutil

import pytest

from encoders import make_encoder, sentence_transformer


@pytest.fixture(scope="session")
def embedding_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small BERT as sentence-transformers writes it: mean pooling, normalized."""
    return make_encoder(tmp_path_factory.mktemp("embedding"), **sentence_transformer())


@pytest.fixture
def folder(embedding_folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may change."""
    return shutil.copytree(embedding_folder, tmp_path / "model")
