"""The documents in docs/ have every error code, route and field."""

import base64
import pathlib
import re

import pytest

from noria.config import Config
from noria.errors import SetupError, all_codes
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.jobs.inputs import JobRequestBody
from noria.frontend.protocols.openai.images import GenerationsRequestBody
from noria.jobs.records import TRANSITIONS, Job
from noria.jobs.webhooks.signing import sign
from noria.protocol.request import ImageRequestBody

DOCS = pathlib.Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def http_api():
    return (DOCS / "http-api.md").read_text(encoding="utf-8")


def test_every_error_code_is_documented_with_its_status():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    error_types = all_codes()
    declared = {
        code: str(error_type.exit_status if issubclass(error_type, SetupError) else error_type.http_status)
        for code, error_type in error_types.items()
        if error_type.__module__ == "noria.errors"  # others are the benches', if a test has loaded them as plugins
    }
    assert dict(rows) == declared


def test_every_operation_is_documented():
    text = (DOCS / "http-operations.md").read_text(encoding="utf-8")
    for operation in build_app(Config(), EnginePool([])).state.operations:
        if operation.summary:
            assert f"`{operation.method} {operation.documented_path}`" in text
            assert operation.summary in text or operation.description in text


def test_every_field_is_documented(http_api):
    t2i, openai = http_api.split("## POST /v1/images/generations")
    for field in ImageRequestBody.__struct_fields__:
        assert f"`{field}`" in t2i
    for field in GenerationsRequestBody.__struct_fields__:
        assert f"`{field}`" in openai
    _, jobs = http_api.split("## Jobs\n")
    for field in JobRequestBody.__struct_fields__:
        assert f"| `{field}` |" in jobs
    for field in Job.__struct_fields__:
        assert f'"{field}": ' in jobs
    for status in TRANSITIONS:
        assert f"| `{status}` |" in jobs


def test_documented_webhook_verification_accepts_our_signature_only(http_api):
    code = re.search(r"```python\n(import base64.*?)```", http_api, re.DOTALL)[1]
    names = {}
    exec(code, names)
    secret = bytes(range(32))
    text = f"whsec_{base64.b64encode(secret).decode()}\n"
    signatures = sign([bytes(32), secret], "msg_1", 1, b"{}")
    headers = {"webhook-id": "msg_1", "webhook-timestamp": "1", "webhook-signature": signatures}
    assert names["is_from_noria"](text, headers, b"{}")
    assert not names["is_from_noria"](text, headers, b"{ }")
