"""The written documentation is complete: every code, route and field."""

import base64
import pathlib
import re

import pytest

from noria.config import Config
from noria.errors import SetupError, all_codes
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.routes.jobs import JobRequestBody
from noria.frontend.routes.openai_images import GenerationsRequestBody
from noria.frontend.routes.static_pages import ASSETS_PATH
from noria.jobs.records import TRANSITIONS, Job
from noria.jobs.webhooks.client import sign
from noria.protocol.request import ImageRequestBody

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
    for route in build_app(Config(), EnginePool([])).routes:
        if route.path.startswith(f"{ASSETS_PATH}/"):  # the parts of the pages
            continue
        for method in route.methods - {"HEAD"}:
            assert f"| `{method} {route.path.replace(':path', '')}` |" in interface


def test_every_field_is_documented(interface):
    own, openais = interface.split("## POST /v1/images/generations")
    for field in ImageRequestBody.__struct_fields__:
        assert f"`{field}`" in own
    for field in GenerationsRequestBody.__struct_fields__:
        assert f"`{field}`" in openais
    _, jobs = interface.split("## Jobs\n")
    for field in JobRequestBody.__struct_fields__:
        assert f"| `{field}` |" in jobs
    for field in Job.__struct_fields__:
        assert f'"{field}": ' in jobs
    for status in TRANSITIONS:
        assert f"| `{status}` |" in jobs


def test_the_documented_check_of_a_webhook_takes_ours_and_no_other(interface):
    code = re.search(r"```python\n(import base64.*?)```", interface, re.DOTALL)[1]
    names = {}
    exec(code, names)
    secret = bytes(range(32))
    text = f"whsec_{base64.b64encode(secret).decode()}\n"
    headers = {"webhook-id": "msg_1", "webhook-timestamp": "1", "webhook-signature": sign(secret, "msg_1", 1, b"{}")}
    assert names["is_from_noria"](text, headers, b"{}")
    assert not names["is_from_noria"](text, headers, b"{ }")
