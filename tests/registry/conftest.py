"""Fixtures of the registry's tests: registries on each kind of database, empty or as after a month."""

import pathlib
import shutil

import pytest

import sample_registry
from databases import TablesOnce
from noria.registry.schema import open_registry_database
from registry.samples import MONTH_END


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("registry")
    return TablesOnce(lambda url: open_registry_database(url, folder).dispose(), folder)


@pytest.fixture
def database(request, tmp_path, tables):
    """The URL of an empty registry; in SQLite, or as `on_both` says."""
    with tables.of(getattr(request, "param", "sqlite"), tmp_path, request) as url:
        yield url


@pytest.fixture
def engine(database, tmp_path):
    opened = open_registry_database(database, tmp_path)
    yield opened
    opened.dispose()


@pytest.fixture(scope="session")
def month_old_file(tables, tmp_path_factory) -> pathlib.Path:
    file = shutil.copy(tables.file, tmp_path_factory.mktemp("month") / "registry.sqlite")
    opened = open_registry_database(f"sqlite:///{file}", file.parent)
    sample_registry.fill(opened, MONTH_END)
    opened.dispose()
    return file


@pytest.fixture
def month_old(month_old_file, tmp_path):
    """A registry in SQLite as a server has it after a month, as of `MONTH_END`."""
    shutil.copy(month_old_file, tmp_path / "month.sqlite")
    opened = open_registry_database(f"sqlite:///{tmp_path}/month.sqlite", tmp_path)
    yield opened
    opened.dispose()
