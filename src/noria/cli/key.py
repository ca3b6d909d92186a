"""`noria key`: makes an API key, lists those of the server, prints the secret that signs one's webhooks."""

import argparse
import contextlib
import logging
import os
import pathlib
import stat
import sys
from typing import TYPE_CHECKING, Any

from noria.cli.parser import Parser, add_command, add_plain_command, add_settings, config_from
from noria.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from noria.frontend.access.api_keys import ApiKey
    from noria.observe.logs.log_record import Line

_NAME_HELP = "of the key's owner: 1 to 64 of A-Z a-z 0-9 . _ -"


def add_to(commands: Any) -> list[Parser]:
    """Add the commands; returns their parsers."""
    key = commands.add_parser("key", help="make and list API keys")
    subcommands = key.add_subparsers(metavar="COMMAND", required=True)
    create = add_plain_command(subcommands, "create", run_create, "make an API key")
    create.add_argument("name", metavar="NAME", help=_NAME_HELP)
    create.add_argument(
        "--scopes",
        metavar="A,B",
        help="what it may do, of generate, jobs, metrics, lineage, deploy, admin (generate,jobs,metrics)",
    )
    list_keys = add_command(subcommands, "list", run_list, "[--api-keys-file FILE]", "list the API keys of a server")
    add_settings(list_keys, "frontend.api_keys_file")
    secret = add_command(
        subcommands, "webhook-secret", run_webhook_secret, "NAME", "print the secret of a key's webhooks"
    )
    secret.add_argument("name", metavar="NAME", help=_NAME_HELP)
    add_settings(secret, "data_dir", "frontend.api_keys_file", "jobs.database", "jobs.webhook_secret_file")
    return [create, list_keys, secret]


def run_create(arguments: argparse.Namespace) -> int:
    """Make an API key.

    The key is printed to stderr, only this once; its table for the file of API keys, with a hash, to stdout: noria key
    create alice >> keys.toml. The machine's log has a line of who made it.
    """
    from noria.frontend.access.api_keys import DEFAULT_SCOPES, check_is_new, format_scopes, generate_key

    check_is_new(arguments.name, _text_before_output())
    scopes = None if arguments.scopes is None else arguments.scopes.split(",")
    key, table = generate_key(arguments.name, scopes)
    _audit(arguments.name, format_scopes(scopes or DEFAULT_SCOPES))
    print(f"{key}\n", file=sys.stderr)
    print(table)
    return 0


def _text_before_output() -> str:
    """Return the text of the file that stdout is appended to; empty where it is no file, or one that we may not read.

    Linux only.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if stat.S_ISREG(os.fstat(1).st_mode):
            return pathlib.Path("/proc/self/fd/1").read_text(encoding="utf-8-sig")
    return ""


def _audit(name: str, scopes: str) -> None:
    """Write a line as the server's into the machine's log, if it has one; stderr would have it beside the key."""
    import syslog

    from noria.observe.logs.log_record import as_json, fields
    from noria.observe.logs.setup import LineHandler, logging_to

    def put(line: "Line") -> None:
        syslog.syslog(syslog.LOG_AUTHPRIV | syslog.LOG_NOTICE, as_json(line).decode())

    syslog.openlog("noria", syslog.LOG_PID)
    with logging_to(LineHandler("key", put), "info"):
        log_fields = fields(event="api_key_created", key=name, scopes=scopes, uid=os.getuid())
        logging.getLogger("noria.keys").info("the key %r is created", name, extra=log_fields)


def run_list(arguments: argparse.Namespace) -> int:
    """List the keys in the file of API keys: their names, scopes and limits."""
    from noria.frontend.access.api_keys import read_keys

    keys = read_keys(config_from(arguments).frontend.api_keys_file)
    if not keys:
        raise ConfigError("no file of API keys is named; set frontend.api_keys_file (--api-keys-file FILE).")
    width = max(len(key.name) for key in keys)
    for key in keys:
        print(f"{key.name:{width}}  {_describe(key)}")
    return 0


def run_webhook_secret(arguments: argparse.Namespace) -> int:
    """Print the secret that signs the webhooks of an API key; during a rotation two, the new one first."""
    from noria.folders import data_folder
    from noria.frontend.access.api_keys import check_name, read_keys
    from noria.jobs.webhooks.signing import format_secret, read_secrets, secret_file, secret_of_key

    check_name(arguments.name)
    config = config_from(arguments)
    names = [key.name for key in read_keys(config.frontend.api_keys_file)]
    if names and arguments.name not in names:
        raise ConfigError(
            f"there is no key {arguments.name!r} in {config.frontend.api_keys_file}."
            f"{did_you_mean(arguments.name, names)} Keys: {', '.join(names)}."
        )
    for secret in read_secrets(secret_file(config.jobs, data_folder(config, os.environ))):
        print(format_secret(secret_of_key(secret, arguments.name)))
    return 0


def _describe(key: "ApiKey") -> str:
    from noria.frontend.access.api_keys import format_scopes

    limits = {
        "images in flight": key.max_images_in_flight,
        "images a minute": key.images_per_minute,
        "texts in flight": key.max_texts_in_flight,
        "texts a minute": key.texts_per_minute,
    }
    parts = [format_scopes(key.scopes), *(f"{limit} {what}" for what, limit in limits.items() if limit is not None)]
    if key.weight != 1.0:
        parts.append(f"weight {key.weight:g}")
    if key.priority != "high":
        parts.append(f"priority {key.priority}")
    return "; ".join(parts)
