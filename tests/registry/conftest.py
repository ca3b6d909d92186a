"""Fixtures of the registry's tests: an empty registry on each kind of database."""

import pytest

from noria.registry.schema import open_registry_database


@pytest.fixture
def engine(database, tmp_path):
    opened = open_registry_database(database, tmp_path)
    yield opened
    opened.dispose()
