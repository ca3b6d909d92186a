"""Folders of tiny models of all diffusion families, which are made once."""

import functools
import pathlib
from collections.abc import Callable

import pytest

import tiny_models


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """A function that returns a tiny folder of a family, not to be changed."""

    @functools.cache
    def save(family: str) -> pathlib.Path:
        savers = {name.replace("_", ""): getattr(tiny_models, name) for name in dir(tiny_models)}
        return savers[f"save{family}".replace("-", "")](tmp_path_factory.mktemp("tiny") / family)

    return save
