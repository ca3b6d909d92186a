"""The models to serve: each has a name of its own."""

import shutil

import pytest

from noria.errors import ConfigError
from noria.settings import load
from noria.supervisor.served_models import open_models


def test_two_models_with_one_name_are_rejected(tmp_path, bundled_folder):
    shutil.copytree(bundled_folder, tmp_path / "copy")
    config = load(None, {}, {"model": str(bundled_folder), "additional_models": (str(tmp_path / "copy"),)})
    with pytest.raises(ConfigError, match="both called 'noria-shapes'"):
        open_models(config)
    (tmp_path / "copy" / "noria.json").write_text('{"name": "other"}')
    assert [spec.name for spec in open_models(config)] == ["noria-shapes", "other"]
