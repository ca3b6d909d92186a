"""The files that a prompt and a text pass on their way to the engine are those that docs/architecture.md names."""

import pathlib
import re
import sys

import pytest
from starlette.testclient import TestClient

import noria
from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.attempt import Attempt
from noria.frontend.engines.pool import EnginePool
from noria.protocol.request import EngineRequest
from noria.testing.fake_encoder import FAKE_ENCODER, FakeTokenizer
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine

SRC = pathlib.Path(noria.__file__).parent
ARCHITECTURE = SRC.parents[1] / "docs" / "architecture.md"
MARK = "a striped zebra that no other part of the server says"


def has_mark(value, depth=3):
    """Whether a text is in a value, or in a member of it."""
    if isinstance(value, str | bytes | bytearray):
        return MARK in value if isinstance(value, str) else MARK.encode() in value
    if isinstance(value, EngineRequest):  # its text may be tokens already
        return True
    if depth == 0 or isinstance(value, type):
        return False
    if isinstance(value, list | tuple):
        return any(has_mark(each, depth - 1) for each in value[:30])
    fields = getattr(type(value), "__struct_fields__", ()) or getattr(type(value), "__dataclass_fields__", ())
    return any(has_mark(getattr(value, field, None), depth - 1) for field in fields)


@pytest.mark.parametrize(
    ("heading", "path", "body", "model"),
    [
        ("Follow one image", "/t2i", {"prompt": MARK}, FAKE_MODEL),
        ("Follow one text", "/v1/embeddings", {"input": MARK}, FAKE_ENCODER),
    ],
)
def test_a_prompt_passes_the_files_that_the_documents_name(folder, heading, path, body, model):
    passed = set()

    def look(frame, event, _):
        if frame.f_code is Attempt.receive.__code__:  # the engine answers
            sys.setprofile(None)
        file = pathlib.Path(frame.f_code.co_filename)
        is_ours = file.is_relative_to(SRC / "frontend") or file.parent == SRC / "protocol"
        values = [value for name, value in frame.f_locals.items() if name != "self"] if is_ours else []
        if event in ("call", "return") and any(map(has_mark, values)):
            passed.add(file.relative_to(SRC).as_posix())

    address = f"ipc://{folder}/ways"
    with FakeEngine(address, models=(model,)):
        pool = EnginePool([address], first_states_wait_s=60, rebalance=False)  # which looks at all requests each second
        app = build_app(Config(), pool, load_tokenizer=FakeTokenizer)
        with TestClient(app, "http://localhost") as client:
            assert client.post(path, json=body).status_code == 200
            client.portal.call(sys.setprofile, look)
            assert client.post(path, json=body).status_code == 200
    section = ARCHITECTURE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    named = section.partition("passes these files")[2].partition("\n\n")[0]
    assert passed == set(re.findall(r"`([\w/]+\.py)`", named))
