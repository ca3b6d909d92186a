"""The TOML file of API keys, their scopes and limits. `noria key create NAME` makes a key and prints its table.

    [[key]]
    name = "alice"
    sha256 = "…"                  # digest of the key; the file does not contain the key itself
    scopes = ["generate", "jobs"] # what it may do; optional, as is all below
    max_images_in_flight = 4
    images_per_minute = 60
    priority = "normal"           # the highest that the key may request
    max_texts_in_flight = 64      # as for images: texts to embed or classify
    texts_per_minute = 6000
    weight = 2.0                  # its share of an engine, beside 1 of other keys

A key is 256 random bits, so one unsalted round of SHA-256 protects it: salt and stretching protect guessable secrets
only.
"""

import hashlib
import pathlib
import re
import secrets
import tomllib
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from noria.errors import ConfigError, did_you_mean, short_repr
from noria.protocol.request import Priority

KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]  # needs no escaping in logs, headers and TOML

KeyScope = Literal["generate", "jobs", "metrics", "lineage", "deploy", "admin"]
"""A right of a key; `admin` includes the others."""

ALL_SCOPES: frozenset[KeyScope] = frozenset(get_args(KeyScope))
DEFAULT_SCOPES: frozenset[KeyScope] = frozenset({"generate", "jobs", "metrics"})
"""The scopes of a key whose table names none: what every key could do before there were scopes."""

_TABLE_HEADER = re.compile(r"\s*\[\[\s*(key|\"key\"|'key')\s*\]\]")


class ApiKey(Struct, frozen=True):
    """A table of the file."""

    name: KeyName
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    max_images_in_flight: Annotated[int, Meta(ge=1)] | None = None
    images_per_minute: Annotated[int, Meta(ge=1)] | None = None
    priority: Priority = "high"
    scopes: Annotated[frozenset[KeyScope], Meta(min_length=1)] = DEFAULT_SCOPES
    max_texts_in_flight: Annotated[int, Meta(ge=1)] | None = None
    texts_per_minute: Annotated[int, Meta(ge=1)] | None = None
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0


_ALLOWED_VALUES = {
    "name": "1 to 64 of A-Z a-z 0-9 . _ -",
    "sha256": "the key's SHA-256 in 64 lower-case hexadecimal digits, as `noria key create NAME` prints it",
    "scopes": f"a list of some of {', '.join(get_args(KeyScope))}, or leave it out",
    "max_images_in_flight": "a whole number from 1, or leave it out",
    "images_per_minute": "a whole number from 1, or leave it out",
    "priority": "low, normal, high, or leave it out",
    "max_texts_in_flight": "a whole number from 1, or leave it out",
    "texts_per_minute": "a whole number from 1, or leave it out",
    "weight": "a number from 0.01 to 100, or leave it out",
}


def key_digest(key: bytes) -> str:
    """Return the digest of a key, as the file has it."""
    return hashlib.sha256(key).hexdigest()


def format_scopes(scopes: Collection[KeyScope]) -> str:
    """Return the names of scopes in their usual order."""
    return ", ".join(scope for scope in get_args(KeyScope) if scope in scopes)


def check_name(name: str) -> None:
    """Raise ConfigError if `name` is not allowed as the name of a key."""
    _parse_key({"name": name, "sha256": "0" * 64}, "the key")


def generate_key(name: str, scopes: Sequence[str] | None = None) -> tuple[str, str]:
    """Return a new key and its table for the file. Raises ConfigError if `name` or `scopes` are not allowed."""
    key = f"noria_{secrets.token_urlsafe(32)}"
    table: dict[str, object] = {"name": name, "sha256": key_digest(key.encode())}
    if scopes is not None:
        table["scopes"] = list(scopes)
    entry = _parse_key(table, "the new key")
    lines = ["[[key]]", f'name = "{entry.name}"', f'sha256 = "{entry.sha256}"']
    if scopes is not None:
        quoted = format_scopes(entry.scopes).replace(", ", '", "')
        lines.append(f'scopes = ["{quoted}"]')
    return key, "\n".join(lines) + "\n"


def read_keys(setting: str) -> tuple[ApiKey, ...]:
    """Return the keys of the file that `frontend.api_keys_file` names; none if the setting is empty.

    Raises ConfigError: the file cannot be read, has no key, or an invalid one.
    """
    if not setting:
        return ()
    file = pathlib.Path(setting)
    try:
        text = file.read_text(encoding="utf-8-sig")
        tree = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        hint = " Make it with `noria key create NAME >> FILE`." if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"the file of keys {file} (frontend.api_keys_file) cannot be read: {error}.{hint}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the file of keys {file} is not TOML: {error}.") from error
    for unknown in tree.keys() - {"key"}:
        raise ConfigError(f"{file}: unknown key {unknown!r}; the file has [[key]] tables and nothing else.")
    tables = tree.get("key", [])
    if not isinstance(tables, list) or not tables:
        raise ConfigError(
            f"{file} has no [[key]] table, so no client could use the server. Add one with `noria key create NAME >> "
            f"{file}`, or leave frontend.api_keys_file empty."
        )
    places = _places_of_tables(text, len(tables))
    keys = tuple(_parse_key(table, f"{file}, {place}") for table, place in zip(tables, places, strict=True))
    _reject_duplicates(str(file), keys, places)
    return keys


def check_is_new(name: str, text: str) -> None:
    """Raise ConfigError if `text`, to which a key's table is about to be appended, has one of that name already."""
    try:
        tables = tomllib.loads(text).get("key", [])
    except tomllib.TOMLDecodeError:
        return  # no file of keys
    names = [table.get("name") for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    if name in names:
        raise ConfigError(
            f"the file has a key {name!r} already, {_places_of_tables(text, len(names))[names.index(name)]}. Take "
            "another name, or remove that table first, which revokes its key."
        )


def _places_of_tables(text: str, num_tables: int) -> list[str]:
    """Return where each table of the file is: its number, and its line if the file is written as is usual."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _TABLE_HEADER.match(line)]
    if len(lines) != num_tables:
        return [f"[[key]] {number}" for number in range(1, num_tables + 1)]
    return [f"[[key]] {number} in line {line}" for number, line in enumerate(lines, 1)]


def _parse_key(table: Any, where: str) -> ApiKey:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {short_repr(table)}; it must be a table: write [[key]] and its keys below.")
    for name in table:
        if name not in _ALLOWED_VALUES:
            raise ConfigError(
                f"{where}: unknown key {name!r}.{did_you_mean(name, _ALLOWED_VALUES)} Known are "
                f"{', '.join(_ALLOWED_VALUES)}."
            )
    for name in ("name", "sha256"):
        if name not in table:
            raise ConfigError(f"{where}: {name} is missing; it is {_ALLOWED_VALUES[name]}.")
    try:
        return msgspec.convert(table, ApiKey)
    except msgspec.ValidationError as error:
        name = str(error).rpartition(" - at `$.")[2].rstrip("`").partition("[")[0]
        # An invalid digest may be the key itself, put in the wrong place: do not print it.
        got = "not a digest" if name == "sha256" else short_repr(table[name])
        raise ConfigError(f"{where}: {name} is {got}; allowed is {_ALLOWED_VALUES[name]}.") from error


def _reject_duplicates(file: str, keys: Sequence[ApiKey], places: Sequence[str]) -> None:
    for number, key in enumerate(keys):
        for earlier, place in zip(keys[:number], places, strict=False):
            if key.name == earlier.name:
                raise ConfigError(
                    f"{file}: two keys are called {key.name!r}, {place} and {places[number]}. Rename one, or remove "
                    "the one that is to be revoked."
                )
            if key.sha256 == earlier.sha256:
                raise ConfigError(
                    f"{file}: {earlier.name!r} and {key.name!r} are the same key, {place} and {places[number]} have "
                    "the same sha256. Remove one, or make another key with `noria key create NAME`."
                )
