"""The folders of upscalers: their files, and what is refused before one is loaded."""

import importlib.util

import pytest

from noria.errors import ConfigError, InvalidField, MissingExtra
from noria.models.adapters.upscaler_folders import UpscalerFolders
from noria.protocol.diffusion import PixelUpscaler


def test_without_the_package_that_reads_the_files_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    UpscalerFolders(()).check_folders()  # nothing is needed
    with pytest.raises(MissingExtra, match=r"needs spandrel, .*: pip install 'noria-serve\[upscalers\]'"):
        UpscalerFolders((str(tmp_path),)).check_folders()
    with pytest.raises(ConfigError, match=r"engine\.upscalers: '.*missing' is not a folder"):
        UpscalerFolders((str(tmp_path / "missing"),)).check_folders()


def test_an_entry_is_for_all_models(tmp_path):
    with pytest.raises(ConfigError, match=rf"'shapes={tmp_path}' is not a folder. Entries are FOLDER\."):
        UpscalerFolders((f"shapes={tmp_path}",)).check_folders()


def test_files_are_listed_by_name_and_filters_have_theirs(tmp_path):
    for name in ("b.pth", "a.safetensors", "Lanczos.pth", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode())
    folders = UpscalerFolders((str(tmp_path),))
    assert list(folders.files()) == ["a", "b"]
    assert folders.complete("Lanczos", "upscaler_1") == PixelUpscaler("Lanczos")
    first = folders.complete("b", "upscaler_1")
    assert folders.find(first, "upscaler_1") == tmp_path / "b.pth"
    (tmp_path / "b.pth").write_bytes(b"another")
    assert folders.complete("b", "upscaler_1").digest != first.digest
    with pytest.raises(InvalidField, match="the file of 'b' has changed"):
        folders.find(first, "upscaler_1")
    for name in ("../b", "c", ""):
        with pytest.raises(InvalidField, match="upscalers of pixels are 'Lanczos', 'Nearest', 'a', 'b'"):
            folders.complete(name, "upscaler_1")
