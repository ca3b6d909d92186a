"""Fixtures of the tests of sources: a hub on loopback, and a folder in fsspec's memory."""

import fsspec
import huggingface_hub
import huggingface_hub.constants
import pytest

from registry.sources.hub_server import HubServer


@pytest.fixture
def hub(bundled_folder, monkeypatch):
    opened = HubServer(bundled_folder)
    constants = huggingface_hub.constants  # which the environment sets at import
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, opened.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", opened.url)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    yield opened
    huggingface_hub.close_session()
    huggingface_hub.HfFileSystem.clear_instance_cache()
    opened.close()


@pytest.fixture
def memory(bundled_folder):
    """The bundled model in memory://models/shapes."""
    filesystem = fsspec.filesystem("memory")
    filesystem.put(f"{bundled_folder}/", "/models/shapes", recursive=True)
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
