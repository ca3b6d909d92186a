"""Where Triton is found."""

import pytest

from noria.errors import ConfigError
from noria_bench.targets.triton import Triton, find_triton


def test_an_unpacked_triton_is_used_if_a_variable_names_it(tmp_path, monkeypatch):
    program = tmp_path / "pytriton/tritonserver/bin/tritonserver"
    program.parent.mkdir(parents=True)
    monkeypatch.setenv("TRITON_FOLDER", str(tmp_path))
    with pytest.raises(ConfigError, match=r"TRITON_FOLDER is .*, which has no pytriton/tritonserver/bin/tritonserver"):
        find_triton()
    program.touch()
    assert find_triton() == Triton(tmp_path, None)
    monkeypatch.setenv("TRITON_PYTHON", "/nowhere/python")
    with pytest.raises(ConfigError, match="TRITON_PYTHON is /nowhere/python, which is no program"):
        find_triton()


def test_without_either_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_FOLDER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="noria bench install triton"):
        find_triton()
