"""Stored requests survive an upgrade of the server."""

import msgspec
import pytest

from noria.jobs.stored_request import StoredRequest, StoredTextRequest, TextJobRequest, deserialize, serialize
from noria.testing.requests import make_image_request

REQUEST = make_image_request(
    "job_1", "shapes", attempt_id="", n=2, partial_images=1, timeout_s=9.0, deadline_s=60.0, priority="low"
)
# As version 0.1 stored it before the settings became a payload.
OLD = {
    "request_id": "job_1", "prompt": "a circle", "negative_prompt": "", "seed": 7, "width_px": 8, "height_px": 8,
    "num_steps": 3, "guidance_scale": 2.0, "num_images": 2, "scheduler": "ddim", "timeout_s": 9.0, "model": "shapes",
    "priority": "low", "deadline_s": 60.0, "num_previews": 1, "watched": False, "alone": False, "traceparent": "",
    "tracestate": "",
}  # fmt: skip


def test_a_stored_request_is_read_back():
    stored = StoredRequest(REQUEST, "webp", 80, metadata=False)
    assert deserialize(serialize(stored)) == stored
    texts = TextJobRequest(task="embedding", num_texts=3, num_chunks=1, num_columns=8, traceparent="00-a")
    assert deserialize(serialize(StoredTextRequest(texts))) == StoredTextRequest(texts)


def test_a_request_that_an_older_version_stored_is_read():
    raw = msgspec.json.encode({"request": OLD, "file_format": "png", "quality": None, "metadata": True})
    assert deserialize(raw) == StoredRequest(REQUEST, "png", None, metadata=True)


@pytest.mark.parametrize(
    "raw", [b"[no JSON", b"[]", b"{}", b'{"request": 3}', b'{"request": {}}', b'{"kind": "texts"}']
)
def test_anything_else_is_an_error(raw):
    with pytest.raises(msgspec.MsgspecError):
        deserialize(raw)
