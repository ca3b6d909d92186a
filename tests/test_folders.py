"""Folders of data, by the settings or the environment."""

import os
import pathlib

import pytest

from noria.config import Config
from noria.errors import ConfigError
from noria.folders import data_folder, file_version
from waiting import wait_until


def test_the_data_folder_is_the_setting_or_follows_xdg(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folder(Config(data_dir=str(tmp_path)), {"XDG_DATA_HOME": "/x"}) == tmp_path
    assert data_folder(Config(data_dir="data"), {}).is_absolute()
    assert data_folder(Config(), {"XDG_DATA_HOME": "/x"}) == pathlib.Path("/x/noria")
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ({}, {"XDG_DATA_HOME": ""}, {"XDG_DATA_HOME": "relative"}):
        assert data_folder(Config(), ignored) == pathlib.Path("/home/someone/.local/share/noria")


def test_without_a_home_folder_the_error_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> pathlib.Path:
        raise RuntimeError

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    with pytest.raises(ConfigError, match="Set --data-dir FOLDER"):
        data_folder(Config(), {})


def test_tests_do_not_use_the_home_folder_of_the_user(data_home: pathlib.Path) -> None:
    assert data_folder(Config(), os.environ) == data_home / "noria"


def test_a_file_with_another_mode_is_another_version(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch()
    before = file_version(str(file))
    wait_until(lambda: file.chmod(0o640) or file_version(str(file)) != before)
