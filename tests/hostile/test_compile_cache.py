"""Compiled code is not read from a folder that another user could have made."""

import os
import stat

import pytest

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.diffusion.block_compilation import use_private_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    """Unset, and restored at the end."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_the_folder_is_in_the_cache_folder_and_private(tmp_path):
    use_private_cache(EngineConfig(cache_dir=str(tmp_path)))
    assert os.environ[VARIABLE] == str(tmp_path / "compiled")
    assert stat.S_IMODE((tmp_path / "compiled").stat().st_mode) == 0o700


def test_a_folder_that_others_can_change_is_not_used_and_compiling_is_rejected(tmp_path):
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled").chmod(0o777)
    use_private_cache(EngineConfig(cache_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="can be changed by other users"):
        use_private_cache(EngineConfig(cache_dir=str(tmp_path), compile=True, buckets=(2,)))
    assert VARIABLE not in os.environ


def test_the_operators_folder_is_kept(tmp_path):
    os.environ[VARIABLE] = "/elsewhere"
    use_private_cache(EngineConfig(cache_dir=str(tmp_path)))
    assert os.environ[VARIABLE] == "/elsewhere"
