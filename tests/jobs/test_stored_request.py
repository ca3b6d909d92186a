"""A stored request is read back, and nothing else is."""

import msgspec
import pytest

from noria.jobs.stored_request import StoredRequest, StoredTextRequest, TextJobRequest, deserialize, serialize
from noria.testing.requests import make_image_request

REQUEST = make_image_request(
    "job_1", "shapes", attempt_id="", n=2, partial_images=1, timeout_s=9.0, deadline_s=60.0, priority="low"
)


def test_a_stored_request_is_read_back():
    stored = StoredRequest(REQUEST, "webp", 80, metadata=False)
    assert deserialize(serialize(stored)) == stored
    texts = TextJobRequest(task="embedding", num_texts=3, num_chunks=1, num_columns=8, traceparent="00-a")
    assert deserialize(serialize(StoredTextRequest(texts))) == StoredTextRequest(texts)


@pytest.mark.parametrize(
    "raw", [b"[no JSON", b"[]", b"{}", b'{"request": 3}', b'{"request": {}}', b'{"kind": "texts"}']
)
def test_anything_else_is_an_error(raw):
    with pytest.raises(msgspec.MsgspecError):
        deserialize(raw)
