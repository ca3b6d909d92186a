"""Compressed bodies: 415 on every route that reads one, but for lineage, which takes gzip."""

import functools
import gzip
import re
import zlib

import pytest

from frontends import served_models
from noria.config import Config
from noria.errors import BodyTooLarge, InvalidBody
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.content_encoding import decompress_gzip
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL

READS_NO_BODY = {
    "/v1/images/variations",
    "/sdapi/v1/interrupt",
    "/sdapi/v1/skip",
    "/controlnet/detect",
    "/v2/repository/models/{model:path}/load",
    "/v2/repository/models/{model:path}/unload",
}
MEDIA_TYPES = {"/v1/images/edits": "multipart/form-data; boundary=b", "/v1/jobs/texts": "text/plain"}
ROUTES = sorted(
    {
        re.sub(r"{.*?}", "1", route.path)
        for route in build_app(Config(), EnginePool([])).routes
        if route.methods & {"POST", "PUT", "PATCH"} and route.path not in READS_NO_BODY
    }
)
LINEAGE = [path for path in ROUTES if "lineage" in path]
CONTENT = b'{"a": 1}' * 100
# Without the time, so that every process names the cases alike.
compress = functools.partial(gzip.compress, mtime=0)


@pytest.fixture(scope="module")
def client(folder):
    with served_models(folder, FAKE_MODEL, FAKE_ENCODER) as client:
        yield client


def post(client, path, *encodings, content=b"{}"):
    fields = [("Content-Encoding", each) for each in encodings]
    media_type = MEDIA_TYPES.get(path, "application/json")
    return client.post(path, content=content, headers=[("Content-Type", media_type), *fields])


def test_an_encoding_that_a_route_does_not_decode_is_415(client):
    others = [("deflate",), ("br",), ("zstd",), ("gzip, gzip",), ("identity", "gzip, br"), ("made-up",)]
    for number, path in enumerate(ROUTES):
        for encodings in others if number == 0 or path in LINEAGE else others[:1]:
            answer = post(client, path, *encodings)
            assert answer.status_code == 415, (path, encodings, answer.text)
            assert f"Content-Encoding is '{', '.join(encodings)}'; send the body" in answer.text
        for encodings in [("gzip",), ("X-GZip",)]:
            answer = post(client, path, *encodings)
            assert (answer.status_code == 415) is (path not in LINEAGE), path


def test_identity_is_no_encoding(client):
    for path in ROUTES:
        plain = post(client, path).status_code
        for encodings in [("identity",), ("Identity, identity",), ("",)]:
            assert post(client, path, *encodings).status_code == plain != 415, path


def test_lineage_takes_gzip(client):
    sent = gzip.compress(b'{"no": "event"}')
    for path in LINEAGE:
        for encoding in ("gzip", "GZIP", "x-gzip", "identity, gzip"):
            answer = post(client, path, encoding, content=sent)
            assert (answer.status_code, answer.json()["error"]["code"]) in (
                (400, "invalid_field"),
                (400, "invalid_body"),
            )
            assert (
                answer.json()["error"]["message"]
                == post(client, path, content=b'{"no": "event"}').json()["error"]["message"]
            )
        bomb = post(client, path, "gzip", content=gzip.compress(bytes(2**20 + 1)))
        assert (bomb.status_code, bomb.json()["error"]["code"]) == (413, "body_too_large")
        assert "when it is decompressed" in bomb.json()["error"]["message"]


@pytest.mark.parametrize(
    "compressed",
    [
        compress(CONTENT),
        compress(CONTENT[:300]) + compress(CONTENT[300:]),
        b"".join(compress(CONTENT[start : start + 50]) for start in range(0, len(CONTENT), 50)),
        compress(b"") + compress(CONTENT) + compress(b""),
        compress(CONTENT) + bytes(500),
    ],
)
def test_the_members_of_a_body_are_its_content(compressed):
    assert decompress_gzip(compressed, len(CONTENT)) == CONTENT
    with pytest.raises(BodyTooLarge, match="799 bytes when it is decompressed"):
        decompress_gzip(compressed, len(CONTENT) - 1)


@pytest.mark.parametrize(
    ("compressed", "says"),
    [
        (b"", "not complete"),
        (compress(CONTENT)[:-1], "not complete"),
        (compress(CONTENT)[:5], "not complete"),
        (compress(CONTENT) + compress(CONTENT)[:-9], "not complete"),
        (CONTENT, "is not gzip"),
        (zlib.compress(CONTENT), "is not gzip"),
        (compress(CONTENT) + b"more", "is not gzip"),
        (compress(CONTENT)[:-8] + bytes(8), "is not gzip.*incorrect"),
        (compress(b"") * 17, "more than 16 members"),
    ],
)
def test_what_is_not_gzip_as_a_whole_is_rejected(compressed, says):
    with pytest.raises(InvalidBody, match=says):
        decompress_gzip(compressed, 10_000)


def test_a_bomb_is_not_decompressed_beyond_the_limit(monkeypatch):
    lengths, decompressobj = [], zlib.decompressobj

    class Member:
        def __init__(self, window):
            self._member = decompressobj(window)

        def decompress(self, *arguments):
            lengths.append(len(content := self._member.decompress(*arguments)))
            return content

    monkeypatch.setattr(zlib, "decompressobj", Member)
    with pytest.raises(BodyTooLarge):
        decompress_gzip(gzip.compress(bytes(50_000_000)), 1000)
    assert lengths == [1001]
