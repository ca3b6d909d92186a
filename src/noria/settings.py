"""Reads the settings that `noria.config` declares: once, at start-up, from file < environment < flags.

Unknown keys are errors.
"""

import json
import os
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from noria.config import Config
from noria.errors import ConfigError, did_you_mean, short_repr

_KUBERNETES_VARIABLE = re.compile(r"NORIA(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://")
"""Variables that Kubernetes sets in each pod beside a Service named `noria` or `noria-…`; they are no settings.

These are the names that only Kubernetes uses, and `NORIA_PORT` or `NORIA_…_PORT` if the value is a URL.
"""


class Setting(Struct, frozen=True):
    """One declared setting, as flags, environment and documentation see it."""

    path: tuple[str, ...]  # in the tree: ("engine", "slots")
    annotation: Any  # its annotated type
    default: Any
    description: str

    @property
    def key(self) -> str:
        """Its key in the TOML file: `engine.slots`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Its environment variable: `NORIA_ENGINE_SLOTS`."""
        return "_".join(("NORIA", *self.path)).upper()

    @property
    def flag(self) -> str:
        """Its command-line flag: `--slots`; with its section, `--registry-database`, of registry and statistics."""
        names = self.path if self.path[0] in ("registry", "statistics") else self.path[-1:]
        return "--" + "-".join(names).replace("_", "-")


def list_settings(struct: type[Struct] = Config, prefix: tuple[str, ...] = ()) -> list[Setting]:
    """Every setting of the tree, in the order of declaration."""
    found: list[Setting] = []
    for field in msgspec.structs.fields(struct):
        path = (*prefix, field.name)
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            found += list_settings(field.type, path)
            continue
        descriptions = [
            meta.description for meta in get_args(field.type)[1:] if isinstance(meta, Meta) and meta.description
        ]
        assert len(descriptions) == 1, f"{path} needs one description"
        found.append(Setting(path, field.type, field.default, descriptions[0]))
    return found


def load(file: str | os.PathLike[str] | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """Merge a TOML `file` (or none), `environment`, and `flags` by setting key into a Config; later sources win.

    Flags and variables are strings; they are parsed as the type of the setting.

    Raises:
        ConfigError: an unreadable file, an unknown key (with the nearest known one), or a value that is not allowed.

    """
    tree: dict[str, Any] = _read_file(pathlib.Path(file)) if file is not None else {}
    known = {setting.variable: setting for setting in list_settings()}
    for name, text in environment.items():
        if not name.startswith("NORIA_") or _is_from_kubernetes(name, text):
            continue
        if name not in known:
            same_suffix = [variable for variable in known if variable.endswith(name.removeprefix("NORIA"))]
            raise ConfigError(
                f"environment variable {name} is not a setting.{did_you_mean(name, same_suffix or known)} See "
                "docs/settings.md."
            )
        _put(tree, known[name], text, f"environment variable {name}")
    by_key = {setting.key: setting for setting in list_settings()}
    for key, value in flags.items():
        _put(tree, by_key[key], value, f"flag {by_key[key].flag}")
    return _convert(tree)


def _is_from_kubernetes(name: str, text: str) -> bool:
    """Whether the variable describes a Service. A name may be that of a setting, too; a value never is."""
    if _KUBERNETES_VARIABLE.fullmatch(name):
        return True
    return name.endswith("_PORT") and _KUBERNETES_URL.match(text) is not None


def _read_file(file: pathlib.Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {file} is not TOML: {error}") from error
    _reject_unknown(tree, Config, str(file), "")
    return tree


def _reject_unknown(tree: dict[str, Any], struct: type[Struct], where: str, prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key {prefix + key!r}.{did_you_mean(key, fields)} Known keys: {', '.join(fields)}."
            )
        field_type = fields[key]
        if isinstance(field_type, type) and issubclass(field_type, Struct):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {prefix}{key} is {short_repr(value)}; it must be a table: write [{prefix}{key}] and its "
                    "keys below."
                )
            _reject_unknown(value, field_type, where, f"{prefix}{key}.")


def _put(tree: dict[str, Any], setting: Setting, value: Any, source: str) -> None:
    *parents, name = setting.path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = _parse(value, setting, source) if isinstance(value, str) else value


def _parse(text: str, setting: Setting, source: str) -> Any:
    """`text` converted to the type of the setting.

    It is a string, `true` or `false`, a number, a comma-separated list, or an array of tables as TOML has it.
    """
    value: Any = text
    declared = get_args(setting.annotation)[0]
    if get_origin(declared) is tuple:
        value = [part.strip() for part in text.strip("[]").split(",") if part.strip()]
        if isinstance(get_args(declared)[0], type) and issubclass(get_args(declared)[0], Struct):
            value = _parse_toml(text, setting, source)
    try:
        return msgspec.to_builtins(msgspec.convert(value, setting.annotation, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source} is {short_repr(text)}: {_error_text(error)}. {_describe(setting)}") from error


def _parse_toml(text: str, setting: Setting, source: str) -> Any:
    try:
        return tomllib.loads(f"value = {text or '[]'}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source} is {short_repr(text)}, which is not TOML: {error}. {_describe(setting)}"
        ) from error


def _convert(tree: dict[str, Any]) -> Config:
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        key = str(error).rpartition(" - at `$.")[2].rstrip("`").partition("[")[0]
        known = {setting.key: setting for setting in list_settings()}
        value = _value_at(tree, key)
        description = _describe(known[key]) if key in known else ""
        raise ConfigError(f"setting {key} is {short_repr(value)}: {_error_text(error)}. {description}") from error


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else tree
    return tree


def _error_text(error: msgspec.ValidationError) -> str:
    text = str(error).partition(" - at `")[0]
    return "not an allowed value" if text.startswith("Invalid enum") else text[:1].lower() + text[1:]


def _describe(setting: Setting) -> str:
    allowed_text = allowed(setting)
    return f"{setting.key} is: {setting.description}." + (f" Allowed: {allowed_text}." if allowed_text else "")


def allowed(setting: Setting) -> str:
    """The words and ranges that `setting` allows, comma-separated; empty if any text is allowed."""
    return ", ".join(_allowed(setting.annotation))


def _allowed(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) is Annotated and get_args(annotation)[0] in (int, float):
        return [bounds for meta in get_args(annotation)[1:] if (bounds := _bounds(meta))]
    if get_origin(annotation) is Annotated:
        return _allowed(get_args(annotation)[0])
    return [text for part in get_args(annotation) if part is not Ellipsis for text in _allowed(part)]


def _bounds(meta: Meta) -> str:
    if meta.ge is None:
        return f"> {meta.gt}, ≤ {meta.le}"
    return f"≥ {meta.ge}" if meta.le is None else f"{meta.ge}–{meta.le}"


def settings_docs() -> str:
    """The text of docs/settings.md; `make docs` writes it."""
    lines = [
        "# Settings",
        "",
        "Settings are read once, at start-up, from a TOML file (`noria serve --config FILE`), environment",
        "variables and flags; later sources win. An unknown key or `NORIA_` variable is an error. Lists are",
        "comma-separated in variables and flags; boolean flags are `--flag` and `--no-flag`. `make docs`",
        "writes this page from `src/noria/config/`.",
    ]
    section: tuple[str, ...] | None = None
    for setting in list_settings():
        if setting.path[:-1] != section:
            section = setting.path[:-1]
            title = f"## `[{'.'.join(section)}]`" if section else "## At the top of the file"
            columns = ["| key | variable | flag | default | allowed | description |", "|---|---|---|---|---|---|"]
            lines += ["", title, "", *columns]
        cells = (
            f"`{setting.path[-1]}`",
            f"`{setting.variable}`",
            f"`{setting.flag}`",
            f"`{toml_value(setting.default)}`",
        )
        lines.append(f"| {' | '.join(cells)} | {allowed(setting)} | {setting.description} |")
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A default value in TOML syntax."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
