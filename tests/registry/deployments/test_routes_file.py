"""The file of routes: replaced at once, private, and an error if it is damaged."""

import stat

import pytest

from noria.errors import ConfigError
from noria.protocol.routes import Route, Routes, Target
from noria.registry.deployments.routes_file import read_routes, write_routes

ROUTES = Routes(3, (Route("t2i", Target(1, "shapes@2", "sha256:1", "0123456789ab", ("file:///shapes",))),))


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "data" / "routes.json"
    assert read_routes(file) == Routes()
    write_routes(file, Routes(1))
    write_routes(file, ROUTES)
    assert read_routes(file) == ROUTES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"generation": "3"}', b"\xff", b'{"routes": [{}]}'])
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path, content):
    (tmp_path / "routes.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"routes\.json.*Delete the file"):
        read_routes(tmp_path / "routes.json")
