"""Signs webhooks by the Standard Webhooks specification (https://www.standardwebhooks.com), as Replicate does.

    webhook-id: msg_…                  the same for each try: receivers use it to drop duplicates
    webhook-timestamp: 1795230000      of this try, Unix time
    webhook-signature: v1,BASE64       HMAC-SHA256 of "{id}.{timestamp}.{body}" with the bytes of the secret

The server has one secret in a file, and each API key a secret of its own that is derived from it: nothing else is
stored, and all servers with the same file sign alike. Jobs without a key are signed with the server's secret itself.
During a rotation the file has two secrets, and each webhook two signatures, with a space between them.
"""

import base64
import binascii
import contextlib
import hmac
import os
import pathlib
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from standardwebhooks import Webhook

from noria.config import JobsConfig
from noria.errors import ConfigError
from noria.storage.private_files import make_private_folder

_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 24  # as the specification demands; generated ones have 32
_MAX_SECRETS = 2  # the new one, and the one before it, while receivers change
_DERIVATION_LABEL = b"noria webhook secret of "


def sign(signing_secrets: Sequence[bytes], delivery_id: str, timestamp_s: int, body: bytes) -> str:
    """The `webhook-signature` of one try, a signature for each secret; `timestamp_s` is Unix time."""
    at, text = datetime.fromtimestamp(timestamp_s, UTC), body.decode()
    return " ".join(Webhook(secret).sign(delivery_id, at, text) for secret in signing_secrets)


def secret_of_key(server_secret: bytes, key_name: str) -> bytes:
    """The 32 bytes that sign the webhooks of one API key, whose holder learns nothing about the server's or another's.

    One block of HKDF-Expand (RFC 5869). The empty name, of jobs without a key, has the server's secret itself.
    """
    if not key_name:
        return server_secret
    return hmac.digest(server_secret, _DERIVATION_LABEL + key_name.encode() + b"\x01", "sha256")


def format_secret(secret: bytes) -> str:
    """The text of a secret that receivers' libraries take."""
    return _PREFIX + base64.b64encode(secret).decode()


def secret_file(config: JobsConfig, data_folder: pathlib.Path) -> pathlib.Path:
    """The file with the server's secret; `auto` is beside the SQLite file, so that all that share it sign alike.

    Raises ConfigError: it is `auto` and the database is none in a file, or its URL is invalid.
    """
    setting, beside = config.webhook_secret_file, data_folder / "jobs.sqlite"
    if setting != "auto":
        return pathlib.Path(setting)
    if config.database == "auto":  # without SQLAlchemy, which the supervisor needs for nothing else
        return beside.resolve().with_name("webhook-secret")

    from noria.jobs.database.schema import SCHEMA
    from noria.storage.database import database_url, file_of

    url = database_url(SCHEMA, config.database, beside)
    if url.get_backend_name() != "sqlite":
        raise ConfigError(
            "setting jobs.webhook_secret_file is 'auto', a file beside the database, and jobs.database is PostgreSQL, "
            "whose servers deliver each other's webhooks: they must sign alike. Make one file (echo "
            f'"{_PREFIX}$(openssl rand -base64 32)" > FILE) and name it in the settings of all of them.'
        )
    return file_of(url).resolve().with_name("webhook-secret")


def open_secrets(config: JobsConfig, data_folder: pathlib.Path) -> tuple[bytes, ...]:
    """The server's secrets; creates the file first if it is `auto` and missing. Raises ConfigError."""
    file, setting = secret_file(config, data_folder), config.webhook_secret_file
    if setting == "auto":
        try:
            _create_secret(file)
        except OSError as error:
            raise _unreadable(file, error) from error
    return read_secrets(file)


def read_secrets(file: pathlib.Path) -> tuple[bytes, ...]:
    """The secrets in the lines of a file: one, or two during a rotation. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error
    if not 1 <= len(lines) <= _MAX_SECRETS:
        raise ConfigError(
            f"the file {file} has {len(lines)} secrets; allowed are one and, in a line of its own, the one before it."
        )
    return tuple(_parse_secret(line, file) for line in lines)


def _parse_secret(text: str, file: pathlib.Path) -> bytes:
    try:
        secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except binascii.Error as error:
        raise ConfigError(f"the file {file} holds no secret: a secret is {_PREFIX} and base64.") from error
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(f"a secret in {file} has {len(secret)} bytes; the minimum is {_MIN_SECRET_BYTES}.")
    return secret


def _unreadable(file: pathlib.Path, error: Exception) -> ConfigError:
    return ConfigError(f"the webhook secret cannot be read from {file}: {error}. Set jobs.webhook_secret_file.")


def _create_secret(file: pathlib.Path) -> None:
    """Atomically create the file with a new secret, readable by its owner only, unless it exists."""
    if file.exists():
        return
    make_private_folder(file.parent)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(format_secret(secrets.token_bytes(32)) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, file)
    temporary.unlink()
