import time

import pytest

from noria.frontend.access.api_keys import generate_key
from noria.observe.logs.redaction import redact, redact_fields

# Like a generated key, but constant: all test workers must collect the same parameters.
KEY = "noria_jlOGsXNwSd87VIDAfMTiaPk7RKGK-wyYW0Lpjj0ZE9A"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"the key {KEY} is not known", KEY),
        (f"GET /t2i?api_key={KEY[6:]}&n=1", KEY[6:]),
        ("Authorization: Bearer sk-hunter2", "hunter2"),
        ("authorization: Basic aHVudGVyMg==", "aHVudGVyMg"),
        ("{'authorization': 'Bearer hunter2', 'accept': '*/*'}", "hunter2"),
        ("[(b'authorization', b'Bearer hunter2'), (b'host', b'x')]", "hunter2"),
        ('{"X-Api-Key": "hunter2"}', "hunter2"),
        ("X-Api-Key=hunter2", "hunter2"),
        ("Cookie: session=hunter2", "hunter2"),
        ("sent Bearer abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyz"),
        ("secret whsec_aGVsbG8gd29ybGQhIQ== in use", "aGVsbG8gd29ybGQhIQ"),
        ("postgresql://noria:hunter2@db/noria is down", "hunter2"),
        ("postgresql+psycopg://noria:hun@ter2@db/noria is down", "ter2"),
        ("redis://:hunter2@cache:6379", "hunter2"),
        ("FileNotFoundError: 'ftp://noria:hunter2@files.example/results'", "hunter2"),
        ("https://s3.example/x?X-Amz-Signature=hunter2&y=1", "hunter2"),
        ("https://example.org/hook?token=hunter2", "hunter2"),
        ("https://example.org/hook?key=hunter2", "hunter2"),
        ("https://example.org/hook?client_secret=hunter2", "hunter2"),
        ("host=db user=noria password=hunter2 dbname=noria", "hunter2"),
        ("host=db password='hunter 2' dbname=noria", "hunter 2"),
        ('{"password": "hunter2"}', "hunter2"),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "hunter2"),
        ("Cookie: theme=dark; session=hunter2; b=2", "hunter2"),
        ("{'Cookie': 'theme=dark; session=hunter2', 'accept': '*/*'}", "hunter2"),
        ('Authorization: Digest username="x", response="hunter2"', "hunter2"),
        ('Authorization: Token token="hunter2"', "hunter2"),
        (r"{\"password\": \"hunter2\"}", "hunter2"),
        (r'"{\"api_key\":\"hunter2\"}"', "hunter2"),
        ("accessToken=hunter2", "hunter2"),
        ('{"clientSecret": "hunter2"}', "hunter2"),
    ],
)
def test_text_that_looks_like_a_secret_is_removed(text: str, secret: str) -> None:
    clean = redact(text)
    assert secret not in clean
    assert "[redacted]" in clean


def test_any_generated_key_is_removed() -> None:
    key, _ = generate_key("alice")
    assert key not in redact(f"the key {key} is not known")


@pytest.mark.parametrize(
    "text",
    [
        "GET /v1/models 200 0.003 s",
        "engine-0 is ready on cuda:0",
        "send KEY as the password of Basic authentication",
        "http://127.0.0.1:8000/t2i",
        "a red key beside a blue secretary, signed",
        "noria_engine_busy_seconds_total",
        "the metric noria_backlog_seconds has no label",
    ],
)
def test_other_text_is_kept(text: str) -> None:
    assert redact(text) == text


def test_text_around_a_secret_is_kept() -> None:
    assert redact("postgresql://noria:x@db/noria is down") == "postgresql://noria:[redacted]@db/noria is down"
    assert redact("/hook?a=1&token=x&b=2") == "/hook?a=1&token=[redacted]&b=2"


def test_values_of_fields_with_secret_names_are_removed() -> None:
    named = {"Authorization": "x", "webhook_secret": "x", "token": None, "key": "alice", "n": 2}
    assert redact_fields(named) == {
        "Authorization": "[redacted]",
        "webhook_secret": "[redacted]",
        "token": None,  # which is left out of the line
        "key": "alice",
        "n": 2,
    }


def test_adversarial_text_is_scanned_quickly() -> None:
    for text in (
        "a://b:" * 11_000,
        "key" * 20_000,
        "password " * 7000,
        "a_" * 32_000 + "key",
        "authorization" * 5000,
        "cookie" * 10_000,
        "authorization=a=," * 4000,
        "a1" * 32_000 + "token",
    ):
        began = time.process_time()
        redact(text)
        assert time.process_time() - began < 5.0, text[:20]
