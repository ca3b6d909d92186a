"""The secrets of webhooks: one file for all servers, a derived secret for each key, standard signatures."""

import base64
import hashlib
import stat

import pytest

from noria.config import JobsConfig
from noria.errors import ConfigError
from noria.jobs.webhooks.signing import format_secret, open_secrets, read_secrets, secret_file, secret_of_key, sign

SECRET = bytes(range(32))


def test_the_signature_matches_the_example_of_the_specification():
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def hmac_by_rfc_2104(key, text):
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + text).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()


def test_each_of_two_secrets_adds_a_signature():
    other = bytes(32)
    signatures = [
        "v1," + base64.b64encode(hmac_by_rfc_2104(secret, b"msg_1.1795230000.{}")).decode()
        for secret in (other, SECRET)
    ]
    assert sign([other, SECRET], "msg_1", 1_795_230_000, b"{}") == " ".join(signatures)


def test_the_secret_of_a_key_is_derived_from_the_servers_and_its_name():
    assert secret_of_key(SECRET, "alice") == hmac_by_rfc_2104(SECRET, b"noria webhook secret of alice\x01")
    assert secret_of_key(SECRET, "") == SECRET  # jobs without a key


def test_a_secret_is_created_once_and_readable_by_its_owner_only(tmp_path):
    (secret,) = open_secrets(JobsConfig(), tmp_path / "new")
    file = tmp_path / "new" / "webhook-secret"
    assert len(secret) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert open_secrets(JobsConfig(), tmp_path / "new") == read_secrets(file) == (secret,)
    assert [path.name for path in file.parent.iterdir()] == ["webhook-secret"]


def test_servers_that_share_a_sqlite_file_share_the_secret_beside_it(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "link.sqlite").symlink_to(shared / "jobs.sqlite")
    files = (shared / "jobs.sqlite", tmp_path / "link.sqlite", f"file:{shared}/jobs.sqlite?mode=rwc")
    configs = [JobsConfig(database=f"sqlite:///{file}") for file in files]
    secrets = {open_secrets(config, tmp_path / f"data-{number}") for number, config in enumerate(configs)}
    assert secrets == {read_secrets(shared / "webhook-secret")}


def test_servers_that_share_a_database_must_share_a_secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text(format_secret(SECRET))
    for database in ("postgresql://noria@db/noria", "postgres://db/noria", "postgresql+psycopg://db/noria"):
        with pytest.raises(ConfigError, match=r"jobs.webhook_secret_file is 'auto'.*PostgreSQL"):
            secret_file(JobsConfig(database=database), tmp_path)
        assert open_secrets(JobsConfig(database=database, webhook_secret_file=str(file)), tmp_path) == (SECRET,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 secrets"),
        ("whsec_???", "holds no secret"),
        ("whsec_c2hvcnQ=", "has 5 bytes"),
        (f"{format_secret(SECRET)}\nwhsec_c2hvcnQ=\n", "has 5 bytes"),
        (f"{format_secret(SECRET)}\n" * 3, "has 3 secrets"),
        ("gehört", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_a_secret_is_rejected(tmp_path, text, words):
    if text is not None:
        (tmp_path / "secret").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as caught:
        read_secrets(tmp_path / "secret")
    assert not text or text.split()[0] not in str(caught.value)
