"""The written documentation is complete: every code, route and field."""

import pathlib
import re

import pytest

from noria.config import Config
from noria.errors import SetupError, all_codes
from noria.frontend.app import build_app
from noria.frontend.engine_link import EngineLink
from noria.frontend.openai import GenerationsBody
from noria.request import ImageBody

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def interface():
    return (DOCS / "http-api.md").read_text(encoding="utf-8")


def test_every_error_code_is_documented_with_its_status():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    kinds = all_codes()
    declared = {
        code: str(kind.exit_status if issubclass(kind, SetupError) else kind.http_status)
        for code, kind in kinds.items()
    }
    assert dict(rows) == declared


def test_every_route_is_documented(interface):
    for route in build_app(Config(), EngineLink([])).routes:
        method = "POST" if "POST" in route.methods else "GET"
        assert f"| `{method} {route.path.replace(':path', '')}` |" in interface


def test_every_field_is_documented(interface):
    own, openais = interface.split("## POST /v1/images/generations")
    for field in ImageBody.__struct_fields__:
        assert f"`{field}`" in own
    for field in GenerationsBody.__struct_fields__:
        assert f"`{field}`" in openais
